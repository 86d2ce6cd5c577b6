//! Buffers of neurons: device memory, or on devices that share the machine's memory host memory, which the host
//! fills once and both then read.

use std::sync::Arc;

use crate::buffers::{Bytes, write};
use crate::handles::{Arg, Context, Queue};
use crate::staging::Streamed;
use crate::work::driver;
use crate::{Error, HostBytes};

/// Alignment and granularity at which drivers share host memory instead of copying it.
const PAGE: usize = 4096;

/// Page-aligned host memory.
pub(super) struct Pages {
    memory: Vec<u8>,
    first: usize,
    len: usize,
}

impl Pages {
    /// Allocates zeros; `advise` sees the memory before it is first touched. `None` if `len` is impossible.
    fn new(len: usize, advise: &dyn Fn(&mut [u8])) -> Option<Self> {
        let len = len.max(1).checked_next_multiple_of(PAGE)?;
        let allocated = len
            .checked_add(PAGE)
            .filter(|&n| n <= isize::MAX as usize)?;
        let mut memory = vec![0; allocated];
        advise(&mut memory);
        let first = memory.as_ptr().align_offset(PAGE).min(PAGE);
        Some(Self { memory, first, len })
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.first..][..self.len]
    }
}

impl AsRef<[u8]> for Pages {
    fn as_ref(&self) -> &[u8] {
        &self.memory[self.first..][..self.len]
    }
}

/// A buffer of neurons.
pub(super) enum Part {
    /// Driver memory.
    Own(Bytes),
    /// Host memory that is being filled.
    Filling(Pages),
    /// Host memory that is filled and read-only. The buffer is dropped before its memory.
    Shared(Bytes, HostBytes),
    /// Driver memory that staging memory refills.
    Streamed(Streamed),
    /// Freed, or sharing failed.
    Nothing,
}

impl Part {
    /// Allocates `len` bytes, on `unified` devices of host memory.
    pub fn new(
        context: &Context,
        len: usize,
        unified: bool,
        advise: &dyn Fn(&mut [u8]),
    ) -> Result<Self, Error> {
        let none = || Error(format!("cannot give {len} bytes of host memory"));
        Ok(match unified {
            true => Self::Filling(Pages::new(len, advise).ok_or_else(none)?),
            false => Self::Own(driver(
                &format!("give {len} bytes"),
                Bytes::new(context, len),
            )?),
        })
    }

    /// Allocates `len` bytes on a device with the machine's memory, rewritable whenever no work uses them.
    pub fn rewritten(context: &Context, len: usize) -> Result<Self, Error> {
        let bytes = Bytes::new(context, len);
        Ok(Self::Own(driver(&format!("give {len} bytes"), bytes)?))
    }

    /// Shares host memory that is filled.
    pub fn shared(context: &Context, host: HostBytes) -> Result<Self, Error> {
        let bytes = driver("share weights", Bytes::of_host(context, &host))?;
        Ok(Self::Shared(bytes, host))
    }

    /// Copies bytes to `offset`.
    pub fn write(&mut self, queue: &Queue, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let missing = || Error(format!("has no {} bytes at {offset}", bytes.len()));
        match self {
            Self::Own(buffer) => driver("copy weights", write(queue, buffer, offset, bytes)),
            Self::Streamed(buffer) => buffer.write(offset, bytes),
            Self::Filling(pages) => {
                let target = pages.bytes_mut().get_mut(offset..).ok_or_else(missing)?;
                let target = target.get_mut(..bytes.len()).ok_or_else(missing)?;
                target.copy_from_slice(bytes);
                Ok(())
            }
            Self::Shared(..) | Self::Nothing => Err(Error("takes no weights once in use".into())),
        }
    }

    /// Shares host memory that was being filled.
    fn fill_ends(&mut self, context: &Context) -> Result<(), Error> {
        *self = match std::mem::replace(self, Self::Nothing) {
            Self::Filling(pages) => Self::shared(context, Arc::new(pages))?,
            other => other,
        };
        Ok(())
    }

    /// The buffer as a kernel argument. Host memory is read-only from now on.
    pub fn arg(&mut self, context: &Context) -> Result<Arg<'_>, Error> {
        self.fill_ends(context)?;
        match self {
            Self::Own(bytes) | Self::Shared(bytes, _) => Ok(bytes.arg()),
            Self::Streamed(streamed) => Ok(streamed.arg()),
            Self::Filling(_) | Self::Nothing => Err(Error("has no such buffer".into())),
        }
    }

    /// Makes later commands of `queue` wait for copies to this buffer.
    pub fn order(&self, queue: &Queue) -> Result<(), Error> {
        match self {
            Self::Streamed(streamed) => streamed.order(queue),
            _ => Ok(()),
        }
    }

    /// Waits for copies to this buffer and returns their duration in nanoseconds.
    pub fn arrived(&self) -> Result<u64, Error> {
        match self {
            Self::Streamed(streamed) => streamed.arrived(),
            _ => Ok(0),
        }
    }

    /// The buffer's host memory, if it has any, read-only from now on.
    pub fn host(&mut self, context: &Context) -> Result<Option<HostBytes>, Error> {
        self.fill_ends(context)?;
        Ok(match self {
            Self::Shared(_, host) => Some(Arc::clone(host)),
            Self::Own(_) | Self::Streamed(_) | Self::Filling(_) | Self::Nothing => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_begin_and_end_at_borders() {
        for len in [0, 1, PAGE, PAGE + 1] {
            let advised = std::cell::Cell::new(0);
            let mut pages = Pages::new(len, &|bytes| advised.set(bytes.len())).unwrap();
            assert!(advised.get() >= pages.len);
            pages.bytes_mut().fill(7);
            let bytes = pages.as_ref();
            assert_eq!(bytes.as_ptr().align_offset(PAGE), 0);
            assert_eq!(bytes.len(), len.max(1).next_multiple_of(PAGE));
        }
        assert!(Pages::new(usize::MAX - PAGE, &|_| {}).is_none());
        assert!(Pages::new(usize::MAX / 2, &|_| {}).is_none());
    }
}
