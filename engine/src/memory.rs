//! The memory plan: how one budget is divided, or the smallest budget that works.
//!
//! Pure arithmetic. Everything that the process will hold is an input; the
//! result says how many neuron slots the cold region gets and whether the Gate
//! rows stay resident (DESIGN: in exact mode a third of the FFN buys exact text
//! at a predictable number of reads).

use emberflow_storage::budget::Ledger;

use crate::ablation::{Ablation, Keep};
use crate::error::Error;
use crate::store::regions::split;

/// Sizes that do not depend on the plan, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Resident set of the process before anything below is allocated
    /// (program, tokenizer, tables).
    pub process: u64,
    /// Highest resident set so far; a budget below it is already broken.
    pub process_peak: u64,
    /// Attention, norms, head, and what reading single rows of the embedding takes.
    pub fixed: u64,
    /// All rows of the embedding; 0 where it is the head, too.
    pub embedding: u64,
    /// Quantisation scales that stay resident.
    pub scales: u64,
    /// Keys and values at full context.
    pub kv: u64,
    /// Activations, partial sums, logits, I/O and sampling buffers.
    pub scratch: u64,
    /// Predictor weights and their working memory; 0 without predictors.
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
    /// Clusters that the activation statistics call hot.
    pub hot_clusters: u64,
    /// Where gates are not resident: read Gate parts first, the rest only of
    /// neurons that fire.
    pub two_phases: bool,
    /// Slots below which a layer cannot be worked on.
    pub min_slots: u64,
    /// Whether resident Gate rows help: true for `exact` on a sparse activation, and for
    /// `predicted`.
    pub gates_help: bool,
    /// Whether predictors name the needed neurons ahead of their gates, so that not all
    /// of them have to be looked at where Gate rows are not resident.
    pub predicts: bool,
}

/// Pages the process touches later that no ledger line names: thread stacks,
/// code pages, allocator slack. Checked by the peak-RSS tests.
pub const RUNTIME_MARGIN: u64 = 2 << 20;

/// Part of a budget that is left to what the kernel holds for the process: page tables, reads under
/// way, pages of the program's file. No resident set counts it all, but control groups do, and in one
/// with the budget as its limit the program's own pages would be read again and again. At 2.6 GiB it is
/// 18 MiB.
const KERNEL_PART: u64 = 128;

/// The least budget with room for `bytes` beside the kernel's part.
fn with_kernel(bytes: u64) -> u64 {
    bytes.saturating_add(bytes.div_ceil(KERNEL_PART - 1))
}

/// What a cache slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// Gate rows are resident, slots hold Up and Down.
    GatesResident,
    /// Slots hold whole bundles.
    Bundles,
}

/// The division of one budget.
#[derive(Debug, Clone)]
pub struct MemoryPlan {
    /// The budget and what every part of the process holds of it.
    pub ledger: Ledger,
    /// What a slot holds.
    pub residency: Residency,
    /// Clusters the hot region holds at once.
    pub hot_clusters: u64,
    /// Neurons the cold region holds at once.
    pub slots: u64,
    /// Whether all rows of the embedding stay in memory: where everything else does.
    pub embedding: bool,
}

impl MemoryPlan {
    /// The budget, bytes.
    pub fn budget(&self) -> u64 {
        self.ledger.budget()
    }

    /// Whether all Gate rows stay in memory.
    pub fn gates_resident(&self) -> bool {
        self.residency == Residency::GatesResident
    }

    /// Bytes that are read when the plan takes effect, at most.
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

    /// The same plan where less is kept.
    pub(crate) fn limited_to(mut self, ablation: Ablation, needs: &Needs) -> Self {
        let wanted = match ablation.keep() {
            _ if ablation == Ablation::Mmap => 0,
            Keep::All => return self,
            // As much as there is.
            Keep::Window => needs.neurons,
            // What a layer's reads need on their way.
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
        // Never more than what was released, but for models of a few clusters.
        let _ = self.ledger.charge("cold", slots * slot);
        self.hot_clusters = 0;
        self.slots = slots;
        self
    }

    /// Share of the FFN's weights that stay in memory, 0 to 1. Weights count
    /// once, and neither padding nor a second copy in a slot counts.
    pub fn ffn_resident_share(&self, needs: &Needs) -> f64 {
        let units = (self.hot_clusters * needs.cluster + self.slots).min(needs.neurons);
        let share = units as f64 / (needs.neurons as f64).max(1.0);
        let gate = needs.gate_share();
        match self.residency {
            Residency::GatesResident => gate + (1.0 - gate) * share,
            Residency::Bundles => share,
        }
    }
}

impl Needs {
    /// What is held whatever the plan, by the names of the ledger.
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

    /// The smallest budget that works.
    pub fn smallest_budget(&self) -> u64 {
        let streaming = if self.cold_without_gates() {
            self.min_slots.saturating_mul(self.whole_slot)
        } else {
            0
        };
        let beside_gates = self.with_gates();
        let least = if self.gates_help {
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

    /// Bytes of resident Gate rows and the fewest slots beside them. Where predictors say which Gate
    /// rows to read, those of all neurons pay only when everything fits: whole bundles of fewer
    /// neurons hold more of what is named, and guesses name bundles better than firing neurons.
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

    /// The largest budget that keeps at most `share` (0 to 1) of the FFN's weights
    /// in memory, or the smallest that works if that is more.
    pub fn budget_for_share(&self, share: f64) -> u64 {
        let smallest = self.smallest_budget();
        let share_of = |budget: u64| match self.plan(budget) {
            Ok(plan) => plan.ffn_resident_share(self),
            Err(_) => 0.0,
        };
        // The share grows with the budget on both sides of the step where Gate rows become resident.
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

    /// Divides `budget`, or says which one is the smallest that works.
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
        let left = left - gates;
        let unit = self.cluster_len(residency).max(1);
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
            embedding,
        })
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
            gates_help: true,
            predicts: false,
        }
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
    fn gates_come_first_when_they_fit() {
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
    fn two_phases_need_a_cold_region_beside_bundles() {
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
    fn a_window_may_fill_what_the_regions_had() {
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
            let units = (plan.slots + 128 * plan.hot_clusters).min(8000) as f64;
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
