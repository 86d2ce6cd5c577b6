//! Device interface: start a command, collect outcomes.
//!
//! A device knows nothing of slots, reads or short reads. It is the raw kernel interface with its
//! error numbers. All state about requests lives in [`super::engine::IoEngine`], which is the same
//! for every device.
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

    /// Upper bound on the commands started and not yet reaped.
    fn capacity(&self) -> u32;

    /// Starts a command. The device may queue it until the next [`Device::reap`], which also
    /// reports commands that could not start.
    ///
    /// # Safety
    /// Until `reap` reports the command's id (forever if it never does), the pieces must not move,
    /// and their memory must stay valid and exclusive to the device.
    unsafe fn start(&mut self, command: Command);

    /// Appends outcomes to `out`. With `wait` it blocks until there is at least one or the waker is
    /// called; otherwise it takes those available.
    ///
    /// # Errors
    /// Only if the device is broken: it may then never report the commands in flight.
    fn reap(&mut self, wait: bool, out: &mut Vec<Reaped>) -> io::Result<()>;

    fn waker(&self) -> Waker;
}
