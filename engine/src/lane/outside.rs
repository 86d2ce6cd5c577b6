//! Clusters outside of the store's regions: the first and hottest ones of each bank, which a lane holds. They are
//! read once, when memory is filled, and handed to it.
//!
//! ```text
//! a bank    │ computed by the lane  │ held outside, computed by the CPU │ hot │ cold …
//!           └──── more for more rows of a pass ──▶
//! ```

use super::SharedBytes;

/// The clusters outside, and those of them that a lane computes in the current layer's pass.
#[derive(Clone)]
pub struct Outside {
    /// By bank: number of clusters outside.
    prefix: Vec<u32>,
    /// By bank: number of leading clusters that the lane computes.
    pub computed: Vec<u32>,
    /// Rows that the CPU may read: matrix by matrix, each row followed by its scales, and the number of neurons.
    pub bytes: Vec<Option<(SharedBytes, usize)>>,
    /// The lane computes some rows of the pass with all neurons, so all are needed.
    pub all_needed: bool,
    /// The parts that the CPU cannot read are lost.
    pub lost: bool,
}

impl Outside {
    /// The first `prefix[b]` clusters of each bank, all computed by the lane.
    pub fn new(prefix: Vec<u32>) -> Self {
        Self {
            computed: prefix.clone(),
            bytes: vec![None; prefix.len()],
            all_needed: false,
            lost: false,
            prefix,
        }
    }

    /// Number of clusters outside by bank, lost or not.
    pub fn prefix(&self) -> &[u32] {
        &self.prefix
    }

    /// How many clusters of a bank, from the first on, the lane computes.
    #[inline]
    pub fn computes(&self, bank: u32) -> usize {
        if self.lost {
            0
        } else {
            self.computed[bank as usize] as usize
        }
    }

    /// How many clusters of a bank need no read: the lane computes them, or the CPU has their bytes.
    #[inline]
    pub fn holds(&self, bank: u32) -> usize {
        if self.lost && self.bytes[bank as usize].is_none() {
            0
        } else {
            self.prefix[bank as usize] as usize
        }
    }

    /// The bytes of a bank's clusters, and the number of their neurons, if the CPU may read them and they contain
    /// `cluster`.
    pub(crate) fn shared(&self, bank: u32, cluster: u32) -> Option<(&[u8], usize)> {
        let (bytes, neurons) = self.bytes[bank as usize].as_ref()?;
        (cluster < self.prefix[bank as usize]).then(|| ((**bytes).as_ref(), *neurons))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn lost_clusters_are_read_unless_their_bytes_are_there() {
        let mut outside = Outside::new(vec![2, 3]);
        outside.bytes[1] = Some((Arc::new(vec![7u8; 4]), 2));
        outside.computed[1] = 1;
        assert_eq!([0, 1].map(|bank| outside.holds(bank)), [2, 3]);
        assert_eq!([0, 1].map(|bank| outside.computes(bank)), [2, 1]);
        outside.lost = true;
        assert_eq!([0, 1].map(|bank| outside.holds(bank)), [0, 3]);
        assert_eq!([0, 1].map(|bank| outside.computes(bank)), [0, 0]);
        assert_eq!(outside.shared(1, 2), Some((&[7u8; 4][..], 2)));
        assert_eq!(outside.shared(1, 3), None);
        assert_eq!(outside.shared(0, 0), None);
    }
}
