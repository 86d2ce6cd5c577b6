//! Active sets that are known in advance: those of the same tokens, recorded in another
//! run. What is left of a token's time is the bound of every predictor.

/// Active sets, recorded or replayed, for passes over one token.
#[derive(Debug, Default)]
pub(crate) enum Oracle {
    /// Neither.
    #[default]
    Absent,
    /// One set for each bank that was computed, a bit for each neuron: the words of `mask.rs` for one
    /// row.
    Recording(Vec<Box<[u64]>>),
    /// The same, and how many were used.
    Replaying(Vec<Box<[u64]>>, usize),
}

impl Oracle {
    /// The set of the next bank, where there is one.
    pub fn next(&mut self) -> Option<&[u64]> {
        match self {
            Self::Replaying(sets, used) => {
                *used += 1;
                sets.get(*used - 1).map(|set| &**set)
            }
            Self::Absent | Self::Recording(_) => None,
        }
    }

    /// Keeps the set of a bank of `neurons` neurons.
    pub fn keep(&mut self, ids: &[u32], neurons: usize) {
        if let Self::Recording(sets) = self {
            let mut set = vec![0u64; neurons.div_ceil(64)].into_boxed_slice();
            for &id in ids {
                set[id as usize / 64] |= 1 << (id % 64);
            }
            sets.push(set);
        }
    }

    /// From recording to replaying, from the first set on.
    pub fn replay(&mut self) {
        if let Self::Recording(sets) = self {
            *self = Self::Replaying(std::mem::take(sets), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_recorded_is_named_again() {
        let mut oracle = Oracle::Recording(Vec::new());
        oracle.keep(&[0, 63, 64, 99], 100);
        oracle.keep(&[], 100);
        oracle.replay();
        assert_eq!(oracle.next().unwrap(), [1 | 1 << 63, 1 | 1 << 35]);
        assert_eq!(oracle.next().unwrap(), [0, 0]);
        assert!(oracle.next().is_none());
    }
}
