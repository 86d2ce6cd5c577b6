//! The chat page at `/`. Its files are in `page/` and are part of the program; those in `page/vendor` are libraries of others.

use axum::Router;
use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// Where the page's files are.
pub const FILES: &str = "/page/";

/// Forbids requests to other hosts, and scripts and styles that are not files of the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self'; \
                      connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'";

const INDEX: &str = include_str!("page/index.html");

/// The licences of the libraries.
const LICENCES: &str = concat!(
    "marked\n\n",
    include_str!("page/vendor/marked.LICENSE"),
    "\n\nhighlight.js\n\n",
    include_str!("page/vendor/highlight.LICENSE"),
    "\n\nKaTeX\n\n",
    include_str!("page/vendor/katex.LICENSE"),
);

macro_rules! files {
    ($($path:literal)*) => {
        [$(($path, include_bytes!(concat!("page/", $path)).as_slice())),*]
    };
}

/// Paths below [`FILES`], and contents.
static PARTS: [(&str, &[u8]); 36] = files![
    "app.js" "composer.js" "conversation.js" "dom.js" "performance.js" "render.js" "server.js" "settings.js" "sidebar.js"
    "store.js" "style.css" "icon.svg"
    "vendor/marked.js" "vendor/highlight.js" "vendor/katex.js" "vendor/katex.css"
    "vendor/fonts/KaTeX_AMS-Regular.woff2"
    "vendor/fonts/KaTeX_Caligraphic-Bold.woff2" "vendor/fonts/KaTeX_Caligraphic-Regular.woff2"
    "vendor/fonts/KaTeX_Fraktur-Bold.woff2" "vendor/fonts/KaTeX_Fraktur-Regular.woff2"
    "vendor/fonts/KaTeX_Main-Bold.woff2" "vendor/fonts/KaTeX_Main-BoldItalic.woff2"
    "vendor/fonts/KaTeX_Main-Italic.woff2" "vendor/fonts/KaTeX_Main-Regular.woff2"
    "vendor/fonts/KaTeX_Math-BoldItalic.woff2" "vendor/fonts/KaTeX_Math-Italic.woff2"
    "vendor/fonts/KaTeX_SansSerif-Bold.woff2" "vendor/fonts/KaTeX_SansSerif-Italic.woff2"
    "vendor/fonts/KaTeX_SansSerif-Regular.woff2" "vendor/fonts/KaTeX_Script-Regular.woff2"
    "vendor/fonts/KaTeX_Size1-Regular.woff2" "vendor/fonts/KaTeX_Size2-Regular.woff2"
    "vendor/fonts/KaTeX_Size3-Regular.woff2" "vendor/fonts/KaTeX_Size4-Regular.woff2"
    "vendor/fonts/KaTeX_Typewriter-Regular.woff2"
];

/// The page and its files.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
        .route("/", get(async || file("index.html", INDEX.as_bytes())))
        .route(
            "/page/{*path}",
            get(async |Path(path): Path<String>| part(&path)),
        )
}

fn part(path: &str) -> Response {
    if path == "licences.txt" {
        return file(path, LICENCES.as_bytes());
    }
    match PARTS.iter().find(|(name, _)| *name == path) {
        Some((name, content)) => file(name, content),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

fn file(path: &str, content: &'static [u8]) -> Response {
    let kind = match path.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("woff2") => "font/woff2",
        _ => "text/plain; charset=utf-8",
    };
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        // Another version of the program has other files of the same names.
        (header::CACHE_CONTROL, "no-cache"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, content).into_response()
}
