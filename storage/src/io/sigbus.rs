//! SIGBUS handling for mapped files.
//!
//! The kernel sends SIGBUS to a thread that touches a mapped page beyond the end of its file, or
//! one that the device cannot read. The program cannot continue, and death by a signal gives no
//! reason. So while a [`Watch`] lives, a handler names the file and exits. Every other SIGBUS is
//! passed to the previous handler.
#![allow(unsafe_code)]

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Exit code of the handler; the program uses it for damaged containers.
pub const EXIT_CODE: i32 = 3;

/// Upper bound on watched mappings. One more is not an error, but dies without a message.
const PLACES: usize = 16;

/// A watched mapping, as the handler reads it. Empty while `len` is 0.
struct Place {
    start: AtomicUsize,
    len: AtomicUsize,
    text: AtomicPtr<u8>,
    text_len: AtomicUsize,
}

impl Place {
    const fn empty() -> Self {
        Self {
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            text: AtomicPtr::new(ptr::null_mut()),
            text_len: AtomicUsize::new(0),
        }
    }
}

static WATCHED: [Place; PLACES] = [const { Place::empty() }; PLACES];

/// The previous SIGBUS action. Never freed: another thread's handler may be reading it.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Number of live watches. Holding it permits changing [`WATCHED`] and the handler.
static LIVING: Mutex<usize> = Mutex::new(0);

/// While it lives, a SIGBUS inside its range prints a message to standard error and exits.
#[derive(Debug)]
pub(crate) struct Watch {
    /// `None` if all places were taken.
    place: Option<usize>,
    /// What the handler prints.
    _text: Box<[u8]>,
}

impl Watch {
    /// Watches the `len` bytes from address `start` on; `text` is printed verbatim.
    ///
    /// # Errors
    /// If the system refuses the handler.
    pub(crate) fn new(start: usize, len: usize, text: String) -> io::Result<Self> {
        let text = text.into_bytes().into_boxed_slice();
        let mut living = LIVING.lock().unwrap_or_else(PoisonError::into_inner);
        if *living == 0 {
            install()?;
        }
        *living += 1;
        let free = |p: &Place| p.len.load(Ordering::Relaxed) == 0;
        let place = WATCHED.iter().position(free);
        if let Some(place) = place.map(|i| &WATCHED[i]) {
            place.start.store(start, Ordering::Relaxed);
            place
                .text
                .store(text.as_ptr().cast_mut(), Ordering::Relaxed);
            place.text_len.store(text.len(), Ordering::Relaxed);
            // last: a handler that sees the length sees the rest
            place.len.store(len, Ordering::Release);
        }
        Ok(Self { place, _text: text })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut living = LIVING.lock().unwrap_or_else(PoisonError::into_inner);
        // No one reads the mapping any more, so no handler is about to read the text.
        if let Some(place) = self.place {
            WATCHED[place].len.store(0, Ordering::Release);
        }
        *living -= 1;
        if *living == 0 {
            uninstall();
        }
    }
}

/// A zeroed action.
fn blank() -> libc::sigaction {
    // SAFETY: a C structure of integers, a bit set and optional pointers: zeros are valid.
    unsafe { std::mem::zeroed() }
}

fn install() -> io::Result<()> {
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = tell;
    let mut ours = blank();
    ours.sa_sigaction = handler as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let before = Box::into_raw(Box::new(blank()));
    // SAFETY: both point to our own actions. The handler is async-signal-safe: it reads atomics and
    // memory that outlives its place in `WATCHED`, and calls only sigaction, signal, raise, write
    // and _exit.
    let rc = unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, before) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    BEFORE.store(before, Ordering::Release);
    Ok(())
}

/// Restores the previous action, unless another handler was installed meanwhile.
fn uninstall() {
    let before = BEFORE.swap(ptr::null_mut(), Ordering::AcqRel);
    if before.is_null() {
        return;
    }
    let mut now = blank();
    // SAFETY: reads the current action into our own; sets one that the system returned.
    unsafe {
        libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut now);
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = tell;
        if now.sa_sigaction == handler as usize {
            libc::sigaction(libc::SIGBUS, before, ptr::null_mut());
        }
    }
}

/// The signal handler.
extern "C" fn tell(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo. It has an address if the signal came from a fault,
    // whose codes are positive.
    let (code, at) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code > 0 {
        for place in &WATCHED {
            let len = place.len.load(Ordering::Acquire);
            let start = place.start.load(Ordering::Relaxed);
            if at.wrapping_sub(start) < len {
                let text = place.text.load(Ordering::Relaxed);
                let text_len = place.text_len.load(Ordering::Relaxed);
                // SAFETY: a thread that faults in the mapping borrows it, so its watch and the text
                // live. Both calls are async-signal-safe.
                unsafe {
                    libc::write(libc::STDERR_FILENO, text.cast(), text_len);
                    libc::_exit(EXIT_CODE);
                }
            }
        }
    }
    // Not ours: restore the previous action. A fault recurs when this returns; a sent signal does
    // not, so raise it again.
    let before = BEFORE.load(Ordering::Acquire);
    // SAFETY: an action that the system returned and that is never freed, or the default one; the
    // calls are async-signal-safe.
    unsafe {
        if before.is_null() {
            libc::signal(signal, libc::SIG_DFL);
        } else {
            libc::sigaction(signal, before, ptr::null_mut());
        }
        if code <= 0 {
            libc::raise(signal);
        }
    }
}
