//! Where a cluster's bytes come from: the decisions, without a clock, a read or a cache.
//!
//! [`Rules`] hold what is settled for a bank while a layer is worked on, [`Found`] is what a look at
//! the regions gave for one cluster, [`Way`] is the answer. `layer.rs` carries it out.
//!
//! ```text
//! nothing needed ────────────────────────────────► Unused
//! the system's page cache does it all ───────────► Mapped
//! in the hot region ─────────────────────────────► Hot
//! on its way as a whole ─────────────────────────► Whole     one sequential read
//! a scan without a cold region, or belongs there ► Whole
//! too many neurons missing for single reads ─────► Whole
//! else ──────────────────────────────────────────► Neurons   Gate parts first, or bundles
//! ```

use super::costs::ReadCosts;

/// What is settled for a bank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// The file is mapped and nothing is read.
    pub mapped: bool,
    /// Every token looks at every neuron: all are needed, or their gates are in the bundles.
    pub scans: bool,
    /// Many tokens are computed at once, of which some need nearly every neuron.
    pub many: bool,
    /// There is a cold region.
    pub cold: bool,
    /// The bank's Gate rows are in the bundles, and read before Up and Down.
    pub gates_first: bool,
    /// The bank's Gate rows are in memory.
    pub gates_resident: bool,
    /// The vectors of a neuron come in one read.
    pub bundles: bool,
    pub costs: ReadCosts,
}

/// One cluster of the layer and what memory has of it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Found {
    /// Neurons that are needed.
    pub needed: usize,
    /// It is in the hot region.
    pub hot: bool,
    /// It belongs there.
    pub belongs_hot: bool,
    /// It was read ahead as a whole, or is being read.
    pub underway: bool,
    /// Another cluster of the layer is on its way into the hot region. They come one for each layer
    /// and pass, the others meanwhile neuron by neuron: many at once would hold up a token.
    pub promoting: bool,
    /// Needed neurons that are neither in the cold region nor on their way to it.
    pub absent: usize,
}

/// Where the bytes of a cluster come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// No neuron of it is needed.
    Unused,
    Mapped,
    Hot,
    /// A stream buffer, in one read.
    Whole,
    /// The cold region, neuron by neuron.
    Neurons {
        /// Gate parts first, then Up and Down of those that fire.
        gates_first: bool,
    },
}

impl Rules {
    /// The way of a cluster before its neurons are looked up; `None` where that decides.
    pub fn before_lookup(&self, found: &Found) -> Option<Way> {
        match () {
            () if found.needed == 0 => Some(Way::Unused),
            () if self.mapped => Some(Way::Mapped),
            () if found.hot => Some(Way::Hot),
            () if found.underway => Some(Way::Whole),
            () if self.always_whole(found.belongs_hot, found.promoting) => Some(Way::Whole),
            () => None,
        }
    }

    /// The way of a cluster of which `found.absent` neurons would have to be read.
    pub fn after_lookup(&self, found: &Found) -> Way {
        let whole = match self.gates_resident {
            true => self.costs.whole_cluster(found.absent),
            false => self.costs.cluster_over_bundles(found.absent),
        };
        match self.gates_first {
            false if self.bundles && whole => Way::Whole,
            gates_first => Way::Neurons { gates_first },
        }
    }

    /// Whether a missing cluster comes whole, whichever of its neurons are needed.
    fn always_whole(&self, belongs_hot: bool, promoting: bool) -> bool {
        self.scans && !self.cold || belongs_hot && !(promoting && self.cold)
    }

    /// Whether it is known before the gates are that a missing cluster of the next layer will come
    /// whole: always in a scan, and for many tokens, which need nearly all of it. `absent`: its
    /// neurons that are not in the cold region.
    pub fn read_ahead(&self, belongs_hot: bool, absent: impl FnOnce() -> usize) -> bool {
        if self.scans || !self.many || belongs_hot {
            return self.always_whole(belongs_hot, false);
        }
        // Some of them may not be needed after all.
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

    fn way(rules: Rules, found: Found) -> Way {
        let before = rules.before_lookup(&found);
        before.unwrap_or_else(|| rules.after_lookup(&found))
    }

    const SINGLE: Way = Way::Neurons { gates_first: false };

    #[test]
    fn memory_comes_before_flash() {
        let found = Found {
            needed: 3,
            absent: 3,
            ..Found::default()
        };
        assert_eq!(way(RULES, Found::default()), Way::Unused);
        assert_eq!(way(RULES, Found { hot: true, ..found }), Way::Hot);
        assert_eq!(way(RULES, found), SINGLE);
        let mapped = Rules {
            mapped: true,
            ..RULES
        };
        assert_eq!(way(mapped, Found { hot: true, ..found }), Way::Mapped);
        assert_eq!(way(mapped, Found::default()), Way::Unused);
    }

    #[test]
    fn a_cluster_comes_whole_where_single_reads_cost_more() {
        let absent = |absent| Found {
            needed: 40,
            absent,
            ..Found::default()
        };
        // 20 reads of Up and Down cost as much as the cluster; of bundles 12.5.
        assert_eq!(way(RULES, absent(20)), SINGLE);
        assert_eq!(way(RULES, absent(21)), Way::Whole);
        let bundles = Rules {
            gates_resident: false,
            ..RULES
        };
        assert_eq!(way(bundles, absent(12)), SINGLE);
        assert_eq!(way(bundles, absent(13)), Way::Whole);
        // Without bundles there is nothing to read in one piece.
        let apart = Rules {
            bundles: false,
            ..RULES
        };
        assert_eq!(way(apart, absent(40)), SINGLE);
        // Gates first: which neurons are missing is not known yet.
        let two = Rules {
            gates_first: true,
            ..bundles
        };
        assert_eq!(way(two, absent(40)), Way::Neurons { gates_first: true });
    }

    #[test]
    fn what_becomes_hot_comes_whole() {
        let found = Found {
            needed: 1,
            absent: 1,
            ..Found::default()
        };
        let belongs = Found {
            belongs_hot: true,
            ..found
        };
        assert_eq!(way(RULES, belongs), Way::Whole);
        // One at a time, as long as there is a cold region for the others' neurons.
        let second = Found {
            promoting: true,
            ..belongs
        };
        assert_eq!(way(RULES, second), SINGLE);
        let no_cold = Rules {
            cold: false,
            ..RULES
        };
        assert_eq!(way(no_cold, second), Way::Whole);
        // What was read ahead is not read again.
        let underway = Found {
            underway: true,
            promoting: true,
            ..found
        };
        assert_eq!(way(RULES, underway), Way::Whole);
    }

    #[test]
    fn a_scan_without_a_cold_region_streams() {
        let found = Found {
            needed: 128,
            absent: 128,
            ..Found::default()
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
        assert_eq!(way(streams, found), Way::Whole);
        assert!(streams.read_ahead(false, || 0));
        let two = Rules {
            gates_first: true,
            ..scan
        };
        assert_eq!(way(two, found), Way::Neurons { gates_first: true });
        assert!(!two.read_ahead(false, || 128));
        assert!(two.read_ahead(true, || 0));
    }

    #[test]
    fn many_tokens_read_ahead_what_half_of_them_would_pay_for() {
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
