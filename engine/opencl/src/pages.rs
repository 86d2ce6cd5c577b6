//! Pages of keys and values, as a device has them.
//!
//! ```text
//! the machine's memory   the host's pages themselves, mapped to the host between pieces of work
//! a memory of its own    a copy of all pages: what the host wrote is copied before it is read, and what the device
//!                        computes it writes there itself, with the bits that the host writes
//! ```

use crate::attend::{AttentionLayer, AttentionSpec, HostMemory, KvPage};
use crate::buffers::{Bytes, begin_part};
use crate::handles::{Arg, Event, Lent, Queue};
use crate::library::Code;
use crate::products::Place;
use crate::work::{INVALID, driver};
use crate::{Error, HostBytes};

/// The memory of all pages. The buffer is given back before the host's.
pub(super) struct KvPages {
    bytes: Bytes,
    /// It is a copy.
    pub copied: bool,
    /// While the machine's is the host's.
    lent: Option<Lent>,
    memory: HostMemory,
}

impl KvPages {
    /// For all pages, which lie in `memory`.
    pub fn new(at: &Place<'_>, memory: HostMemory) -> Result<Self, Error> {
        let (len, copied) = ((*memory).as_ref().len(), !at.unified);
        if len as u64 > at.longest {
            return Err(Error(format!(
                "has no buffers of {len} bytes, as many as the keys and values have"
            )));
        }
        let bytes = match copied {
            true => Bytes::new(at.context, len),
            // SAFETY: `memory` is kept longer than the buffer. Kernels only read it, and of it only pages that the
            // work holds, so that nobody writes them.
            false => unsafe { Bytes::of_cells(at.context, (*memory).as_ref()) },
        };
        let mut all = Self {
            bytes: driver("share keys and values", bytes)?,
            copied,
            lent: None,
            memory,
        };
        let lent = driver("map keys and values", all.lend(at.queue))?;
        lent.map_or(Ok(()), |lent| driver("map keys and values", lent.wait()))?;
        Ok(all)
    }

    /// For kernels.
    pub fn arg(&self) -> Arg<'_> {
        self.bytes.arg()
    }

    /// Where a page begins, whose bytes of a layer are copied if they have to be.
    pub fn place(
        &mut self,
        queue: &Queue,
        spec: &AttentionSpec,
        layer: &AttentionLayer,
        page: &KvPage,
    ) -> Result<u64, Code> {
        let (first, len) = (layer.first, spec.layer_bytes);
        let at = self.place_of(&page.bytes, first + len).ok_or(INVALID)?;
        if self.copied && page.stale {
            let bytes: &[u8] = (*page.bytes).as_ref();
            begin_part(
                queue,
                &mut self.bytes,
                at + first,
                &bytes[first..first + len],
            )?;
        }
        Ok(at as u64)
    }

    /// Where a page begins, if it lies here.
    fn place_of(&self, page: &HostBytes, len: usize) -> Option<usize> {
        let (all, page): (&[_], &[u8]) = ((*self.memory).as_ref(), (**page).as_ref());
        let at = page.as_ptr().addr().checked_sub(all.as_ptr().addr())?;
        (page.len() >= len && at.checked_add(page.len())? <= all.len()).then_some(at)
    }

    /// Hands the machine's memory to the device.
    pub fn take_back(&mut self, queue: &Queue) -> Result<(), Code> {
        match self.lent.take() {
            Some(lent) => queue.take_back(self.bytes.mem(), lent),
            None if self.copied => Ok(()),
            None => Err(INVALID),
        }
    }

    /// Begins to hand it to the host, when the work before is done. Copies stay where they are.
    pub fn lend(&mut self, queue: &Queue) -> Result<Option<Event>, Code> {
        if self.copied {
            return Ok(None);
        }
        let (lent, event) = queue.lend(self.bytes.mem(), self.bytes.len())?;
        self.lent = Some(lent);
        Ok(Some(event))
    }
}
