//! Oracle: active sets of the same tokens, recorded in another run. Replaying them bounds the speed
//! that any predictor can reach.

/// Records or replays active sets, for passes of one token.
#[derive(Debug, Default)]
pub(crate) enum Oracle {
    #[default]
    Absent,
    /// One set per computed bank, one bit per neuron: the layout of `mask.rs` for one row.
    Recording(Vec<Box<[u64]>>),
    /// Recorded sets, and how many were replayed.
    Replaying(Vec<Box<[u64]>>, usize),
}

impl Oracle {
    /// The next bank's set, when replaying.
    pub fn next(&mut self) -> Option<&[u64]> {
        match self {
            Self::Replaying(sets, used) => {
                *used += 1;
                sets.get(*used - 1).map(|set| &**set)
            }
            Self::Absent | Self::Recording(_) => None,
        }
    }

    /// Records the active set of a bank of `neurons` neurons.
    pub fn keep(&mut self, ids: &[u32], neurons: usize) {
        if let Self::Recording(sets) = self {
            let mut set = vec![0u64; neurons.div_ceil(64)].into_boxed_slice();
            for &id in ids {
                set[id as usize / 64] |= 1 << (id % 64);
            }
            sets.push(set);
        }
    }

    /// Switches from recording to replaying, from the first set on.
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
    fn recorded_sets_are_replayed() {
        let mut oracle = Oracle::Recording(Vec::new());
        oracle.keep(&[0, 63, 64, 99], 100);
        oracle.keep(&[], 100);
        oracle.replay();
        assert_eq!(oracle.next().unwrap(), [1 | 1 << 63, 1 | 1 << 35]);
        assert_eq!(oracle.next().unwrap(), [0, 0]);
        assert!(oracle.next().is_none());
    }
}
