//! An order of eviction by worth and by the age of the last use.

use super::rings::Rings;
use super::worth::BUCKETS;

/// Sets of buckets: of what was used in this tick, in the last one, and before.
const SETS: u32 = 3;

/// Rings that an order takes.
pub(super) const RINGS: u32 = SETS * BUCKETS;

/// The set of what was used longer ago. The other two change places with every tick.
const OLD: u32 = 0;

/// Indices in buckets of worth. A bucket is named by its number over all time, which is
/// at least `lowest` and less than [`BUCKETS`] above it.
#[derive(Debug, Clone)]
pub(super) struct Ages {
    /// By set, the buckets that may hold something.
    filled: [u128; SETS as usize],
    /// The set of this tick.
    fresh: u32,
    /// Buckets that a recent use counts as much as.
    pub head_start: u32,
}

/// The ring of a bucket of a set.
fn ring(set: u32, bucket: u32) -> u32 {
    set * BUCKETS + bucket % BUCKETS
}

impl Ages {
    /// An empty order.
    pub fn new(head_start: u32) -> Self {
        Self {
            filled: [0; SETS as usize],
            fresh: 1,
            head_start,
        }
    }

    fn stale(&self) -> u32 {
        SETS - self.fresh
    }

    fn fill(&mut self, set: u32, bucket: u32) {
        self.filled[set as usize] |= 1 << (bucket % BUCKETS);
    }

    /// Adds an index that was just used, as the newest of its bucket.
    #[inline]
    pub fn push(&mut self, rings: &mut Rings, bucket: u32, i: u32) {
        self.fill(self.fresh, bucket);
        rings.push(ring(self.fresh, bucket), i);
    }

    /// Time passes. The lowest bucket rises from `from` to `to`.
    pub fn tick(&mut self, rings: &mut Rings, from: u32, to: u32) {
        let stale = self.stale();
        let mut mask = std::mem::take(&mut self.filled[stale as usize]);
        self.filled[OLD as usize] |= mask;
        while mask != 0 {
            let bucket = mask.trailing_zeros();
            rings.append(ring(OLD, bucket), ring(stale, bucket));
            mask &= mask - 1;
        }
        self.fresh = stale;
        for bucket in from..to {
            for set in 0..SETS {
                // what has sunk below all others, as the first to go among them
                let filled = &mut self.filled[set as usize];
                if *filled >> (bucket % BUCKETS) & 1 == 1 {
                    *filled &= !(1 << (bucket % BUCKETS));
                    rings.prepend(ring(set, bucket + 1), ring(set, bucket));
                    self.fill(set, bucket + 1);
                }
            }
        }
    }

    /// The next to go.
    pub fn victim(&mut self, rings: &Rings, lowest: u32) -> Option<u32> {
        let mut best = None;
        for (set, ahead) in [
            (OLD, 0),
            (self.stale(), self.head_start),
            (self.fresh, self.head_start),
        ] {
            let filled = &mut self.filled[set as usize];
            // the first bit is the lowest bucket's
            let mut mask = filled.rotate_right(lowest % BUCKETS);
            while mask != 0 {
                let above = mask.trailing_zeros();
                match rings.oldest(ring(set, lowest + above)) {
                    Some(i) => {
                        if best.is_none_or(|(least, _)| above + ahead < least) {
                            best = Some((above + ahead, i));
                        }
                        break;
                    }
                    None => {
                        mask &= mask - 1;
                        *filled &= !(1 << ((lowest + above) % BUCKETS));
                    }
                }
            }
        }
        best.map(|(_, i)| i)
    }
}
