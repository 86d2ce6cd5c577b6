//! The memory plan: division of one budget, or the smallest feasible budget.
//!
//! Pure arithmetic over the sizes of everything that the process holds. The result is the size of
//! the regions and whether Gate rows are resident (DESIGN: in exact mode a third of the FFN buys
//! exact text at a predictable number of reads).

use emberflow_storage::budget::Ledger;

use crate::ablation::{Ablation, Keep};
use crate::error::Error;
use crate::store::regions::{LEAST_BUFFERS, split};

/// Sizes in bytes that do not depend on the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Resident set of the process before the allocations below (program, tokenizer, tables).
    pub process: u64,
    /// Peak resident set so far; smaller budgets are already exceeded.
    pub process_peak: u64,
    /// Attention, norms, head, and buffers for embedding rows.
    pub fixed: u64,
    /// The whole embedding; 0 where tied to the head.
    pub embedding: u64,
    /// Quantisation scales that stay resident.
    pub scales: u64,
    /// Keys and values at full context.
    pub kv: u64,
    /// Activations, partial sums, logits, I/O and sampling buffers.
    pub scratch: u64,
    /// Predictor weights and scratch; 0 without predictors.
    pub predictor: u64,
    /// All Gate rows of all layers.
    pub gates: u64,
    /// Payload bytes of one neuron's Gate part, and of its Up and Down part.
    pub gate_len: u64,
    /// See `gate_len`.
    pub rest_len: u64,
    /// Bytes of one cache slot that holds a whole bundle.
    pub whole_slot: u64,
    /// Bytes of one cache slot that holds only Up and Down.
    pub rest_slot: u64,
    /// Neurons of the model.
    pub neurons: u64,
    /// Banks of the model.
    pub banks: u64,
    /// Neurons of a cluster.
    pub cluster: u64,
    /// Clusters of the model.
    pub clusters: u64,
    /// Clusters that are hot by the activation statistics.
    pub hot_clusters: u64,
    /// Two-phase loading where Gate rows are not resident.
    pub two_phases: bool,
    /// Fewest cold slots that allow progress.
    pub min_slots: u64,
    /// Bytes of a stream buffer for a whole cluster. [`LEAST_BUFFERS`] of them are in `scratch`.
    pub stream_len: u64,
    /// Most stream buffers that the device has use for.
    pub stream_most: u32,
    /// Whether resident Gate rows help: `exact` on a sparse activation, and `predicted`.
    pub gates_help: bool,
    /// Whether nothing runs without them.
    pub gates_must: bool,
    /// Whether predictors determine the active set, so that not every Gate row is needed.
    pub predicts: bool,
}

/// Memory touched later that no ledger entry names: thread stacks, code pages, allocator slack.
/// Verified by the peak-RSS tests.
pub const RUNTIME_MARGIN: u64 = 2 << 20;

/// The kernel's share of a budget: page tables, reads in flight, pages of the program file. RSS
/// misses part of it, but cgroups count it; a cgroup limited to the budget would otherwise thrash
/// the program's own pages. 18 MiB measured at 2.6 GiB.
const KERNEL_PART: u64 = 128;

/// Part of the neurons' memory for stream buffers beyond the fewest: of a model whose clusters
/// stream for every token, and of one whose clusters stream for prompts only.
const STREAM_PART: u64 = 16;
/// See [`STREAM_PART`].
const STREAM_PART_COLD: u64 = 64;

/// The smallest budget that leaves `bytes` besides the kernel's share.
fn with_kernel(bytes: u64) -> u64 {
    bytes.saturating_add(bytes.div_ceil(KERNEL_PART - 1))
}

/// Contents of a cold slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// Gate rows are resident, slots hold Up and Down.
    GatesResident,
    /// Slots hold whole bundles.
    Bundles,
}

/// Division of one budget.
#[derive(Debug, Clone)]
pub struct MemoryPlan {
    /// The budget and its entries by purpose.
    pub ledger: Ledger,
    /// Contents of a slot.
    pub residency: Residency,
    /// Capacity of the hot region in clusters.
    pub hot_clusters: u64,
    /// Capacity of the cold region in neurons.
    pub slots: u64,
    /// Stream buffers: whole clusters in flight at once.
    pub stream_buffers: u32,
    /// Whether the embedding is resident: only where everything else is.
    pub embedding: bool,
}

impl MemoryPlan {
    /// The budget, bytes.
    pub fn budget(&self) -> u64 {
        self.ledger.budget()
    }

    /// Whether all Gate rows are resident.
    pub fn gates_resident(&self) -> bool {
        self.residency == Residency::GatesResident
    }

    /// Upper bound on the bytes read when the plan takes effect.
    pub fn loaded(&self) -> u64 {
        let parts = [
            "fixed",
            "scales",
            "predictor",
            "gates",
            "hot",
            "cold",
            "embedding",
        ];
        parts.iter().map(|part| self.ledger.held(part)).sum()
    }

    /// Bytes that the process comes to hold by this plan, which may be less than the budget. Page
    /// tables and the like are not counted, nor is the margin for what no entry names.
    pub fn held(&self) -> u64 {
        let reserves = ["kernel", "margin"].map(|part| self.ledger.held(part));
        let reserves = reserves.into_iter().fold(0, u64::saturating_add);
        self.ledger.used().saturating_sub(reserves)
    }

    /// The plan under an ablation that keeps less resident.
    pub(crate) fn limited_to(mut self, ablation: Ablation, needs: &Needs) -> Self {
        let wanted = match ablation.keep() {
            _ if ablation == Ablation::Mmap => 0,
            Keep::All => return self,
            // As much as fits.
            Keep::Window => needs.neurons,
            // One layer's reads in flight.
            Keep::Nothing => needs.neurons / needs.banks.max(1),
        };
        if ablation == Ablation::Mmap {
            self.residency = Residency::Bundles;
            self.ledger.release("gates", u64::MAX);
        }
        let slot = match self.residency {
            Residency::GatesResident => needs.rest_slot,
            Residency::Bundles => needs.whole_slot,
        };
        let room = (self.ledger.held("hot") + self.ledger.held("cold")) / slot.max(1);
        let slots = match room {
            // Everything streams.
            0 => 0,
            _ if wanted == 0 => 0,
            _ => room.min(wanted).max(needs.min_slots).min(needs.neurons),
        };
        self.ledger.release("hot", u64::MAX);
        self.ledger.release("cold", u64::MAX);
        // Cannot exceed what was released, except for models of a few clusters.
        let _ = self.ledger.charge("cold", slots * slot);
        self.hot_clusters = 0;
        self.slots = slots;
        self
    }

    /// Resident share of the FFN's weights, 0 to 1, without padding and duplicates.
    pub fn ffn_resident_share(&self, needs: &Needs) -> f64 {
        // The last cluster of a bank may be a short one.
        let hot = self.hot_clusters as f64 / (needs.clusters as f64).max(1.0);
        let cold = self.slots as f64 / (needs.neurons as f64).max(1.0);
        let share = (hot + cold).min(1.0);
        let gate = needs.gate_share();
        match self.residency {
            Residency::GatesResident => gate + (1.0 - gate) * share,
            Residency::Bundles => share,
        }
    }
}

impl Needs {
    /// Ledger entries that every plan holds.
    fn base_entries(&self) -> [(&'static str, u64); 7] {
        [
            ("process", self.process),
            ("fixed", self.fixed),
            ("scales", self.scales),
            ("kv", self.kv),
            ("predictor", self.predictor),
            ("scratch", self.scratch),
            ("margin", RUNTIME_MARGIN),
        ]
    }

    fn base(&self) -> u64 {
        self.base_entries()
            .iter()
            .fold(0u64, |sum, entry| sum.saturating_add(entry.1))
    }

    fn gate_share(&self) -> f64 {
        self.gate_len as f64 / (self.gate_len + self.rest_len).max(1) as f64
    }

    /// Bytes of a cluster in the hot region.
    fn cluster_len(&self, residency: Residency) -> u64 {
        let neuron = match residency {
            Residency::GatesResident => self.rest_len,
            Residency::Bundles => self.gate_len + self.rest_len,
        };
        self.cluster.saturating_mul(neuron)
    }

    /// The smallest feasible budget.
    pub fn smallest_budget(&self) -> u64 {
        let streaming = if self.cold_without_gates() {
            self.min_slots.saturating_mul(self.whole_slot)
        } else {
            0
        };
        let beside_gates = self.with_gates();
        let least = if self.gates_must {
            beside_gates
        } else if self.gates_help {
            streaming.min(beside_gates)
        } else {
            streaming
        };
        let budget = with_kernel(self.base().saturating_add(least));
        budget.max(self.process_peak.saturating_add(RUNTIME_MARGIN))
    }

    /// Whether single neurons are read where Gate rows are not resident.
    fn cold_without_gates(&self) -> bool {
        self.two_phases || self.predicts
    }

    /// Bytes of resident Gate rows and the fewest slots besides. With predictors, Gate rows of all
    /// neurons pay only if everything fits: otherwise whole bundles in the same memory have a
    /// higher hit rate, and speculation predicts bundles better than firing neurons.
    fn with_gates(&self) -> u64 {
        let least = self.min_slots.saturating_mul(self.rest_slot);
        let rest = if self.predicts {
            let all = self
                .clusters
                .saturating_mul(self.cluster_len(Residency::GatesResident));
            least.max(all)
        } else {
            least
        };
        self.gates.saturating_add(rest)
    }

    /// The budget that holds the whole model.
    pub fn full_budget(&self) -> u64 {
        let (residency, gates) = if self.gates_help {
            (Residency::GatesResident, self.gates)
        } else {
            (Residency::Bundles, 0)
        };
        let all = self.clusters.saturating_mul(self.cluster_len(residency));
        let ffn = all.max(self.min_slots.saturating_mul(self.rest_slot));
        let rest = gates.saturating_add(ffn).saturating_add(self.embedding);
        with_kernel(self.base().saturating_add(rest)).max(self.smallest_budget())
    }

    /// The largest budget that keeps at most `share` (0 to 1) of the FFN's weights resident, or the
    /// smallest feasible one.
    pub fn budget_for_share(&self, share: f64) -> u64 {
        let smallest = self.smallest_budget();
        let share_of = |budget: u64| match self.plan(budget) {
            Ok(plan) => plan.ffn_resident_share(self),
            Err(_) => 0.0,
        };
        // The share is monotonic on both sides of the step where Gate rows become resident.
        let step = with_kernel(self.base().saturating_add(self.with_gates()));
        let (mut low, mut high) = if !self.gates_help || share_of(step.max(smallest)) <= share {
            (step.max(smallest), self.full_budget())
        } else {
            (smallest, step.saturating_sub(1).max(smallest))
        };
        if !self.gates_help {
            low = smallest;
        }
        if share >= 1.0 || share_of(high) <= share {
            return high;
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if share_of(middle) <= share {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Divides `budget`, or reports the smallest feasible one.
    pub fn plan(&self, budget: u64) -> Result<MemoryPlan, Error> {
        let smallest = self.smallest_budget();
        if budget < smallest {
            return Err(Error::BudgetTooSmall {
                budget,
                smallest,
                full: self.full_budget(),
            });
        }
        let mut ledger = Ledger::new(budget);
        let kernel = [("kernel", budget / KERNEL_PART)];
        for (what, bytes) in self.base_entries().into_iter().chain(kernel) {
            ledger
                .charge(what, bytes)
                .map_err(emberflow_storage::Error::from)?;
        }
        let left = ledger.left();
        let (residency, gates, slot, uses_cold) = if self.gates_help && left >= self.with_gates() {
            (Residency::GatesResident, self.gates, self.rest_slot, true)
        } else {
            let residency = Residency::Bundles;
            (residency, 0, self.whole_slot, self.cold_without_gates())
        };
        let unit = self.cluster_len(residency).max(1);
        let left = left - gates;
        let least = if uses_cold {
            self.min_slots.saturating_mul(slot)
        } else {
            0
        };
        let more = match left / unit >= self.clusters {
            true => 0,
            false => self.more_buffers(left, least),
        };
        let stream = u64::from(more) * self.stream_len;
        let left = left - stream;
        let (hot_clusters, slots) = if left / unit >= self.clusters {
            (self.clusters, 0)
        } else if uses_cold {
            let (hot, slots) = split(left, unit, slot, self.hot_clusters, self.min_slots);
            (hot, slots.min(self.neurons))
        } else {
            (left / unit, 0)
        };
        let ffn = hot_clusters * unit + slots * slot;
        let embedding = hot_clusters == self.clusters
            && self.embedding > 0
            && left.saturating_sub(ffn) >= self.embedding;
        for (what, bytes) in [
            ("gates", gates),
            ("stream", stream),
            ("hot", hot_clusters * unit),
            ("cold", slots * slot),
            ("embedding", if embedding { self.embedding } else { 0 }),
        ] {
            ledger
                .charge(what, bytes)
                .map_err(emberflow_storage::Error::from)?;
        }
        Ok(MemoryPlan {
            ledger,
            residency,
            hot_clusters,
            slots,
            stream_buffers: LEAST_BUFFERS + more,
            embedding,
        })
    }

    /// Stream buffers beyond the fewest, out of `left` bytes for neurons, of which cold slots need
    /// `least`; 0 where there is no cold region.
    fn more_buffers(&self, left: u64, least: u64) -> u32 {
        let part = if least > 0 {
            STREAM_PART_COLD
        } else {
            STREAM_PART
        };
        let room = (left / part).min(left.saturating_sub(least));
        let fit = room / self.stream_len.max(1);
        let wanted = self.stream_most.saturating_sub(LEAST_BUFFERS);
        wanted.min(u32::try_from(fit).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn needs() -> Needs {
        Needs {
            process: 10 << 20,
            process_peak: 11 << 20,
            fixed: 3 << 20,
            embedding: 1 << 20,
            scales: 1 << 20,
            kv: 1 << 20,
            scratch: 1 << 20,
            predictor: 0,
            gates: 340 * 8000,
            gate_len: 340,
            rest_len: 680,
            whole_slot: 1024,
            rest_slot: 1024,
            neurons: 8000,
            banks: 4,
            cluster: 128,
            clusters: 63,
            hot_clusters: 7,
            two_phases: false,
            min_slots: 256,
            stream_len: 128 * 1024,
            stream_most: 0,
            gates_help: true,
            gates_must: false,
            predicts: false,
        }
    }

    #[test]
    fn stream_buffers_follow_the_budget_and_the_device() {
        let n = Needs {
            gates_help: false,
            stream_most: 12,
            ..needs()
        };
        let at = |share: f64| n.plan(n.budget_for_share(share)).unwrap();
        assert_eq!(n.plan(n.smallest_budget()).unwrap().stream_buffers, 4);
        // A 16th of 8 MB is four buffers of 128 KiB.
        assert_eq!([0.2, 0.5, 0.9].map(|s| at(s).stream_buffers), [4, 6, 7]);
        let large = Needs {
            stream_len: 16 << 10,
            ..n
        };
        let half = large.plan(large.budget_for_share(0.5)).unwrap();
        assert_eq!(half.stream_buffers, 12);
        assert_eq!(half.ledger.held("stream"), 8 * (16 << 10));
        // Nothing streams where everything fits.
        let all = large.plan(large.full_budget()).unwrap();
        assert_eq!((all.hot_clusters, all.stream_buffers), (63, 4));
    }

    #[test]
    fn with_predictors_bundles_stay_whole_until_everything_fits() {
        let n = Needs {
            predicts: true,
            predictor: 300 << 10,
            ..needs()
        };
        assert_eq!(n.base(), needs().base() + (300 << 10));
        let small = n.plan(n.smallest_budget()).unwrap();
        assert_eq!((small.residency, small.slots), (Residency::Bundles, 256));
        for share in [0.4, 0.8, 0.95] {
            let part = n.plan(n.budget_for_share(share)).unwrap();
            assert_eq!(part.residency, Residency::Bundles);
            let held = part.ffn_resident_share(&n);
            assert!((share - 0.02..=share).contains(&held), "{share}: {held}");
        }
        let all = n.plan(n.full_budget()).unwrap();
        assert_eq!(all.residency, Residency::GatesResident);
        assert_eq!(all.ffn_resident_share(&n), 1.0);
    }

    #[test]
    fn gates_are_resident_first_when_they_fit() {
        let n = needs();
        let smallest = n.smallest_budget();
        let plan = n.plan(smallest).unwrap();
        assert_eq!((plan.residency, plan.slots), (Residency::Bundles, 0));
        let plan = n.plan(with_kernel(smallest + n.with_gates())).unwrap();
        assert_eq!(plan.residency, Residency::GatesResident);
        let all = n.plan(n.full_budget()).unwrap();
        assert_eq!(
            (all.hot_clusters, all.slots, all.residency),
            (63, 0, Residency::GatesResident)
        );
        assert_eq!(all.ffn_resident_share(&n), 1.0);
    }

    #[test]
    fn the_embedding_stays_where_everything_else_does() {
        let n = needs();
        let full = n.full_budget();
        let held = |budget| {
            let plan = n.plan(budget).unwrap();
            assert_eq!(plan.hot_clusters, n.clusters);
            (plan.embedding, plan.ledger.held("embedding"))
        };
        assert_eq!(held(full), (true, n.embedding));
        assert_eq!(held(full - n.embedding / 2), (false, 0));
        let less = n.plan(full - n.embedding - (2 << 20)).unwrap();
        assert!(less.hot_clusters < n.clusters && !less.embedding);
    }

    #[test]
    fn two_phases_need_a_cold_region() {
        let n = Needs {
            two_phases: true,
            gates_help: false,
            ..needs()
        };
        let plan = n.plan(n.smallest_budget()).unwrap();
        assert_eq!((plan.hot_clusters, plan.slots), (0, 256));
        let plan = n.plan(n.smallest_budget() + (4 << 20)).unwrap();
        assert_eq!(plan.hot_clusters, 7);
        assert!(plan.slots > 256 + 2048, "{}", plan.slots);
    }

    #[test]
    fn a_window_may_use_both_regions() {
        let n = needs();
        for share in [0.5, 0.8, 1.0] {
            let plan = n.plan(n.budget_for_share(share)).unwrap();
            let regions = plan.ledger.held("hot") + plan.ledger.held("cold");
            let window = plan.clone().limited_to(Ablation::LlmFlash, &n);
            assert_eq!(window.hot_clusters, 0);
            let room = regions / n.rest_slot;
            assert_eq!(window.slots, room.min(n.neurons), "{share}");
            assert!(window.ledger.used() <= plan.ledger.used());
            let nothing = plan.limited_to(Ablation::NoCache, &n);
            assert_eq!(nothing.slots, room.min(n.neurons / n.banks), "{share}");
        }
    }

    #[test]
    fn too_small_names_the_smallest_that_works() {
        let n = needs();
        let smallest = n.smallest_budget();
        match n.plan(smallest - 1) {
            Err(Error::BudgetTooSmall { smallest: s, .. }) => assert_eq!(s, smallest),
            other => panic!("{other:?}"),
        }
        assert!(n.plan(smallest).is_ok());
    }

    #[test]
    fn a_peak_already_reached_counts() {
        let n = Needs {
            process_peak: 100 << 20,
            ..needs()
        };
        assert!(n.smallest_budget() > 100 << 20);
    }

    #[test]
    fn a_share_counts_every_weight_once() {
        let n = needs();
        for share in [0.2, 0.34, 0.45, 0.5, 0.75, 1.0] {
            let plan = n.plan(n.budget_for_share(share)).unwrap();
            // 62 clusters of 128 and one of 64, all counted alike
            let hot = plan.hot_clusters as f64 * 8000.0 / 63.0;
            let units = (plan.slots as f64 + hot).min(8000.0);
            let resident = match plan.residency {
                Residency::GatesResident => units * 680.0 + 8000.0 * 340.0,
                Residency::Bundles => units * 1020.0,
            };
            let distinct = resident / (8000.0 * 1020.0);
            assert!((distinct - plan.ffn_resident_share(&n)).abs() < 1e-9);
            assert!(
                distinct <= share + 1e-9 && distinct > share - 0.02,
                "{share}: {distinct}"
            );
        }
    }

    proptest! {
        #[test]
        fn a_plan_never_exceeds_its_budget(extra in 0u64..20 << 20, gates_help: bool, predicts: bool) {
            let predicts = predicts && gates_help;
            let n = Needs { gates_help, predicts, ..needs() };
            let plan = n.plan(n.smallest_budget() + extra).unwrap();
            let held = n.base() + plan.ledger.held("kernel") + plan.ledger.held("gates") + plan.ledger.held("cold")
                + plan.ledger.held("embedding")
                + plan.ledger.held("stream")
                + plan.ledger.held("hot");
            prop_assert_eq!(held, plan.ledger.used());
            prop_assert!(held <= plan.budget());
            prop_assert!(plan.slots >= n.min_slots
                || plan.hot_clusters == n.clusters
                || plan.residency == Residency::Bundles);
            let more = n.plan(n.smallest_budget() + extra + (1 << 20)).unwrap();
            prop_assert!(more.ffn_resident_share(&n) >= plan.ffn_resident_share(&n)
                || more.residency != plan.residency);
        }
    }
}
