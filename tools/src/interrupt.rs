//! Ctrl-C: sets the stop flag of the running command, or removes unfinished files and exits.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use crate::tell::tell;
use crate::terminal;

/// Data of the signal handler.
struct HandlerState {
    /// Stop flag of the running command, if it can stop cleanly.
    flag: Option<Arc<AtomicBool>>,
    /// Unfinished files and folders that cannot be resumed.
    unfinished: Vec<PathBuf>,
    /// What to do in place of a plain message.
    at_stop: Option<Box<dyn FnOnce() + Send>>,
}

static STATE: Mutex<HandlerState> = Mutex::new(HandlerState {
    flag: None,
    unfinished: Vec::new(),
    at_stop: None,
});

fn state() -> MutexGuard<'static, HandlerState> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first Ctrl-C sets `flag`, so that the command can end cleanly; the second one exits.
pub fn on_ctrl_c(flag: &Arc<AtomicBool>) {
    state().flag = Some(flag.clone());
    listen();
}

/// A file or folder that Ctrl-C removes while this value lives.
#[derive(Debug)]
pub struct Unfinished(Option<PathBuf>);

impl Unfinished {
    /// Registers `path`, which this process is writing.
    pub fn at(path: &Path) -> Self {
        state().unfinished.push(path.to_owned());
        listen();
        Self(Some(path.to_owned()))
    }

    /// Registers `path`, which this process is about to create; does nothing if it already exists.
    pub fn planned(path: &Path) -> Self {
        match path.symlink_metadata() {
            Ok(_) => Self(None),
            Err(_) => Self::at(path),
        }
    }

    /// As [`planned`](Self::planned), for the `.partial` file that a writer of `path` fills.
    pub fn partial(path: &Path) -> Self {
        Self::planned(&with_suffix(path, ".partial"))
    }
}

/// What Ctrl-C does before the program ends, in place of its message, while this value lives.
#[derive(Debug)]
pub struct AtStop(());

impl AtStop {
    /// Registers `last`.
    pub fn new(last: impl FnOnce() + Send + 'static) -> Self {
        state().at_stop = Some(Box::new(last));
        listen();
        Self(())
    }
}

impl Drop for AtStop {
    fn drop(&mut self) {
        state().at_stop = None;
    }
}

/// `path` with `ending` appended to its name.
pub fn with_suffix(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let unfinished = &mut state().unfinished;
        let place = unfinished.iter().position(|p| Some(p) == self.0.as_ref());
        if let Some(place) = place {
            unfinished.swap_remove(place);
        }
    }
}

/// Installs the handler once.
fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Err(e) = ctrlc::set_handler(stop) {
            tracing::warn!("Ctrl-C will end the program at once: {e}");
        }
    });
}

/// Waits for Ctrl-C on its own thread.
fn stop() {
    let mut state = state();
    if let Some(flag) = &state.flag
        && !flag.swap(true, Ordering::Relaxed)
    {
        return;
    }
    for path in &state.unfinished {
        // The writer may still be creating files.
        let gone = || match path.symlink_metadata() {
            Ok(m) if m.is_dir() => std::fs::remove_dir_all(path).is_ok(),
            Ok(_) => std::fs::remove_file(path).is_ok(),
            Err(_) => true,
        };
        if !gone() && !gone() {
            tell(format_args!(
                "emberflow: {} is incomplete; delete it",
                path.display()
            ));
        }
    }
    terminal::restore();
    let last = state.at_stop.take();
    // It may take its time, and others may end meanwhile.
    drop(state);
    match last {
        Some(last) => last(),
        // The same message as when a command stops by itself.
        None => tell("emberflow: stopped"),
    }
    std::process::exit(130);
}
