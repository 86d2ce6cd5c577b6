//! Who leaves next.

use super::lrfu::Lrfu;
use super::lru::Lru;

/// Which unit leaves first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The one that was used longest ago.
    Lru,
    /// The one with the fewest uses, each counting less with its age: half after about
    /// 43 ticks (LRFU, Lee et al. 2001). Uses are remembered for units that are not
    /// resident, too.
    ///
    /// Neurons fire in phases of some dozen tokens and otherwise by temperature, so how
    /// often one fired of late says more than when it fired last. Where phases are short
    /// and few, the last use says most: so units used in this tick or the one before get a
    /// head start, as large as pays (see `duel.rs`). Where a predictor tells how near units are
    /// to being used, and that lasts from tick to tick, it counts instead.
    Lrfu,
}

impl Policy {
    /// Bytes of an order of `units` units that may be cached, in `slots` slots.
    pub(super) fn bytes(self, slots: u64, units: u64) -> u64 {
        match self {
            Self::Lru => Lru::bytes(slots),
            Self::Lrfu => Lrfu::bytes(units),
        }
    }
}

/// An order of eviction.
#[derive(Debug, Clone)]
pub(super) enum Order {
    Lru(Lru),
    Lrfu(Box<Lrfu>),
}
