//! Memory of the neurons of a bank: the device's own, or the host's where both have the same memory. The host
//! fills the latter, and reads it beside the device once it is filled.

use std::sync::Arc;

use crate::buffers::{Bytes, write};
use crate::handles::{Arg, Context, Queue};
use crate::staging::Streamed;
use crate::work::driver;
use crate::{Error, HostBytes};

/// Alignment, and the unit of lengths, with which drivers share memory instead of copying it.
const PAGE: usize = 4096;

/// Host memory from a page border on.
pub(super) struct Pages {
    memory: Vec<u8>,
    first: usize,
    len: usize,
}

impl Pages {
    /// Zeroes, which `advise` is told of before they are touched. `None` if there cannot be so much memory.
    fn new(len: usize, advise: &dyn Fn(&mut [u8])) -> Option<Self> {
        let len = len.max(1).checked_next_multiple_of(PAGE)?;
        let all = len
            .checked_add(PAGE)
            .filter(|&n| n <= isize::MAX as usize)?;
        let mut memory = vec![0; all];
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

/// Memory of a part.
pub(super) enum Part {
    /// The driver's.
    Own(Bytes),
    /// The host's, while it is filled.
    Filling(Pages),
    /// The same, filled: both read it, nobody writes. The buffer is given back first.
    Shared(Bytes, HostBytes),
    /// The driver's, filled again and again from staging memory.
    Streamed(Streamed),
    /// It could not be shared.
    Nothing,
}

impl Part {
    /// `len` bytes.
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

    /// `len` bytes of memory that both have, which may be written whenever no work on them is under way.
    pub fn rewritten(context: &Context, len: usize) -> Result<Self, Error> {
        let bytes = Bytes::new(context, len);
        Ok(Self::Own(driver(&format!("give {len} bytes"), bytes)?))
    }

    /// Memory of the host that is filled.
    pub fn shared(context: &Context, host: HostBytes) -> Result<Self, Error> {
        let bytes = driver("share weights", Bytes::of_host(context, &host))?;
        Ok(Self::Shared(bytes, host))
    }

    /// Copies bytes to byte `at`.
    pub fn write(&mut self, queue: &Queue, at: usize, bytes: &[u8]) -> Result<(), Error> {
        let missing = || Error(format!("has no {} bytes at {at}", bytes.len()));
        match self {
            Self::Own(to) => driver("copy weights", write(queue, to, at, bytes)),
            Self::Streamed(to) => to.write(at, bytes),
            Self::Filling(pages) => {
                let to = pages.bytes_mut().get_mut(at..).ok_or_else(missing)?;
                let to = to.get_mut(..bytes.len()).ok_or_else(missing)?;
                to.copy_from_slice(bytes);
                Ok(())
            }
            Self::Shared(..) | Self::Nothing => Err(Error("takes no weights once in use".into())),
        }
    }

    /// Ends the filling of host memory.
    fn fill_ends(&mut self, context: &Context) -> Result<(), Error> {
        *self = match std::mem::replace(self, Self::Nothing) {
            Self::Filling(pages) => Self::shared(context, Arc::new(pages))?,
            other => other,
        };
        Ok(())
    }

    /// For kernels. Nothing is written from here on where the memory is the host's.
    pub fn arg(&mut self, context: &Context) -> Result<Arg<'_>, Error> {
        self.fill_ends(context)?;
        match self {
            Self::Own(bytes) | Self::Shared(bytes, _) => Ok(bytes.arg()),
            Self::Streamed(streamed) => Ok(streamed.arg()),
            Self::Filling(_) | Self::Nothing => Err(Error("has no such buffer".into())),
        }
    }

    /// Has `queue` go on once what was copied has arrived.
    pub fn order(&self, queue: &Queue) -> Result<(), Error> {
        match self {
            Self::Streamed(streamed) => streamed.order(queue),
            _ => Ok(()),
        }
    }

    /// Waits for copies that are under way; how many nanoseconds they took.
    pub fn arrived(&self) -> Result<u64, Error> {
        match self {
            Self::Streamed(streamed) => streamed.arrived(),
            _ => Ok(0),
        }
    }

    /// The host's memory, if it is that; as [`Part::arg`].
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
            let told = std::cell::Cell::new(0);
            let mut pages = Pages::new(len, &|bytes| told.set(bytes.len())).unwrap();
            assert!(told.get() >= pages.len);
            pages.bytes_mut().fill(7);
            let bytes = pages.as_ref();
            assert_eq!(bytes.as_ptr().align_offset(PAGE), 0);
            assert_eq!(bytes.len(), len.max(1).next_multiple_of(PAGE));
        }
        assert!(Pages::new(usize::MAX - PAGE, &|_| {}).is_none());
        assert!(Pages::new(usize::MAX / 2, &|_| {}).is_none());
    }
}
