//! Progress bars on standard error: shown on a terminal, silent in a pipe.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over `total` bytes.
pub fn bytes(what: &str, total: u64) -> ProgressBar {
    styled(
        total,
        what,
        "{msg} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} eta {eta}",
    )
}

/// A bar over `total` steps.
pub fn steps(what: &str, total: u64) -> ProgressBar {
    styled(total, what, "{msg} [{bar:30}] {pos}/{len} eta {eta}")
}

fn styled(total: u64, what: &str, template: &str) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(what.to_owned());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}
