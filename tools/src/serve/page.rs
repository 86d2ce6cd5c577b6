//! The web UI at `/`: chat and engine statistics. Its parts are in `page/`.

use axum::http::header;
use axum::response::IntoResponse;

/// A single self-contained document.
const PAGE: &str = concat!(
    "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n",
    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n",
    "<title>Emberflow</title>\n<style>\n",
    include_str!("page/style.css"),
    "</style>\n",
    include_str!("page/body.html"),
    "<script>\n\"use strict\";\n",
    include_str!("page/markdown.js"),
    include_str!("page/chat.js"),
    include_str!("page/engine.js"),
    "</script>\n</html>\n",
);

/// Serves the page with a policy that forbids external scripts and requests.
pub async fn page() -> impl IntoResponse {
    let policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                  connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'";
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, policy),
    ];
    (headers, PAGE)
}
