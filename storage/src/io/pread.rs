//! The `pread` device: a few threads, each carrying one blocking read. What works everywhere,
//! Android applications included.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, bounded};

use super::device::{Device, Reaped, Waker};
use super::sys::Command;

/// What lanes and the waker send to the I/O thread.
enum Note {
    Done(Reaped),
    Wake,
}

/// One lane: reads on the I/O thread itself. A device with a single command queue and a slow
/// submission path gains nothing from a hand-over to another thread.
pub(crate) struct Inline {
    queue: VecDeque<Command>,
    capacity: u32,
}

impl Inline {
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            queue: VecDeque::with_capacity(capacity as usize),
            capacity,
        }
    }
}

impl Device for Inline {
    fn name(&self) -> &'static str {
        "pread"
    }

    fn capacity(&self) -> u32 {
        self.capacity
    }

    unsafe fn start(&mut self, command: Command) {
        self.queue.push_back(command);
    }

    fn reap(&mut self, _wait: bool, out: &mut Vec<Reaped>) -> io::Result<()> {
        // One at a time, so that new requests are seen between reads.
        if let Some(command) = self.queue.pop_front() {
            // SAFETY: the contract of `start` holds until this outcome is reported.
            let result = unsafe { command.run() };
            out.push(Reaped {
                id: command.id,
                result,
            });
        }
        Ok(())
    }

    fn waker(&self) -> Waker {
        // `reap` never waits for anything but its own read.
        Arc::new(|| ())
    }
}

/// Several lanes: a pool of threads.
pub(crate) struct Pool {
    work: Option<Sender<Command>>,
    notes: Receiver<Note>,
    to_notes: Sender<Note>,
    lanes: Vec<JoinHandle<()>>,
    capacity: u32,
}

impl Pool {
    pub(crate) fn new(lanes: u32) -> io::Result<Self> {
        let lanes = lanes.max(1);
        let (work, jobs) = bounded::<Command>(lanes as usize);
        // Room for every outcome and a wake token each, so that lanes never block on it.
        let (to_notes, notes) = bounded(lanes as usize * 2);
        let mut pool = Self {
            work: Some(work),
            notes,
            to_notes,
            lanes: Vec::with_capacity(lanes as usize),
            capacity: lanes,
        };
        for i in 0..lanes {
            let (jobs, to_notes) = (jobs.clone(), pool.to_notes.clone());
            let lane = std::thread::Builder::new()
                .name(format!("ember-read-{i}"))
                .spawn(move || lane(&jobs, &to_notes))?;
            pool.lanes.push(lane);
        }
        Ok(pool)
    }
}

fn lane(jobs: &Receiver<Command>, to_notes: &Sender<Note>) {
    while let Ok(command) = jobs.recv() {
        // SAFETY: the contract of `Device::start` holds until the outcome is reported.
        let result = unsafe { command.run() };
        let done = Note::Done(Reaped {
            id: command.id,
            result,
        });
        if to_notes.send(done).is_err() {
            return;
        }
    }
}

impl Device for Pool {
    fn name(&self) -> &'static str {
        "pread"
    }

    fn capacity(&self) -> u32 {
        self.capacity
    }

    unsafe fn start(&mut self, command: Command) {
        // The channel holds as many commands as may be in flight, so this never blocks.
        let sent = self.work.as_ref().map(|work| work.send(command));
        if !matches!(sent, Some(Ok(()))) {
            // Only when every lane has panicked. There is room: the command is not in flight.
            let done = Reaped {
                id: command.id,
                result: -libc::ECANCELED,
            };
            drop(self.to_notes.try_send(Note::Done(done)));
        }
    }

    fn reap(&mut self, wait: bool, out: &mut Vec<Reaped>) -> io::Result<()> {
        if wait && out.is_empty() {
            match self.notes.recv() {
                Ok(Note::Done(done)) => out.push(done),
                Ok(Note::Wake) => {}
                Err(_) => return Err(io::Error::other("all read threads have ended")),
            }
        }
        while let Ok(note) = self.notes.try_recv() {
            if let Note::Done(done) = note {
                out.push(done);
            }
        }
        Ok(())
    }

    fn waker(&self) -> Waker {
        let to_notes = self.to_notes.clone();
        // A full channel wakes the receiver anyway.
        Arc::new(move || drop(to_notes.try_send(Note::Wake)))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Lanes finish what they have and see the end of the channel.
        self.work = None;
        for lane in self.lanes.drain(..) {
            if lane.join().is_err() {
                tracing::error!("a read thread panicked");
            }
        }
    }
}
