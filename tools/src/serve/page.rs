//! The page at `/`: conversations, and what the engine does. `page/` has its parts.

use axum::http::header;
use axum::response::IntoResponse;

/// One document, so that it needs nothing else.
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

/// It may run nothing from elsewhere and ask nobody else.
pub async fn page() -> impl IntoResponse {
    let policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                  connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'";
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, policy),
    ];
    (headers, PAGE)
}
