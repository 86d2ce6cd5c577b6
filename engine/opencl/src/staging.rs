//! Buffers that stream clusters to a device with separate memory: the host fills one while the device computes
//! from another.
//!
//! ```text
//! host          rows ─▶ staging memory
//! copy queue    staging memory ─▶ device memory, asynchronously
//! kernel queue  waits for the last copy's event
//! ```

use std::ops::Range;
use std::ptr::NonNull;

use opencl_sys::{CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_WRITE};

use crate::Error;
use crate::buffers::Bytes;
use crate::handles::{Arg, Context, Event, Mem, Queue};
use crate::library::Code;
use crate::work::{INVALID, driver};

/// Staging memory that stays mapped for the lifetime of this value.
struct Mapped {
    mem: Mem,
    start: NonNull<u8>,
    len: usize,
    /// Queue of the mapping and of copies from it.
    queue: Queue,
}

// SAFETY: this value owns the memory.
unsafe impl Send for Mapped {}

impl Mapped {
    fn new(context: &Context, queue: Queue, len: usize) -> Result<Self, Code> {
        let len = len.max(1);
        let mem = context.memory(CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, len)?;
        let start = NonNull::new(queue.map(&mem, len)?).ok_or(INVALID)?;
        Ok(Self {
            mem,
            start,
            len,
            queue,
        })
    }

    /// Copies bytes to `offset`.
    fn fill(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Code> {
        let end = offset.checked_add(bytes.len());
        if end.is_none_or(|end| end > self.len) {
            return Err(INVALID);
        }
        // SAFETY: the range is within the mapping, as checked above, and nothing else refers to it: running
        // copies read other ranges, see `Streamed::write`.
        unsafe {
            let target = self.start.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        }
        Ok(())
    }

    /// Starts to copy filled bytes to the same offset of `target`.
    fn copy(&self, target: &Bytes, offset: usize, len: usize) -> Result<Event, Code> {
        target.fits(offset, len)?;
        // SAFETY: `fill` has checked that the range is within the mapping. It is neither changed nor freed
        // before the copy ends: `Streamed::write` and `drop` wait for it.
        unsafe {
            let source = std::slice::from_raw_parts(self.start.as_ptr().add(offset), len);
            target.copy_from(&self.queue, offset, source)
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Copies have to end first. An error means that the device is lost.
        let _ = self.queue.finish();
        let unmapped = self.queue.unmap(&self.mem, self.start.as_ptr());
        let _ = unmapped.and_then(|()| self.queue.finish());
    }
}

/// A device buffer with staging memory of the same length.
pub(super) struct Streamed {
    bytes: Bytes,
    staging: Mapped,
    /// Ranges of copies that have been started.
    copied: Vec<Range<usize>>,
    /// First of these copies, if there are several.
    first: Option<Event>,
    /// Last of these copies.
    last: Option<Event>,
}

impl Streamed {
    /// Allocates `len` bytes on both sides. `queue` is for this buffer's copies only.
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

    /// Starts to copy bytes to `offset`. No work is using them.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        let target = offset..offset.saturating_add(bytes.len());
        let disjoint =
            |range: &Range<usize>| target.end <= range.start || range.end <= target.start;
        if !self.copied.iter().all(disjoint) {
            // The range is reused: the previous copy from it has to end first.
            self.arrived()?;
            (self.first, self.last) = (None, None);
            self.copied.clear();
        }
        let mut begin = || -> Result<Event, Code> {
            self.staging.fill(offset, bytes)?;
            self.staging.copy(&self.bytes, offset, bytes.len())
        };
        let copy = driver("copy weights", begin())?;
        // Recorded before the flush can fail, so that no later write touches a range that is being copied.
        self.copied.push(target);
        let before = self.last.replace(copy);
        self.first = self.first.take().or(before);
        driver("copy weights", self.staging.queue.flush())
    }

    /// Makes later commands of `queue` wait for all copies.
    pub fn order(&self, queue: &Queue) -> Result<(), Error> {
        match &self.last {
            Some(last) => driver("order work behind copies", queue.wait_for(last)),
            None => Ok(()),
        }
    }

    /// The buffer as a kernel argument.
    pub fn arg(&self) -> Arg<'_> {
        self.bytes.arg()
    }

    /// Waits for all copies. Returns the time from the first to the last in nanoseconds, by the device's clock.
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
