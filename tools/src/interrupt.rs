//! Ctrl-C: who is at work is asked to stop, and what would be of no use is removed.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use crate::tell::tell;

/// What the handler looks at.
struct State {
    /// Who stops by itself.
    flag: Option<Arc<AtomicBool>>,
    /// Files and folders that are not whole yet and cannot be gone on with.
    unfinished: Vec<PathBuf>,
}

static STATE: Mutex<State> = Mutex::new(State {
    flag: None,
    unfinished: Vec::new(),
});

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets `flag` at the first Ctrl-C, so that the work can end well; a second one ends the program.
pub fn sets(flag: &Arc<AtomicBool>) {
    state().flag = Some(flag.clone());
    listen();
}

/// A file or folder that Ctrl-C removes as long as this lives.
#[derive(Debug)]
pub struct Unfinished(Option<PathBuf>);

impl Unfinished {
    /// What this process writes at `path`.
    pub fn at(path: &Path) -> Self {
        state().unfinished.push(path.to_owned());
        listen();
        Self(Some(path.to_owned()))
    }

    /// What this process is about to make at `path`; what is there already is somebody else's.
    pub fn to_be(path: &Path) -> Self {
        match path.symlink_metadata() {
            Ok(_) => Self(None),
            Err(_) => Self::at(path),
        }
    }

    /// [`to_be`](Self::to_be) of the sibling that a writer of `path` fills until it is whole.
    pub fn partial(path: &Path) -> Self {
        Self::to_be(&beside(path, ".partial"))
    }
}

/// `path` with something appended to its name.
pub fn beside(path: &Path, ending: &str) -> PathBuf {
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

/// Has the handler in place, once.
fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Err(e) = ctrlc::set_handler(stop) {
            tracing::warn!("Ctrl-C will end the program at once: {e}");
        }
    });
}

/// Runs on a thread of its own.
fn stop() {
    let state = state();
    if let Some(flag) = &state.flag
        && !flag.swap(true, Ordering::Relaxed)
    {
        return;
    }
    for path in &state.unfinished {
        // whoever writes there may be a step behind
        let gone = || match path.symlink_metadata() {
            Ok(m) if m.is_dir() => std::fs::remove_dir_all(path).is_ok(),
            Ok(_) => std::fs::remove_file(path).is_ok(),
            Err(_) => true,
        };
        if !gone() && !gone() {
            tell(format_args!(
                "emberflow: {} is left unfinished; delete it",
                path.display()
            ));
        }
    }
    // as where a command ends by itself
    tell("emberflow: stopped");
    std::process::exit(130);
}
