//! A page: keys and values of consecutive positions, all layers.

use std::sync::atomic::{AtomicU16, Ordering};

use emberflow_storage::arena::Slot;

/// One page of the pool.
#[derive(Debug)]
pub(super) struct Page {
    slot: Slot,
    copied: Copied,
}

/// How many positions, from the page's first one on, a device with a memory of its own has of each layer.
#[derive(Debug)]
pub(super) struct Copied(Box<[AtomicU16]>);

impl Page {
    /// For so many layers.
    pub fn new(slot: Slot, layers: usize) -> Self {
        let copied = (0..layers).map(|_| AtomicU16::new(0)).collect();
        Self {
            slot,
            copied: Copied(copied),
        }
    }

    pub fn bytes(&self) -> &[u8] {
        self.slot.as_slice()
    }

    /// All of it, to be changed anywhere.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.copied.0.fill_with(|| AtomicU16::new(0));
        self.slot.as_mut_slice()
    }

    /// Bytes, and the counts that whoever changes them has to lower.
    pub fn parts_mut(&mut self) -> (&mut [u8], &mut Copied) {
        (self.slot.as_mut_slice(), &mut self.copied)
    }

    /// What the device has.
    pub fn copied(&self) -> &Copied {
        &self.copied
    }
}

impl Copied {
    /// Position `place` of a layer is changed.
    pub fn change(&mut self, layer: usize, place: usize) {
        let has = self.0[layer].get_mut();
        *has = (*has).min(number(place));
    }

    /// The same of all layers.
    pub fn change_all(&mut self, place: usize) {
        (0..self.0.len()).for_each(|layer| self.change(layer, place));
    }

    /// The device has put position `place` of a layer there, as it is here.
    pub fn append(&self, layer: usize, place: usize) {
        let has = &self.0[layer];
        if has.load(Ordering::Relaxed) == number(place) {
            has.store(number(place + 1), Ordering::Relaxed);
        }
    }

    /// Whether the first `count` positions of a layer have to be copied. From here on it has them.
    pub fn lacks(&self, layer: usize, count: usize) -> bool {
        self.0[layer].fetch_max(number(count), Ordering::Relaxed) < number(count)
    }
}

/// Positions of a page are fewer than 2¹⁶.
fn number(positions: usize) -> u16 {
    u16::try_from(positions).unwrap_or(u16::MAX)
}

impl AsRef<[u8]> for Page {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}
