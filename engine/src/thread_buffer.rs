//! Scratch buffers: one per thread, and resizable ones.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A thread's buffer, and the value of [`SET`] when it was allocated.
#[derive(Default)]
struct Buffer {
    floats: Vec<f32>,
    made: usize,
}

thread_local! {
    static BUFFER: RefCell<Buffer> = RefCell::default();
}

/// Length of every thread's buffer in floats. Buffers are allocated once, so decoding does not
/// allocate.
static BUFFER_LEN: AtomicUsize = AtomicUsize::new(0);

/// Number of times the length was set.
static SET: AtomicUsize = AtomicUsize::new(0);

/// Sets the length of all buffers to at least `len` floats.
pub(crate) fn reserve(len: usize) {
    BUFFER_LEN.fetch_max(len, Ordering::Relaxed);
}

/// Sets the length of all buffers to `len` floats; longer ones are reallocated on next use.
pub(crate) fn set_len(len: usize) {
    BUFFER_LEN.store(len, Ordering::Relaxed);
    SET.fetch_add(1, Ordering::Release);
}

/// Calls `f` with this thread's buffer of at least `len` floats of arbitrary content.
pub(crate) fn with_thread_buffer<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    BUFFER.with_borrow_mut(|buffer| {
        let set = SET.load(Ordering::Acquire);
        if buffer.floats.len() < len || buffer.made != set {
            let wanted = len.max(BUFFER_LEN.load(Ordering::Relaxed));
            renew(&mut buffer.floats, wanted);
            buffer.made = set;
        }
        f(&mut buffer.floats[..len])
    })
}

/// Replaces a buffer by zeros of another length. The old one is freed first, so that both never
/// exist at once.
pub(crate) fn renew(buffer: &mut Vec<f32>, len: usize) {
    *buffer = Vec::new();
    *buffer = vec![0.0; len];
}
