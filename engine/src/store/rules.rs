//! Where a cluster's bytes come from: pure decisions without clock, I/O or cache.
//!
//! [`Rules`] are fixed per bank and layer, [`ClusterState`] is the residency of one cluster, [`ClusterSource`] the
//! decision. [`super::NeuronStore`] executes it.
//!
//! ```text
//! nothing needed ────────────────────────────────► Unused
//! the file is mapped ────────────────────────────► Mapped
//! in the hot region ─────────────────────────────► Hot
//! in flight as a whole ──────────────────────────► Whole     one sequential read
//! no cold region, or becomes hot ────────────────► Whole
//! one read cheaper than single ones ─────────────► Whole
//! else ──────────────────────────────────────────► Neurons   Gate parts first, or bundles
//! ```

use super::costs::ReadCosts;

/// State of a bank in memory: the input of its rules.
#[derive(Debug, Clone, Copy)]
pub(super) struct BankState {
    /// Every token needs every neuron, or its Gate row from flash.
    pub scans: bool,
    /// Neurons of the bank may be in the cold region.
    pub cold: bool,
    /// Gate rows of the bank are resident.
    pub gates_resident: bool,
}

/// Settings shared by all banks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    /// The file is mapped; no reads are submitted.
    pub mapped: bool,
    /// One read covers all vectors of a neuron.
    pub bundles: bool,
    pub costs: ReadCosts,
    /// Two-phase loading where Gate rows are not resident: Gate rows are read before Up and Down.
    pub gates_first: bool,
}

impl Settings {
    /// Whether a bank's neurons are read in two phases, Gate row first.
    pub fn reads_gates_first(&self, bank: BankState) -> bool {
        self.gates_first && !bank.gates_resident && bank.cold
    }

    /// A bank's rules in a pass. `many`: it has at least [`MANY`](super::job::MANY) tokens.
    /// `whole`: a device needs all vectors of a neuron.
    pub fn rules(&self, bank: BankState, many: bool, whole: bool) -> Rules {
        Rules {
            mapped: self.mapped,
            scans: bank.scans,
            many,
            cold: bank.cold,
            gates_first: self.reads_gates_first(bank) && !whole,
            gates_resident: bank.gates_resident,
            bundles: self.bundles,
            costs: self.costs,
        }
    }
}

/// Inputs of the decision that are fixed per bank and layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// The file is mapped; no reads are submitted.
    pub mapped: bool,
    /// Every token needs every neuron, or its Gate row from flash.
    pub scans: bool,
    /// The pass has so many tokens that nearly every neuron is needed.
    pub many: bool,
    /// A cold region exists.
    pub cold: bool,
    /// Two-phase loading: Gate rows are on flash and read before Up and Down.
    pub gates_first: bool,
    /// The bank's Gate rows are resident.
    pub gates_resident: bool,
    /// One read covers all vectors of a neuron.
    pub bundles: bool,
    pub costs: ReadCosts,
}

/// One cluster and its residency.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ClusterState {
    /// Number of needed neurons.
    pub needed: usize,
    /// Resident in the hot region.
    pub hot: bool,
    /// Belongs in the hot region.
    pub belongs_hot: bool,
    /// Prefetched as a whole, or in flight.
    pub underway: bool,
    /// Another cluster of the layer is being read into the hot region. Only one per layer and pass
    /// is promoted, to bound the delay of a token; the others are read neuron by neuron.
    pub promoting: bool,
    /// Needed neurons that are neither resident nor in flight.
    pub absent: usize,
}

/// Source of a cluster's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClusterSource {
    /// No neuron is needed.
    Unused,
    Mapped,
    Hot,
    /// A stream buffer, filled by one read.
    Whole,
    /// The cold region, neuron by neuron.
    Neurons {
        /// Two-phase loading: Gate rows first, then Up and Down of the neurons that fire.
        gates_first: bool,
    },
}

impl Rules {
    /// The decision before the lookup in the cold region; `None` if it depends on the lookup.
    pub fn before_lookup(&self, found: &ClusterState) -> Option<ClusterSource> {
        match () {
            () if found.needed == 0 => Some(ClusterSource::Unused),
            () if self.mapped => Some(ClusterSource::Mapped),
            () if found.hot => Some(ClusterSource::Hot),
            () if found.underway => Some(ClusterSource::Whole),
            () if self.always_whole(found.belongs_hot, found.promoting) => {
                Some(ClusterSource::Whole)
            }
            () => None,
        }
    }

    /// The decision after a lookup with `found.absent` misses.
    pub fn after_lookup(&self, found: &ClusterState) -> ClusterSource {
        let whole = if self.gates_resident {
            self.costs.whole_cluster(found.absent)
        } else {
            self.costs.cluster_over_bundles(found.absent)
        };
        let gates_first = self.gates_first;
        if !gates_first && self.bundles && whole {
            ClusterSource::Whole
        } else {
            ClusterSource::Neurons { gates_first }
        }
    }

    /// Whether all missing clusters pass through stream buffers.
    pub fn streams(&self) -> bool {
        self.scans && !self.cold && !self.mapped
    }

    /// Whether a missing cluster is read whole regardless of its active set.
    fn always_whole(&self, belongs_hot: bool, promoting: bool) -> bool {
        // Without a cold region no other read is possible: in a scan, or after a device failed.
        !self.cold || belongs_hot && !promoting
    }

    /// Whether a missing cluster of the next layer is certain to be read whole: in a scan, or with
    /// many tokens. `absent`: number of its neurons outside the cold region.
    pub fn read_ahead(&self, belongs_hot: bool, absent: impl FnOnce() -> usize) -> bool {
        if self.scans || !self.many || belongs_hot {
            return self.always_whole(belongs_hot, false);
        }
        // Half of them may not be needed.
        self.bundles && self.costs.whole_cluster(absent() / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules {
        mapped: false,
        scans: false,
        many: false,
        cold: true,
        gates_first: false,
        gates_resident: true,
        bundles: true,
        costs: ReadCosts {
            cluster: 100.0,
            gate: 4.0,
            rest: 5.0,
            bundle: 8.0,
            fire_share: 0.1,
        },
    };

    fn source(rules: Rules, found: ClusterState) -> ClusterSource {
        let before = rules.before_lookup(&found);
        before.unwrap_or_else(|| rules.after_lookup(&found))
    }

    const SINGLE: ClusterSource = ClusterSource::Neurons { gates_first: false };

    #[test]
    fn residency_decides_before_reads() {
        let found = ClusterState {
            needed: 3,
            absent: 3,
            ..ClusterState::default()
        };
        assert_eq!(
            source(RULES, ClusterState::default()),
            ClusterSource::Unused
        );
        assert_eq!(
            source(RULES, ClusterState { hot: true, ..found }),
            ClusterSource::Hot
        );
        assert_eq!(source(RULES, found), SINGLE);
        let mapped = Rules {
            mapped: true,
            ..RULES
        };
        assert_eq!(
            source(mapped, ClusterState { hot: true, ..found }),
            ClusterSource::Mapped
        );
        assert_eq!(
            source(mapped, ClusterState::default()),
            ClusterSource::Unused
        );
    }

    #[test]
    fn a_cluster_is_read_whole_if_single_reads_cost_more() {
        let absent = |absent| ClusterState {
            needed: 40,
            absent,
            ..ClusterState::default()
        };
        // 20 reads of Up and Down cost as much as the cluster; 12.5 reads of bundles do.
        assert_eq!(source(RULES, absent(20)), SINGLE);
        assert_eq!(source(RULES, absent(21)), ClusterSource::Whole);
        let bundles = Rules {
            gates_resident: false,
            ..RULES
        };
        assert_eq!(source(bundles, absent(12)), SINGLE);
        assert_eq!(source(bundles, absent(13)), ClusterSource::Whole);
        // Without bundles, one read cannot cover a neuron.
        let apart = Rules {
            bundles: false,
            ..RULES
        };
        assert_eq!(source(apart, absent(40)), SINGLE);
        // Two-phase: the misses are not known yet.
        let two = Rules {
            gates_first: true,
            ..bundles
        };
        assert_eq!(
            source(two, absent(40)),
            ClusterSource::Neurons { gates_first: true }
        );
    }

    #[test]
    fn a_cluster_that_becomes_hot_is_read_whole() {
        let found = ClusterState {
            needed: 1,
            absent: 1,
            ..ClusterState::default()
        };
        let belongs = ClusterState {
            belongs_hot: true,
            ..found
        };
        assert_eq!(source(RULES, belongs), ClusterSource::Whole);
        // One at a time, if a cold region can hold the neurons of the others.
        let second = ClusterState {
            promoting: true,
            ..belongs
        };
        assert_eq!(source(RULES, second), SINGLE);
        let no_cold = Rules {
            cold: false,
            ..RULES
        };
        assert_eq!(source(no_cold, second), ClusterSource::Whole);
        // A prefetched cluster is not read again.
        let underway = ClusterState {
            underway: true,
            promoting: true,
            ..found
        };
        assert_eq!(source(RULES, underway), ClusterSource::Whole);
    }

    #[test]
    fn a_scan_without_a_cold_region_streams() {
        let found = ClusterState {
            needed: 128,
            absent: 128,
            ..ClusterState::default()
        };
        let scan = Rules {
            scans: true,
            gates_resident: false,
            ..RULES
        };
        let streams = Rules {
            cold: false,
            ..scan
        };
        assert_eq!(source(streams, found), ClusterSource::Whole);
        assert!(streams.read_ahead(false, || 0));
        let two = Rules {
            gates_first: true,
            ..scan
        };
        assert_eq!(
            source(two, found),
            ClusterSource::Neurons { gates_first: true }
        );
        assert!(!two.read_ahead(false, || 128));
        assert!(two.read_ahead(true, || 0));
    }

    #[test]
    fn many_tokens_prefetch_if_half_of_the_misses_pay() {
        let many = Rules {
            many: true,
            ..RULES
        };
        assert!(!RULES.read_ahead(false, || 128));
        assert!(many.read_ahead(false, || 42));
        assert!(!many.read_ahead(false, || 41));
        let apart = Rules {
            bundles: false,
            ..many
        };
        assert!(!apart.read_ahead(false, || 128));
    }
}
