//! The primitives by which threads of this crate meet. They are named here and nowhere else, so
//! that a model checker can put its own in their place: `storage/check` compiles the same sources
//! with another `sync` and tries every order of steps. In this crate they are the plain ones.
//!
//! Counters that nobody decides by, and the clockwork of the `sim` device, stay outside: they would
//! only multiply the orders to try.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, fence};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread::{Builder, JoinHandle};

pub(crate) use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded};
pub(crate) use crossbeam::sync::{Parker, Unparker};

/// Says when memory behind a pointer is read and written. Nobody listens in this crate; the checker
/// fails when two threads do so without an order between them.
#[derive(Debug, Default)]
pub(crate) struct Accesses;

impl Accesses {
    #[inline(always)]
    pub(crate) fn read(&self) {}

    #[inline(always)]
    pub(crate) fn write(&self) {}
}
