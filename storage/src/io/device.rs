//! What an engine needs from the thing that carries commands out: start one, collect results.
//!
//! A device knows nothing of slots, reads or short reads; it is the raw kernel interface with its
//! error numbers. Everything with memory of what was asked lives in [`super::engine::IoEngine`],
//! which is the same for all devices.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use super::sys::Command;

/// The outcome of one command: bytes read, or a negative error number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reaped {
    pub(crate) id: u32,
    pub(crate) result: i32,
}

impl Reaped {
    /// Carries a command out on this thread.
    ///
    /// # Safety
    /// The pieces and the memory they name must be valid and used by nobody else.
    pub(crate) unsafe fn by(command: &Command) -> Self {
        Self {
            id: command.id,
            // SAFETY: passed on from the caller.
            result: unsafe { command.run() },
        }
    }
}

/// Interrupts [`Device::reap`] from another thread.
pub(crate) type Waker = Arc<dyn Fn() + Send + Sync>;

pub(crate) trait Device: Send {
    fn name(&self) -> &'static str;

    /// Commands that may be started and not yet reaped.
    fn capacity(&self) -> u32;

    /// Takes a command. It may stay in a queue of the device until the next [`Device::reap`],
    /// which also reports what could not be started.
    ///
    /// # Safety
    /// The pieces of the command must stay in place, and the memory they name valid and used by
    /// nobody else, until `reap` has reported the command's id, or for ever if it never does.
    unsafe fn start(&mut self, command: Command);

    /// Appends outcomes to `out`. With `wait` it blocks until there is at least one or the waker
    /// was used; otherwise it takes only what is there.
    ///
    /// # Errors
    /// Only when the device is broken: commands in flight may then never be reported.
    fn reap(&mut self, wait: bool, out: &mut Vec<Reaped>) -> io::Result<()>;

    fn waker(&self) -> Waker;
}
