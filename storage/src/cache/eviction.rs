//! Eviction policies.

use super::lrfu::Lrfu;
use super::lru::Lru;

/// Which unit is evicted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// The least recently used.
    Lru,
    /// The one with the lowest combined recency-frequency value (LRFU, Lee et al. 2001),
    ///
    /// C(t) = Σ_i 2^(−λ·(t − t_i)) over its uses at passes t_i, with λ = 3/128,
    ///
    /// so a use loses half its weight in about 43 passes. Units that are not resident keep their
    /// value. Two rules add to it:
    ///
    /// - A unit used in the last pass over its bank scores C + 8·p/(1 − p), where p is the recent
    ///   share of units used in two passes in a row: neurons fire in runs of some dozen tokens.
    /// - While a predictor's margins are stable from pass to pass, a unit with a margin scores
    ///   C · 2^(margin/16) instead.
    Lrfu,
}

impl Eviction {
    /// Bytes the policy takes for `units` cacheable units and `slots` slots.
    pub(super) fn bytes(self, slots: u64, units: u64) -> u64 {
        match self {
            Self::Lru => Lru::bytes(slots),
            Self::Lrfu => Lrfu::bytes(units),
        }
    }
}

/// The state of an eviction policy.
#[derive(Debug, Clone)]
pub(super) enum Order {
    Lru(Lru),
    Lrfu(Box<Lrfu>),
}
