//! Who leaves next.

use super::lrfu::Lrfu;
use super::lru::Lru;

/// Which unit leaves first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// The one that was used longest ago.
    Lru,
    /// The one with the fewest uses, each counting less with its age: half after about
    /// 43 ticks (LRFU, Lee et al. 2001). Uses are remembered for units that are not
    /// resident, too.
    ///
    /// Neurons fire in phases of some dozen tokens and otherwise by temperature, so how
    /// often one fired of late says more than when it fired last. Where phases are short
    /// and few, the last use says most: so if it was in the last turn that the unit's bank had, it
    /// counts once more, as much as eight uses for each that is expected to follow it, by how many
    /// units were of late used in two ticks in a row. Where a predictor tells how near units are
    /// to being used, and that lasts from tick to tick, it counts instead.
    Lrfu,
}

impl Eviction {
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
