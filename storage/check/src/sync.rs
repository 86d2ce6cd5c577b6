//! Contents of `crate::sync` for the sources: primitives whose every step the checker orders, and
//! which can be broken intentionally.

use std::sync::LockResult;
use std::sync::atomic::Ordering;

use loom::sync::atomic as model;

use crate::fault::Fault;

pub(crate) use crate::channel::{Receiver, Sender, TryRecvError, bounded};
pub(crate) use loom::sync::{Mutex, MutexGuard};
pub(crate) use loom::thread::JoinHandle;
pub(crate) use model::{AtomicBool, AtomicUsize};

/// See the type of this name in the storage crate. The lock orders nothing that is checked; it only
/// makes the cell shareable.
#[derive(Debug, Default)]
pub(crate) struct Accesses(std::sync::Mutex<loom::cell::UnsafeCell<()>>);

impl Accesses {
    pub(crate) fn read(&self) {
        let cell = self.0.lock().unwrap_or_else(|e| e.into_inner());
        cell.with(|_| ());
    }

    pub(crate) fn write(&self) {
        let cell = self.0.lock().unwrap_or_else(|e| e.into_inner());
        cell.with_mut(|_| ());
    }
}

pub(crate) fn fence(order: Ordering) {
    if !Fault::Fence.is_on() {
        model::fence(order);
    }
}

/// A thread sleeps here until it has been unparked since its last sleep.
#[derive(Debug, Default)]
pub(crate) struct Parker(Unparker);

/// The other side of a [`Parker`].
#[derive(Debug, Default, Clone)]
pub(crate) struct Unparker(std::sync::Arc<(Mutex<bool>, Condvar)>);

impl Parker {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn unparker(&self) -> &Unparker {
        &self.0
    }

    pub(crate) fn park(&self) {
        let (told, news) = &*self.0.0;
        let mut told = told.lock().unwrap_or_else(|e| e.into_inner());
        while !std::mem::take(&mut *told) {
            told = news.wait(told).unwrap_or_else(|e| e.into_inner());
        }
    }
}

impl Unparker {
    pub(crate) fn unpark(&self) {
        let (told, news) = &*self.0;
        *told.lock().unwrap_or_else(|e| e.into_inner()) = true;
        news.notify_one();
    }
}

#[derive(Debug, Default)]
pub(crate) struct Condvar(loom::sync::Condvar);

impl Condvar {
    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        self.0.wait(guard)
    }

    pub(crate) fn notify_one(&self) {
        if !Fault::NotifyOne.is_on() {
            self.0.notify_one();
        }
    }

    pub(crate) fn notify_all(&self) {
        if !Fault::NotifyAll.is_on() {
            self.0.notify_all();
        }
    }
}

/// Threads of the checker.
pub(crate) struct Builder(loom::thread::Builder);

impl Builder {
    pub(crate) fn new() -> Self {
        // in machine words; the default is too little for unoptimised code
        Self(loom::thread::Builder::new().stack_size(32 << 10))
    }

    pub(crate) fn name(self, name: String) -> Self {
        Self(self.0.name(name))
    }

    pub(crate) fn spawn<T: Send + 'static>(
        self,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<JoinHandle<T>> {
        self.0.spawn(run)
    }
}
