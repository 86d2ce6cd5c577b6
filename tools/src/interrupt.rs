//! Ctrl-C.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Sets `flag` at the first Ctrl-C, so that the work can end well; a second one ends the program.
pub fn sets(flag: &Arc<AtomicBool>) {
    let handler = flag.clone();
    let set = ctrlc::set_handler(move || {
        if handler.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    if let Err(e) = set {
        tracing::warn!("Ctrl-C will end the program at once: {e}");
    }
}
