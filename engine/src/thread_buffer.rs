//! Scratch buffers: of a thread, and such as change their length.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A thread's buffer, and how often lengths had been set when it was made.
#[derive(Default)]
struct Buffer {
    floats: Vec<f32>,
    made: usize,
}

thread_local! {
    static BUFFER: RefCell<Buffer> = RefCell::default();
}

/// Length of every thread's buffer, so that it grows once and the token path does not allocate.
static BUFFER_LEN: AtomicUsize = AtomicUsize::new(0);

/// How often it was set.
static SET: AtomicUsize = AtomicUsize::new(0);

/// Makes all buffers used from now on at least `len` floats long.
pub(crate) fn reserve(len: usize) {
    BUFFER_LEN.fetch_max(len, Ordering::Relaxed);
}

/// Makes them `len` floats long, each when it is used next, where they may be longer.
pub(crate) fn set_len(len: usize) {
    BUFFER_LEN.store(len, Ordering::Relaxed);
    SET.fetch_add(1, Ordering::Release);
}

/// Runs `f` with this thread's buffer of at least `len` floats. Its contents are arbitrary.
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

/// Replaces a buffer by zeros of another length. Frees the old one first, so that both never exist at once.
pub(crate) fn renew(buffer: &mut Vec<f32>, len: usize) {
    *buffer = Vec::new();
    *buffer = vec![0.0; len];
}
