//! Memory that clusters pass through on their way to a device with a memory of its own: the host fills one piece of
//! it while the device computes from another.
//!
//! ```text
//! host        rows ─▶ staging memory, which the driver's copies can read at any time
//! own queue   staging memory ─▶ the device's, not waited for
//! kernels     wait for the last copy, by its event
//! ```

use std::ops::Range;
use std::ptr::NonNull;

use opencl_sys::{CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_WRITE};

use crate::Error;
use crate::buffers::Bytes;
use crate::handles::{Arg, Context, Event, Mem, Queue};
use crate::library::Code;
use crate::work::{INVALID, driver};

/// Memory of the host by the driver, mapped as long as this lives.
struct Mapped {
    mem: Mem,
    at: NonNull<u8>,
    len: usize,
    /// For the mapping, and for copies from it.
    queue: Queue,
}

// SAFETY: the memory is this handle's own.
unsafe impl Send for Mapped {}

impl Mapped {
    fn new(context: &Context, queue: Queue, len: usize) -> Result<Self, Code> {
        let len = len.max(1);
        let mem = context.memory(CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, len)?;
        let at = NonNull::new(queue.map(&mem, len)?).ok_or(INVALID)?;
        Ok(Self {
            mem,
            at,
            len,
            queue,
        })
    }

    /// Copies bytes to byte `at`.
    fn fill(&mut self, at: usize, bytes: &[u8]) -> Result<(), Code> {
        let end = at.checked_add(bytes.len());
        if end.is_none_or(|end| end > self.len) {
            return Err(INVALID);
        }
        // SAFETY: the mapping has `len` bytes, which the range was compared with, and nothing else refers to
        // them: copies that are under way read others, see `Streamed::write`.
        unsafe {
            let to = self.at.as_ptr().add(at);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        Ok(())
    }

    /// Begins to copy bytes that were filled to the same place of `to`.
    fn copy(&self, to: &Bytes, at: usize, len: usize) -> Result<Event, Code> {
        to.fits(at, len)?;
        // SAFETY: the bytes lie within the mapping, as `fill` has compared. They are neither changed nor freed
        // before the copy is done: `Streamed::write` and `drop` wait for it.
        unsafe {
            let from = std::slice::from_raw_parts(self.at.as_ptr().add(at), len);
            to.copy_from(&self.queue, at, from)
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Copies end first. A lost device has nothing to wait for.
        let _ = self.queue.finish();
        let unmapped = self.queue.unmap(&self.mem, self.at.as_ptr());
        let _ = unmapped.and_then(|()| self.queue.finish());
    }
}

/// Memory of a device, and the staging memory of the same length that it is filled from.
pub(super) struct Streamed {
    bytes: Bytes,
    staging: Mapped,
    /// What is being copied, or was: where, the first copy if it is not the last, and the last one.
    copied: Vec<Range<usize>>,
    first: Option<Event>,
    last: Option<Event>,
}

impl Streamed {
    /// `len` bytes on both sides, with a queue of its own.
    pub fn new(context: &Context, queue: Queue, len: usize) -> Result<Self, Error> {
        let make = || -> Result<Self, Code> {
            Ok(Self {
                bytes: Bytes::new(context, len)?,
                staging: Mapped::new(context, queue, len)?,
                copied: Vec::new(),
                first: None,
                last: None,
            })
        };
        driver(&format!("give {len} bytes, twice"), make())
    }

    /// Begins to copy bytes to byte `at`. No work on them is under way.
    pub fn write(&mut self, at: usize, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        let to = at..at.saturating_add(bytes.len());
        let beside = |of: &Range<usize>| to.end <= of.start || of.end <= to.start;
        if !self.copied.iter().all(beside) {
            // The same place once more: the copy of what was there has to end first.
            self.arrived()?;
            (self.first, self.last) = (None, None);
            self.copied.clear();
        }
        let mut begin = || -> Result<Event, Code> {
            self.staging.fill(at, bytes)?;
            self.staging.copy(&self.bytes, at, bytes.len())
        };
        let copy = driver("copy weights", begin())?;
        // Known before anything can fail, so that nothing is written where a copy may be under way.
        self.copied.push(to);
        let before = self.last.replace(copy);
        self.first = self.first.take().or(before);
        driver("copy weights", self.staging.queue.flush())
    }

    /// Has `queue` go on once all copies have ended.
    pub fn order(&self, queue: &Queue) -> Result<(), Error> {
        match &self.last {
            Some(last) => driver("order work behind copies", queue.wait_for(last)),
            None => Ok(()),
        }
    }

    /// For kernels.
    pub fn arg(&self) -> Arg<'_> {
        self.bytes.arg()
    }

    /// Waits for the copies; how many nanoseconds they took, from the first to the last, by the device's clock.
    pub fn arrived(&self) -> Result<u64, Error> {
        let Some(last) = &self.last else {
            return Ok(0);
        };
        driver("copy weights", last.wait())?;
        let first = self.first.as_ref().unwrap_or(last);
        Ok(match (first.queued(), last.ended()) {
            (Ok(start), Ok(end)) => end.saturating_sub(start),
            _ => 0,
        })
    }
}
