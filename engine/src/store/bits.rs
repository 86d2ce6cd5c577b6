//! A bit set with one bit per neuron of a model.

use emberflow_storage::cache::Key;

/// One bit per neuron of the model, initially clear.
pub(super) struct Bits {
    words: Vec<u64>,
    /// First word of each bank, plus the end.
    first: Vec<usize>,
}

impl Bits {
    pub fn new(sizes: &[u32]) -> Self {
        let mut first = vec![0];
        for &neurons in sizes {
            let words = (neurons as usize).div_ceil(64);
            first.push(first.last().copied().unwrap_or(0) + words);
        }
        let total = first.last().copied().unwrap_or(0);
        Self {
            words: vec![0; total],
            first,
        }
    }

    pub fn bytes_for(sizes: &[u32]) -> u64 {
        let words = |&n: &u32| u64::from(n).div_ceil(64);
        8 * (sizes.iter().map(words).sum::<u64>() + sizes.len() as u64 + 1)
    }

    #[inline]
    fn word(&self, key: Key) -> usize {
        self.first[key.bank as usize] + key.neuron as usize / 64
    }

    #[inline]
    pub fn has(&self, key: Key) -> bool {
        self.words[self.word(key)] >> (key.neuron % 64) & 1 == 1
    }

    pub fn set(&mut self, key: Key) {
        let word = self.word(key);
        self.words[word] |= 1 << (key.neuron % 64);
    }

    /// Clears a bit; returns its previous value.
    #[inline]
    pub fn take(&mut self, key: Key) -> bool {
        let word = self.word(key);
        let was = self.has(key);
        self.words[word] &= !(1 << (key.neuron % 64));
        was
    }

    pub fn clear(&mut self, banks: std::ops::Range<u32>) {
        let ends = [banks.start, banks.end].map(|bank| self.first[bank as usize]);
        self.words[ends[0]..ends[1]].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_banks_are_separate() {
        let mut bits = Bits::new(&[70, 1, 128]);
        for (bank, neuron) in [(0, 69), (1, 0), (2, 0), (2, 127)] {
            bits.set(Key { bank, neuron });
        }
        bits.clear(1..2);
        assert!(bits.has(Key::new(0, 69)) && bits.has(Key::new(2, 0)));
        assert!(!bits.has(Key::new(1, 0)) && !bits.has(Key::new(0, 0)));
        assert!(bits.take(Key::new(2, 127)) && !bits.take(Key::new(2, 127)));
    }
}
