//! What becomes of a program that reads a mapped file which was shortened.
//!
//! The kernel sends SIGBUS to a thread that touches a mapped page behind the end of its file, or one
//! that the device cannot deliver. Nothing can be computed then, and a program that dies of a signal
//! tells nobody why. So while a [`Watch`] lives, a handler says which file it was and ends the
//! process. Every other SIGBUS goes to whoever handled it before.
#![allow(unsafe_code)]

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Exit code of a process that ends here; the program uses it for damaged containers.
pub const EXIT_CODE: i32 = 3;

/// Mappings that can be watched at once; one more is not an error, it dies without a word.
const PLACES: usize = 16;

/// A watched mapping, as the handler reads it. It is empty while `len` is 0.
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

/// What handled SIGBUS before. Never freed: another thread's handler may be reading it.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// How many watches live. Whoever changes [`WATCHED`] or the handler holds it.
static LIVING: Mutex<usize> = Mutex::new(0);

/// While it lives, a SIGBUS inside a range of memory is told on standard error.
#[derive(Debug)]
pub(crate) struct Watch {
    /// `None` when all places were taken.
    place: Option<usize>,
    /// What the handler prints.
    _text: Box<[u8]>,
}

impl Watch {
    /// Watches the `len` bytes from address `start` on; `text` is printed as it is.
    ///
    /// # Errors
    /// When the system refuses the handler.
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
            // last: whoever sees the length sees the rest
            place.len.store(len, Ordering::Release);
        }
        Ok(Self { place, _text: text })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut living = LIVING.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody reads the mapping any more, so no handler is about to read the text either.
        if let Some(place) = self.place {
            WATCHED[place].len.store(0, Ordering::Release);
        }
        *living -= 1;
        if *living == 0 {
            uninstall();
        }
    }
}

/// An action that does nothing yet.
fn blank() -> libc::sigaction {
    // SAFETY: a C structure of integers, a set of bits and optional pointers: zeros are valid.
    unsafe { std::mem::zeroed() }
}

fn install() -> io::Result<()> {
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = tell;
    let mut ours = blank();
    ours.sa_sigaction = handler as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let before = Box::into_raw(Box::new(blank()));
    // SAFETY: both point to actions of ours. The handler does only what a handler may: it reads
    // atomics and memory that outlives its place in `WATCHED`, and calls sigaction, raise, write and
    // _exit, which POSIX lists as safe there.
    let rc = unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, before) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    BEFORE.store(before, Ordering::Release);
    Ok(())
}

/// Gives SIGBUS back to who had it, unless somebody else has taken it meanwhile.
fn uninstall() {
    let before = BEFORE.swap(ptr::null_mut(), Ordering::AcqRel);
    if before.is_null() {
        return;
    }
    let mut now = blank();
    // SAFETY: reads the present action into one of ours; sets one that the system gave us, or gives
    // back the one just read.
    unsafe {
        libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut now);
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = tell;
        if now.sa_sigaction == handler as usize {
            libc::sigaction(libc::SIGBUS, before, ptr::null_mut());
        }
    }
}

/// The handler.
extern "C" fn tell(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands over valid facts about the signal. An address is among them when the
    // signal came from a fault, whose codes are positive.
    let (code, at) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code > 0 {
        for place in &WATCHED {
            let len = place.len.load(Ordering::Acquire);
            let start = place.start.load(Ordering::Relaxed);
            if at.wrapping_sub(start) < len {
                let text = place.text.load(Ordering::Relaxed);
                let text_len = place.text_len.load(Ordering::Relaxed);
                // SAFETY: a thread that faults in the mapping borrows it, so its watch lives, and
                // with it the text. Both calls may be made in a handler.
                unsafe {
                    libc::write(libc::STDERR_FILENO, text.cast(), text_len);
                    libc::_exit(EXIT_CODE);
                }
            }
        }
    }
    // Not ours: as it was before. A fault comes again when this returns; a signal that somebody
    // sent does not.
    let before = BEFORE.load(Ordering::Acquire);
    // SAFETY: an action that the system gave us and nobody frees, or the default one; both calls may
    // be made in a handler.
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
