//! Scratch buffers: of a thread, and such as change their length.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static BUFFER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Length of every thread's buffer at first use, so that it grows once and the token path does not
/// allocate.
static BUFFER_LEN: AtomicUsize = AtomicUsize::new(0);

/// Makes all buffers used from now on at least `len` floats long.
pub(crate) fn reserve(len: usize) {
    BUFFER_LEN.fetch_max(len, Ordering::Relaxed);
}

/// Runs `f` with this thread's buffer of at least `len` floats. Its contents are arbitrary.
pub(crate) fn with_thread_buffer<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < len {
            buffer.resize(len.max(BUFFER_LEN.load(Ordering::Relaxed)), 0.0);
        }
        f(&mut buffer[..len])
    })
}

/// Replaces a buffer by zeros of another length. Frees the old one first, so that both never exist at once.
pub(crate) fn renew(buffer: &mut Vec<f32>, len: usize) {
    *buffer = Vec::new();
    *buffer = vec![0.0; len];
}
