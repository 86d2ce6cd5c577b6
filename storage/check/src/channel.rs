//! A bounded channel with only the guarantees of the real one.
//!
//! A received message makes everything visible that its sender did before. Observing an empty
//! channel guarantees nothing: the real one checks without a lock, so a sender that comes a moment
//! later need not see what the receiver did before. Code that relies on more must establish the
//! order itself, and otherwise fails here.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::sync::atomic::AtomicUsize;
use loom::sync::{Condvar, Mutex, MutexGuard};

/// Set in `Shared::glance` when no sender is left.
const CLOSED: usize = 1 << 32;

struct Queue<T> {
    messages: VecDeque<T>,
    capacity: usize,
    senders: usize,
    receiver: bool,
}

struct Shared<T> {
    queue: Mutex<Queue<T>>,
    changed: Condvar,
    /// Number of messages and [`CLOSED`], for checks without the lock.
    glance: AtomicUsize,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue<T>>) -> MutexGuard<'a, Queue<T>> {
        self.changed.wait(queue).unwrap_or_else(|e| e.into_inner())
    }

    fn tell(&self, queue: &Queue<T>) {
        let closed = if queue.senders == 0 { CLOSED } else { 0 };
        let now = queue.messages.len() | closed;
        self.glance.store(now, Ordering::Release);
        self.changed.notify_all();
    }
}

pub(crate) struct Sender<T>(Arc<Shared<T>>);
pub(crate) struct Receiver<T>(Arc<Shared<T>>);

/// The other side is closed.
#[derive(Debug)]
pub(crate) struct Gone;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TryRecvError {
    Empty,
    Disconnected,
}

pub(crate) fn bounded<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared {
        queue: Mutex::new(Queue {
            messages: VecDeque::new(),
            capacity,
            senders: 1,
            receiver: true,
        }),
        changed: Condvar::new(),
        glance: AtomicUsize::new(0),
    });
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

impl<T> Sender<T> {
    pub(crate) fn send(&self, message: T) -> Result<(), Gone> {
        let mut queue = self.0.lock();
        while queue.receiver && queue.messages.len() >= queue.capacity {
            queue = self.0.wait(queue);
        }
        if !queue.receiver {
            return Err(Gone);
        }
        queue.messages.push_back(message);
        self.0.tell(&queue);
        Ok(())
    }

    pub(crate) fn try_send(&self, message: T) -> Result<(), T> {
        let mut queue = self.0.lock();
        if !queue.receiver || queue.messages.len() >= queue.capacity {
            return Err(message);
        }
        queue.messages.push_back(message);
        self.0.tell(&queue);
        Ok(())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.senders -= 1;
        self.0.tell(&queue);
    }
}

impl<T> Receiver<T> {
    pub(crate) fn recv(&self) -> Result<T, Gone> {
        let mut queue = self.0.lock();
        while queue.senders > 0 && queue.messages.is_empty() {
            queue = self.0.wait(queue);
        }
        let message = queue.messages.pop_front().ok_or(Gone)?;
        self.0.tell(&queue);
        Ok(message)
    }

    pub(crate) fn try_recv(&self) -> Result<T, TryRecvError> {
        match self.0.glance.load(Ordering::Relaxed) {
            0 => return Err(TryRecvError::Empty),
            CLOSED => return Err(TryRecvError::Disconnected),
            _ => {}
        }
        let mut queue = self.0.lock();
        let message = queue.messages.pop_front().ok_or(TryRecvError::Empty)?;
        self.0.tell(&queue);
        Ok(message)
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.receiver = false;
        let messages = std::mem::take(&mut queue.messages);
        self.0.tell(&queue);
        drop(queue);
        drop(messages);
    }
}
