//! Synchronisation primitives of this crate, named only here so that a model checker can replace
//! them: `storage/check` compiles the same sources with another `sync` and explores all
//! interleavings. Here they are the standard ones.
//!
//! Counters that no decision depends on, and the clock of the `sim` device, are left out: they
//! would only multiply the interleavings.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, fence};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread::{Builder, JoinHandle};

pub(crate) use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded};
pub(crate) use crossbeam::sync::{Parker, Unparker};

/// Reports reads and writes of memory behind a pointer. A no-op in this crate; the model checker
/// fails if two threads access the memory without synchronisation.
#[derive(Debug, Default)]
pub(crate) struct Accesses;

impl Accesses {
    #[inline(always)]
    pub(crate) fn read(&self) {}

    #[inline(always)]
    pub(crate) fn write(&self) {}
}
