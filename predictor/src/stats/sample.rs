//! A bounded sample of tokens with all neurons that fired for them, to estimate co-activation.
//!
//! A pairwise table would need neurons² counters per layer: 800 MB for one layer of a 7B model. A
//! sample of `k` tokens needs `k` bits per neuron and answers more: how often two neurons fire
//! together (`popcount(a & b)`), and the cost of any neuron order on these tokens.
//!
//! The sample keeps the `k` tokens with the smallest hash of their position in the text. So samples
//! of parts of a text merge into exactly the sample of the whole (a bottom-k sketch).

/// One sampled token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sampled {
    /// Hash of the token's position in the text.
    pub priority: u64,
    /// One bit per neuron, bank by bank, each padded to the words of the largest.
    pub bits: Vec<u64>,
}

/// The sampled tokens of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// Maximum number of tokens.
    pub capacity: usize,
    /// By ascending priority, without duplicates.
    pub(super) tokens: Vec<Sampled>,
}

/// Words for one bit per neuron.
pub(crate) fn words(neurons: usize) -> usize {
    neurons.div_ceil(64)
}

impl Sample {
    /// An empty sample of at most `capacity` tokens.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            tokens: Vec::new(),
        }
    }

    /// The sampled tokens.
    pub fn tokens(&self) -> &[Sampled] {
        &self.tokens
    }

    /// Whether a token with this priority would be added.
    pub fn wants(&self, priority: u64) -> bool {
        match self.tokens.last() {
            _ if self.capacity == 0 => false,
            Some(last) if self.tokens.len() >= self.capacity => priority < last.priority,
            _ => true,
        }
    }

    /// Adds a token if it belongs to the sample and is not yet in it.
    pub fn insert(&mut self, token: Sampled) {
        if !self.wants(token.priority) {
            return;
        }
        let found = self
            .tokens
            .binary_search_by_key(&token.priority, |t| t.priority);
        if let Err(place) = found {
            self.tokens.insert(place, token);
            self.tokens.truncate(self.capacity);
        }
    }

    /// Merges the sample of another text.
    pub(super) fn merge(&mut self, other: &Self) {
        self.capacity = self.capacity.min(other.capacity);
        self.tokens.truncate(self.capacity);
        for token in &other.tokens {
            self.insert(token.clone());
        }
    }

    /// The neurons of bank `bank` of `banks` as bit rows, one bit per sampled token: `[neurons ×
    /// words(tokens)]`.
    pub(super) fn transposed(&self, bank: usize, banks: usize, neurons: usize) -> Vec<u64> {
        let width = words(self.tokens.len());
        let mut rows = vec![0u64; neurons * width];
        for (t, token) in self.tokens.iter().enumerate() {
            let first = bank * (token.bits.len() / banks.max(1));
            for (w, &word) in token.bits[first..][..words(neurons)].iter().enumerate() {
                let mut left = word;
                while left != 0 {
                    let n = w * 64 + left.trailing_zeros() as usize;
                    rows[n * width + t / 64] |= 1 << (t % 64);
                    left &= left - 1;
                }
            }
        }
        rows
    }

    /// Reorders the neurons of every bank; there is an order for each.
    pub(super) fn permute(&mut self, order: &[Vec<u32>]) {
        for token in &mut self.tokens {
            let mut bits = vec![0u64; token.bits.len()];
            let width = token.bits.len() / order.len().max(1);
            for (bank, first) in order.iter().zip((0..).step_by(width.max(1))) {
                for (to, &from) in bank.iter().enumerate() {
                    let from = from as usize;
                    let bit = token.bits[first + from / 64] >> (from % 64) & 1;
                    bits[first + to / 64] |= bit << (to % 64);
                }
            }
            token.bits = bits;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn token(priority: u64) -> Sampled {
        Sampled {
            priority,
            bits: vec![priority],
        }
    }

    proptest! {
        #[test]
        fn merged_parts_are_the_sample_of_the_whole(
            all in prop::collection::vec(0u64..50, 0..60), cut in 0usize..60, capacity in 0usize..8
        ) {
            let of = |part: &[u64]| {
                let mut s = Sample::new(capacity);
                part.iter().for_each(|&p| s.insert(token(p)));
                s
            };
            let cut = cut.min(all.len());
            let (a, b) = (of(&all[..cut]), of(&all[cut..]));
            let (mut ab, mut ba) = (a.clone(), b.clone());
            ab.merge(&b);
            ba.merge(&a);
            let mut smallest = all.clone();
            smallest.sort_unstable();
            smallest.dedup();
            smallest.truncate(capacity);
            let kept: Vec<u64> = ab.tokens.iter().map(|t| t.priority).collect();
            prop_assert_eq!(kept, smallest);
            prop_assert_eq!(ab, ba);
        }
    }

    #[test]
    fn rows_of_neurons_and_another_order() {
        let mut s = Sample::new(3);
        // 2 banks of 3 neurons
        s.insert(Sampled {
            priority: 1,
            bits: vec![0b011, 0b100],
        });
        s.insert(Sampled {
            priority: 2,
            bits: vec![0b010, 0b101],
        });
        assert_eq!(s.transposed(0, 2, 3), [0b01, 0b11, 0b00]);
        assert_eq!(s.transposed(1, 2, 3), [0b10, 0b00, 0b11]);
        s.permute(&[vec![1, 2, 0], vec![2, 1, 0]]);
        assert_eq!(s.transposed(0, 2, 3), [0b11, 0b00, 0b01]);
        assert_eq!(s.transposed(1, 2, 3), [0b11, 0b00, 0b10]);
    }
}
