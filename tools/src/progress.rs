//! Progress bars on standard error; hidden if it is not a terminal.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use emberflow_storage::mem;
use indicatif::{ProgressBar, ProgressStyle};

use crate::tell::tell;

/// A progress bar over `total` bytes.
pub fn bytes(what: &str, total: u64) -> ProgressBar {
    styled(
        total,
        what,
        "{msg} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} eta {eta}",
    )
}

/// A progress bar over `total` bytes, of which `done` are there from an earlier attempt.
pub fn resumed_bytes(what: &str, total: u64, done: u64) -> ProgressBar {
    let bar = bytes(what, total);
    bar.set_position(done);
    // The speed is that of this attempt.
    bar.reset_eta();
    bar
}

/// A progress bar over `total` steps.
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

/// Without a terminal, shorter work is not reported.
const MOMENT: Duration = Duration::from_secs(2);

/// A progress bar that moves by itself until it is dropped.
pub struct Loading {
    /// Dropping it ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Loading {
    /// A bar over the `total` bytes that are about to be loaded, by the resident set of this process; hidden if standard error is not a terminal.
    pub fn start(what: &str, total: u64) -> Self {
        let before = mem::rss().unwrap_or(0);
        let grown = move || mem::rss().unwrap_or(0).saturating_sub(before);
        Self::moving(bytes(what, total), move |bar| {
            bar.set_position(grown().min(total))
        })
    }

    /// A line with the current work and its duration so far, for work of unknown length. If standard error is not a terminal,
    /// it is written once, after a moment.
    pub fn waiting(what: &str) -> Self {
        let bar = styled(0, what, "{msg} {elapsed}");
        match bar.is_hidden() {
            true => Self::told(format!("emberflow: {what}")),
            false => Self::moving(bar, ProgressBar::tick),
        }
    }

    fn told(line: String) -> Self {
        let (stop, stopped) = channel();
        let thread = Builder::new().name("ember-progress".into());
        let thread = thread.spawn(move || {
            if stopped.recv_timeout(MOMENT) == Err(RecvTimeoutError::Timeout) {
                tell(line);
            }
        });
        Self {
            stop: Some(stop),
            thread: thread.ok(),
        }
    }

    fn moving(bar: ProgressBar, step: impl Fn(&ProgressBar) + Send + 'static) -> Self {
        if bar.is_hidden() {
            return Self {
                stop: None,
                thread: None,
            };
        }
        let (stop, stopped) = channel();
        // No bar if no thread is available.
        let thread = Builder::new().name("ember-progress".into());
        let thread = thread.spawn(move || {
            bar.tick();
            while stopped.recv_timeout(Duration::from_millis(100)) == Err(RecvTimeoutError::Timeout)
            {
                step(&bar);
            }
            bar.finish_and_clear();
        });
        Self {
            stop: Some(stop),
            thread: thread.ok(),
        }
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A failed progress bar must not fail the command.
            let _ = thread.join();
        }
    }
}
