//! Progress bars on standard error: shown on a terminal, silent in a pipe.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use emberflow_storage::mem;
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

/// Follows how the resident set of this process grows, until it is dropped: what is read into memory
/// shows there, whoever reads it.
pub struct Loading {
    /// Its end ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Loading {
    /// A bar over the `total` bytes by which memory is about to grow; nothing where nobody sees it.
    pub fn start(what: &str, total: u64) -> Self {
        let bar = bytes(what, total);
        let Some(before) = mem::rss().filter(|_| !bar.is_hidden()) else {
            return Self {
                stop: None,
                thread: None,
            };
        };
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            let grown = || mem::rss().unwrap_or(0).saturating_sub(before);
            bar.tick();
            while stopped.recv_timeout(Duration::from_millis(100)) == Err(RecvTimeoutError::Timeout)
            {
                bar.set_position(grown().min(total));
            }
            bar.finish_and_clear();
        });
        Self {
            stop: Some(stop),
            thread: Some(thread),
        }
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A bar that failed is no reason to fail.
            let _ = thread.join();
        }
    }
}
