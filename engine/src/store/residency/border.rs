//! The border between the hot and the cold region. It moves at once when the budget changes, and
//! step by step, pass by pass, when the number of sequences changes, so that no token is delayed.

use crate::cluster::prefixes;

/// Bytes moved between the regions per pass: a few milliseconds of copying.
const STEP: u64 = 4 << 20;

/// Target position of the border.
#[derive(Debug, Clone, Copy)]
pub(super) struct Goal {
    /// Clusters of the hot region.
    pub hot: u64,
    /// Slots of the cold region.
    pub cold: u64,
    /// Bytes of both regions together.
    pub bytes: u64,
}

impl Goal {
    /// The next step towards the target: [hot clusters, cold slots], from `now` hot clusters of
    /// `unit` bytes and with slots of `slot` bytes.
    pub fn step(&self, now: u64, unit: u64, slot: u64) -> [u64; 2] {
        let step = (STEP / unit).max(1);
        let hot = self.hot.clamp(now.saturating_sub(step), now + step);
        let cold = if hot == self.hot {
            self.cold
        } else {
            (self.bytes - (hot * unit).min(self.bytes)) / slot
        };
        [hot, cold]
    }
}

/// Ends of the hot prefixes of the banks for `units` hot clusters. They are in proportion to the
/// `wanted` ones and start after the `first` clusters, which are on a device.
pub(super) fn behind(units: u64, wanted: &[u32], clusters: &[u32], first: &[u32]) -> Vec<u32> {
    let without_first = |counts: &[u32]| -> Vec<u32> {
        let pairs = counts.iter().zip(first);
        pairs.map(|(&n, &first)| n.saturating_sub(first)).collect()
    };
    let ends = prefixes(units, &without_first(wanted), &without_first(clusters));
    first.iter().zip(ends).map(|(a, b)| a + b).collect()
}

/// Ends of the hot prefixes for `units` hot clusters of the most visited banks, which start after the `first` clusters.
/// `visits`: share of the tokens that visit each bank.
pub(super) fn most_visited(
    units: u64,
    visits: &[f32],
    clusters: &[u32],
    first: &[u32],
) -> Vec<u32> {
    let mut banks: Vec<usize> = (0..clusters.len()).collect();
    banks.sort_by(|&a, &b| visits[b].total_cmp(&visits[a]));
    let (mut prefix, mut left) = (first.to_vec(), units);
    for bank in banks {
        let taken = u64::from(clusters[bank].saturating_sub(first[bank])).min(left);
        prefix[bank] += taken as u32;
        left -= taken;
    }
    prefix
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_reach_the_goal_within_its_bytes() {
        let goal = Goal {
            hot: 9,
            cold: 100,
            bytes: 9 * STEP + 100 * 1000,
        };
        let (mut hot, mut steps) = (2, Vec::new());
        while hot != goal.hot {
            let [next, cold] = goal.step(hot, STEP, 1000);
            assert!(next * STEP + cold * 1000 <= goal.bytes);
            steps.push(next - hot);
            hot = next;
        }
        assert_eq!(steps, [1; 7]);
        assert_eq!(goal.step(9, STEP, 1000), [9, 100]);
        // Downwards: as many small clusters as fit in a step's bytes.
        let unit = STEP / 4;
        assert_eq!(goal.step(20, unit, 1000)[0], 16);
    }

    #[test]
    fn clusters_on_a_device_are_not_hot_again() {
        assert_eq!(behind(4, &[4, 4], &[8, 8], &[0, 0]), [2, 2]);
        assert_eq!(behind(2, &[4, 4], &[8, 8], &[2, 4]), [4, 4]);
        assert_eq!(behind(10, &[4, 4], &[8, 8], &[2, 4]), [8, 8]);
    }

    #[test]
    fn the_most_visited_banks_are_hot() {
        let ends = |first: [u32; 3]| most_visited(5, &[0.1, 0.9, 0.5], &[4, 3, 4], &first);
        assert_eq!(ends([0, 0, 0]), [0, 3, 2]);
        assert_eq!(ends([3, 2, 1]), [4, 3, 4]);
        assert_eq!(ends([4, 0, 0]), [4, 3, 2]);
    }
}
