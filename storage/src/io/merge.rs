//! Which reads merge into one command.

use crate::limits::Limits;

/// A command being built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merge {
    /// File offset after its last byte.
    pub end: u64,
    /// Bytes so far, including gaps.
    pub len: u64,
    /// Pieces of memory so far.
    pub pieces: usize,
}

impl Merge {
    /// A command of one read of `len` bytes at `at`.
    #[must_use]
    pub fn new(at: u64, len: u64) -> Self {
        Self {
            end: at.saturating_add(len),
            len,
            pieces: 1,
        }
    }

    /// Size of the gap between the command and a read of `len` bytes at `at`, if they may merge:
    /// the read follows, the gap is small and a multiple of `unit`, and the sum stays within
    /// `limits`.
    #[must_use]
    pub fn gap(&self, at: u64, len: u64, unit: u64, limits: &Limits) -> Option<u64> {
        let gap = at.checked_sub(self.end)?;
        let fits = gap <= u64::from(limits.gap)
            && gap.is_multiple_of(unit)
            && self.len + gap + len <= u64::from(limits.block)
            && self.pieces + 1 + usize::from(gap > 0) <= limits.pieces.max(1);
        fits.then_some(gap)
    }

    /// Adds a gap and a read of `len` bytes.
    #[must_use]
    pub fn with(self, gap: u64, len: u64) -> Self {
        Self {
            end: self.end.saturating_add(gap).saturating_add(len),
            len: self.len + gap + len,
            pieces: self.pieces + 1 + usize::from(gap > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_join_up_to_every_limit() {
        let limits = Limits {
            gap: 1024,
            block: 8192,
            pieces: 4,
            ..Limits::PRODUCTION
        };
        let one = Merge::new(4096, 512);
        assert_eq!(one.gap(4608, 512, 512, &limits), Some(0));
        assert_eq!(one.gap(5632, 512, 512, &limits), Some(1024));
        assert_eq!(one.gap(6144, 512, 512, &limits), None, "too far");
        assert_eq!(one.gap(4096, 512, 512, &limits), None, "not behind");
        assert_eq!(one.gap(5000, 512, 512, &limits), None, "not aligned");
        assert_eq!(one.gap(4608, 8192, 512, &limits), None, "too long");
        let two = one.with(512, 512);
        assert_eq!((two.end, two.len, two.pieces), (5632, 1536, 3));
        assert_eq!(two.gap(5632, 512, 512, &limits), Some(0));
        assert_eq!(
            two.gap(6144, 512, 512, &limits),
            None,
            "no piece for the gap"
        );
    }
}
