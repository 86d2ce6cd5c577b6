//! Flat table from (bank, neuron) to slot: a lookup is an addition and a load.

/// Names a cacheable unit: a neuron of one bank. The caller decides what a bank is, such as a layer
/// or an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Index of the bank.
    pub bank: u32,
    /// Index of the neuron in its bank.
    pub neuron: u32,
}

impl Key {
    /// The neuron `neuron` of bank `bank`.
    #[must_use]
    pub fn new(bank: u32, neuron: u32) -> Self {
        Self { bank, neuron }
    }
}

/// State of a cacheable unit, resident or not.
///
/// All data that a lookup, a use and a release access, in key order. A layer looks up its units in
/// that order, so the hardware prefetcher helps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    /// Slot index or [`NONE`], with flags in the high bits.
    slot: u32,
    /// log2 of the combined recency-frequency value, see `crf.rs`.
    pub crf: u32,
    /// Pass of the last use, modulo 2^16.
    pub last: u16,
    pub pins: u16,
}

/// Bits of the slot index.
const NONE: u32 = (1 << 30) - 1;
/// The slot is loading.
const LOADING: u32 = 1 << 31;
/// The unit is a first victim, regardless of its CRF.
const FIRST: u32 = 1 << 30;

impl Unit {
    const ABSENT: Self = Self {
        slot: NONE,
        crf: 0,
        // As if last used long ago.
        last: 1 << 15,
        pins: 0,
    };

    /// Its slot, loading or resident.
    #[inline]
    pub fn slot(&self) -> Option<u32> {
        let slot = self.slot & NONE;
        (slot != NONE).then_some(slot)
    }

    /// Its slot, if it is resident.
    #[inline]
    pub fn resident(&self) -> Option<u32> {
        self.slot().filter(|_| self.slot & LOADING == 0)
    }

    /// Whether it is resident and not pinned.
    #[inline]
    pub fn is_evictable(&self) -> bool {
        (self.pins == 0) & (self.slot & LOADING == 0) & (self.slot & NONE != NONE)
    }

    /// Its slot, if it is loading.
    pub fn loading(&self) -> Option<u32> {
        self.slot().filter(|_| self.slot & LOADING != 0)
    }

    pub fn load(&mut self, slot: u32) {
        self.slot = slot | LOADING;
        self.pins = 0;
    }

    pub fn settle(&mut self, slot: u32) {
        self.slot = slot;
    }

    /// Changes the slot and keeps the flags.
    pub fn move_to(&mut self, slot: u32) {
        self.slot = self.slot & !NONE | slot;
    }

    pub fn leave(&mut self) {
        self.slot = NONE;
        self.pins = 0;
    }

    #[inline]
    pub fn is_first(&self) -> bool {
        self.slot & FIRST != 0
    }

    #[inline]
    pub fn set_first(&mut self, first: bool) {
        self.slot = self.slot & !FIRST | if first { FIRST } else { 0 };
    }
}

/// The [`Unit`] of every possible key.
#[derive(Debug, Clone)]
pub(super) struct Table {
    /// First entry of each bank, then the total.
    base: Box<[u32]>,
    units: Box<[Unit]>,
}

impl Table {
    /// A table for banks of the given neuron counts. `None` if the neurons of all banks exceed 32
    /// bits.
    pub fn new(banks: &[u32]) -> Option<Self> {
        let mut base = Vec::with_capacity(banks.len() + 1);
        let mut total = 0u32;
        for &neurons in banks {
            base.push(total);
            total = total.checked_add(neurons)?;
        }
        base.push(total);
        Some(Self {
            base: base.into_boxed_slice(),
            units: vec![Unit::ABSENT; total as usize].into_boxed_slice(),
        })
    }

    /// Upper bound on the number of slots.
    pub const SLOTS: u32 = NONE;

    /// Neurons in all banks.
    pub fn len(&self) -> u32 {
        self.units.len() as u32
    }

    /// Bytes of a table over `neurons` neurons.
    pub fn bytes_for(neurons: u64) -> u64 {
        neurons.saturating_mul(size_of::<Unit>() as u64)
    }

    /// Flat number of a key.
    ///
    /// # Panics
    /// When the bank or neuron does not exist.
    #[inline]
    pub fn flat(&self, key: Key) -> u32 {
        let bank = key.bank as usize;
        let (first, end) = (self.base[bank], self.base[bank + 1]);
        assert!(
            key.neuron < end - first,
            "neuron {} of bank {bank} is not below {}",
            key.neuron,
            end - first
        );
        first + key.neuron
    }

    /// Flat number after the last neuron of bank `bank`.
    ///
    /// # Panics
    /// When there is no such bank.
    pub fn end(&self, bank: u32) -> u32 {
        self.base[bank as usize + 1]
    }

    /// The unit of a key.
    ///
    /// # Panics
    /// When the bank or neuron does not exist.
    #[inline]
    pub fn get(&self, key: Key) -> &Unit {
        self.at(self.flat(key))
    }

    /// The unit with a flat number.
    #[inline]
    pub fn at(&self, flat: u32) -> &Unit {
        &self.units[flat as usize]
    }

    /// The unit with a flat number.
    #[inline]
    pub fn at_mut(&mut self, flat: u32) -> &mut Unit {
        &mut self.units[flat as usize]
    }

    /// All units, by flat number.
    pub fn all(&self) -> &[Unit] {
        &self.units
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banks_of_different_size_do_not_overlap() {
        let mut t = Table::new(&[3, 0, 2]).unwrap();
        let keys = [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)];
        for (i, (b, n)) in keys.into_iter().enumerate() {
            let flat = t.flat(Key::new(b, n));
            assert_eq!(flat, i as u32);
            assert_eq!(t.at(flat).slot(), None);
            t.at_mut(flat).load(10 + i as u32);
        }
        t.at_mut(3).leave();
        assert_eq!(t.at(3).slot(), None);
        assert_eq!(t.get(Key::new(2, 1)).loading(), Some(14));
    }

    #[test]
    fn marks_do_not_mix() {
        let mut unit = Unit::ABSENT;
        assert_eq!(
            (unit.slot(), unit.resident(), unit.loading()),
            (None, None, None)
        );
        unit.load(Table::SLOTS - 1);
        assert_eq!(
            (unit.resident(), unit.loading()),
            (None, Some(Table::SLOTS - 1))
        );
        unit.settle(5);
        unit.set_first(true);
        unit.move_to(6);
        assert!(unit.is_first() && unit.resident() == Some(6));
        unit.leave();
        assert_eq!((unit.slot(), unit.is_first()), (None, false));
    }

    #[test]
    #[should_panic(expected = "neuron 3 of bank 0")]
    fn a_neuron_outside_its_bank_is_refused() {
        let t = Table::new(&[3, 5]).unwrap();
        let _ = t.flat(Key::new(0, 3));
    }

    #[test]
    fn too_many_neurons_are_refused() {
        assert!(Table::new(&[u32::MAX, 1]).is_none());
    }
}
