//! The `uring` device: io_uring with registered files, reading directly into slots.
//!
//! Buffers are not registered: that needs a locked-memory limit which ordinary users lack, and
//! showed no gain. SQPOLL is not used: its kernel thread would occupy a core.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};

use super::Ring;
use super::device::{Device, Reaped, Waker};
use super::source::FileSource;
use super::sys::{Command, EventFd, Piece};

/// `user_data` of the read that other threads complete to wake us.
const WAKE: u64 = u64::MAX;
/// Kernel interface: process completions in this call.
const ENTER_GETEVENTS: u32 = 1;

pub(crate) struct Uring {
    ring: IoUring,
    /// Whether files are registered; then commands name a fixed index.
    fixed: bool,
    event: Arc<EventFd>,
    /// The kernel writes the event counter here. Boxed for a stable address.
    counter: Box<u64>,
    /// Whether the read on `event` is in flight.
    armed: bool,
    /// Commands that the queue refused, for the next `reap` to report.
    refused: Vec<Reaped>,
    capacity: u32,
}

impl Uring {
    /// A ring for up to `depth` commands on `source`, tested with a read and a wake-up.
    pub(crate) fn new(source: &FileSource, depth: u32, of: Ring) -> io::Result<Self> {
        // One more for the wake read.
        let entries = depth
            .saturating_add(1)
            .checked_next_power_of_two()
            .filter(|&n| n <= 32 << 10)
            .ok_or_else(|| io::Error::other("more than 32767 commands in flight"))?;
        let ring = build(entries, of)?;
        let fixed = (ring.submitter())
            .register_files(&source.descriptors())
            .is_ok();
        let mut this = Self {
            ring,
            fixed,
            event: Arc::new(EventFd::new()?),
            counter: Box::new(0),
            armed: false,
            refused: Vec::new(),
            capacity: depth.max(1),
        };
        this.probe_wake()?;
        this.probe_read(source)?;
        Ok(this)
    }

    /// Tests the event read. If it never ended, or failed at once, the thread would oversleep or
    /// never sleep.
    fn probe_wake(&mut self) -> io::Result<()> {
        self.arm();
        self.event.signal();
        let mut none = Vec::new();
        for _ in 0..100 {
            self.enter(1)?;
            match self.collect(&mut none) {
                Some(8) => return Ok(()),
                Some(n) => return Err(io::Error::from_raw_os_error(-n)),
                None => {}
            }
        }
        Err(io::Error::other("an event read does not end"))
    }

    /// Tests a read: a ring can be created where reads through it fail.
    fn probe_read(&mut self, source: &FileSource) -> io::Result<()> {
        let len = source
            .dio_align()
            .map_or(4096, |a| a.mem.max(a.offset) as usize);
        let mut memory = vec![0u8; len * 2];
        let at = memory.as_mut_ptr();
        let pieces = [Piece::new(at.wrapping_add(at.align_offset(len)), len)];
        let file = source.pick(0, &pieces);
        let command = Command {
            id: 0,
            fd: file.fd,
            file: file.number,
            offset: file.offset,
            pieces: pieces.as_ptr(),
            count: 1,
        };
        // SAFETY: `pieces` and `memory` live until the outcome; without one, `memory` is leaked
        // below.
        unsafe { self.start(command) };
        let mut out = Vec::new();
        for _ in 0..1000 {
            if let Err(e) = self.reap(true, &mut out) {
                std::mem::forget(memory);
                return Err(e);
            }
            if let Some(one) = out.first() {
                return match one.result {
                    0.. => Ok(()),
                    e => Err(io::Error::from_raw_os_error(-e)),
                };
            }
        }
        std::mem::forget(memory);
        Err(io::Error::other("a probing read does not end"))
    }

    /// Starts a read on the event, which completes when another thread signals it.
    fn arm(&mut self) {
        if self.armed {
            return;
        }
        let fd = types::Fd(self.event.as_raw_fd());
        let entry = opcode::Read::new(fd, (&raw mut *self.counter).cast(), 8)
            .build()
            .user_data(WAKE);
        // SAFETY: `counter` is boxed and `event` stays open until the read ends, which `drop`
        // ensures.
        self.armed = unsafe { self.push(&entry) };
    }

    /// # Safety
    /// The memory that the entry points to must stay valid until its completion.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: passed on from the caller.
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            return true;
        }
        // The queue has room for everything in flight, so this is not expected. Make room and try
        // once more.
        let _ = self.enter(0);
        // SAFETY: passed on from the caller.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    /// Submits queued entries, lets the kernel post completions, and waits for `want` of them.
    fn enter(&mut self, want: u32) -> io::Result<()> {
        let queued = self.ring.submission().len() as u32;
        // SAFETY: everything submitted was pushed under the contract of `push`.
        let result = unsafe {
            let submitter = self.ring.submitter();
            submitter.enter::<libc::sigset_t>(queued, want, ENTER_GETEVENTS, None)
        };
        match result {
            Ok(_) => Ok(()),
            // Interrupted, or short of resources until completions are taken: the caller retries.
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)
                ) =>
            {
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Takes completions. Returns the result of the wake read if it completed.
    fn collect(&mut self, out: &mut Vec<Reaped>) -> Option<i32> {
        let mut woken = None;
        for entry in self.ring.completion() {
            if entry.user_data() == WAKE {
                woken = Some(entry.result());
            } else {
                out.push(Reaped {
                    id: entry.user_data() as u32,
                    result: entry.result(),
                });
            }
        }
        if woken.is_some() {
            self.armed = false;
        }
        woken
    }
}

/// A ring with the flags that save interrupts, where the kernel supports them.
fn build(entries: u32, of: Ring) -> io::Result<IoUring> {
    let newest = || {
        IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_defer_taskrun()
            .build(entries)
    };
    let newest = match of {
        Ring::OfThread => newest(),
        Ring::Unbound => Err(io::ErrorKind::Unsupported.into()),
    };
    newest
        .or_else(|_| IoUring::builder().setup_coop_taskrun().build(entries))
        .or_else(|_| IoUring::builder().build(entries))
}

impl Device for Uring {
    fn name(&self) -> &'static str {
        "uring"
    }

    fn capacity(&self) -> u32 {
        self.capacity
    }

    unsafe fn start(&mut self, command: Command) {
        let Command {
            pieces,
            count,
            offset,
            ..
        } = command;
        // SAFETY: the pieces are valid by the contract of `start`.
        let first = unsafe { *pieces };
        macro_rules! entry {
            ($file:expr) => {
                if count == 1 {
                    opcode::Read::new($file, first.ptr(), first.len() as u32)
                        .offset(offset)
                        .build()
                } else {
                    opcode::Readv::new($file, pieces.cast(), count)
                        .offset(offset)
                        .build()
                }
            };
        }
        let entry = if self.fixed {
            entry!(types::Fixed(command.file))
        } else {
            entry!(types::Fd(command.fd))
        };
        // SAFETY: pieces and memory stay valid until the outcome, by the contract of `start`.
        if !unsafe { self.push(&entry.user_data(u64::from(command.id))) } {
            self.refused.push(Reaped {
                id: command.id,
                result: -libc::ECANCELED,
            });
        }
    }

    fn reap(&mut self, wait: bool, out: &mut Vec<Reaped>) -> io::Result<()> {
        self.arm();
        out.append(&mut self.refused);
        let want = wait && out.is_empty() && self.ring.completion().is_empty();
        self.enter(u32::from(want))?;
        self.collect(out);
        Ok(())
    }

    fn waker(&self) -> Waker {
        let event = Arc::clone(&self.event);
        Arc::new(move || event.signal())
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The engine has drained its commands; only the wake read is left.
        self.event.signal();
        let mut late = Vec::new();
        for _ in 0..100 {
            if !self.armed {
                return;
            }
            if self.enter(1).is_err() {
                break;
            }
            self.collect(&mut late);
        }
        tracing::error!("the wake read of the ring does not end; its memory is leaked");
        std::mem::forget(std::mem::take(&mut self.counter));
    }
}
