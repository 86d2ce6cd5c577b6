//! (bank, neuron) to slot, as one flat array: a lookup is an addition and a load.

/// Names a cached unit: a neuron of one bank. What a bank is, a layer or an expert, is the
/// caller's business.
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

const ABSENT: u32 = u32::MAX;

/// Flat map from every possible key to a slot index. Costs 4 bytes per neuron of the model.
#[derive(Debug, Clone)]
pub struct Table {
    /// First entry of each bank, and the total at the end.
    base: Box<[u32]>,
    slots: Box<[u32]>,
}

impl Table {
    /// A table for banks of the given neuron counts. `None` when the neurons of all banks cannot
    /// be numbered with 32 bits.
    #[must_use]
    pub fn new(banks: &[u32]) -> Option<Self> {
        let mut base = Vec::with_capacity(banks.len() + 1);
        let mut total = 0u32;
        for &neurons in banks {
            base.push(total);
            total = total.checked_add(neurons)?;
        }
        // The largest value marks an absent entry and must not become an index.
        if total == u32::MAX {
            return None;
        }
        base.push(total);
        Some(Self {
            base: base.into_boxed_slice(),
            slots: vec![ABSENT; total as usize].into_boxed_slice(),
        })
    }

    /// Neurons of all banks.
    #[must_use]
    pub(super) fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Bytes a table over `neurons` neurons takes.
    #[must_use]
    pub fn bytes_for(neurons: u64) -> u64 {
        neurons.saturating_mul(4)
    }

    /// Flat number of a key.
    ///
    /// # Panics
    /// When the bank or neuron does not exist.
    #[inline]
    #[must_use]
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

    /// Slot of a flat number.
    #[inline]
    #[must_use]
    pub fn get(&self, flat: u32) -> Option<u32> {
        let slot = self.slots[flat as usize];
        (slot != ABSENT).then_some(slot)
    }

    /// Sets or clears the slot of a flat number.
    #[inline]
    pub fn set(&mut self, flat: u32, slot: Option<u32>) {
        self.slots[flat as usize] = slot.unwrap_or(ABSENT);
    }

    /// Entries that have a slot, with their flat number.
    pub fn present(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let entries = (0u32..).zip(self.slots.iter().copied());
        entries.filter(|&(_, slot)| slot != ABSENT)
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
            assert_eq!(t.get(flat), None);
            t.set(flat, Some(10 + i as u32));
        }
        assert_eq!(t.present().count(), 5);
        t.set(3, None);
        assert_eq!(t.get(3), None);
        assert_eq!(t.get(4), Some(14));
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
        assert!(Table::new(&[u32::MAX]).is_none());
    }
}
