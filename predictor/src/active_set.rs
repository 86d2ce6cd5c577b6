//! The neurons to compute for a token or a batch.

/// A set of packed neuron ids of one bank, in ascending order.
///
/// Allocated once at full capacity and refilled per layer, so the token path never allocates.
#[derive(Debug, Clone, Default)]
pub struct ActiveSet {
    ids: Vec<u32>,
}

impl ActiveSet {
    /// An empty set with capacity for all `neurons` ids.
    pub fn with_capacity(neurons: usize) -> Self {
        Self {
            ids: Vec::with_capacity(neurons),
        }
    }

    /// Refills the set with all ids below `neurons` (the dense case).
    pub fn fill_all(&mut self, neurons: usize) {
        self.ids.clear();
        self.ids.extend(0..neurons as u32);
    }

    /// Refills the set with the neurons whose activation is nonzero for at least one token.
    /// `activations` is `[neurons × tokens]`, neuron-major. Returns the number of firing (neuron,
    /// token) pairs.
    pub fn fill_firing(&mut self, activations: &[f32], tokens: usize) -> usize {
        self.ids.clear();
        let mut firing = 0;
        for (id, row) in activations.chunks_exact(tokens).enumerate() {
            let n = row.iter().filter(|&&a| a != 0.0).count();
            if n > 0 {
                self.ids.push(id as u32);
                firing += n;
            }
        }
        firing
    }

    /// The ids, ascending.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Number of ids.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// True if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::ActiveSet;
    use proptest::prelude::*;

    #[test]
    fn union_over_tokens_is_ascending_and_counts_pairs() {
        // 4 neurons × 2 tokens
        let a = [0.0, 1.0, 0.0, 0.0, 2.0, 3.0, -1.0, 0.0];
        let mut set = ActiveSet::with_capacity(4);
        assert_eq!(set.fill_firing(&a, 2), 4);
        assert_eq!(set.ids(), [0, 2, 3]);
        set.fill_all(3);
        assert_eq!(set.ids(), [0, 1, 2]);
    }

    proptest! {
        #[test]
        fn equals_the_naive_union(
            rows in prop::collection::vec(prop::collection::vec(prop_oneof![Just(0.0f32), -1f32..1.0], 3), 0..50)
        ) {
            let flat: Vec<f32> = rows.concat();
            let mut set = ActiveSet::with_capacity(rows.len());
            let pairs = set.fill_firing(&flat, 3);
            let naive: Vec<u32> = (0..rows.len() as u32)
                .filter(|&i| rows[i as usize].iter().any(|&v| v != 0.0))
                .collect();
            prop_assert_eq!(set.ids(), &naive[..]);
            prop_assert_eq!(pairs, flat.iter().filter(|&&v| v != 0.0).count());
        }
    }
}
