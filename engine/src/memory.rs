//! The memory plan: how one budget is divided, or the smallest budget that works.
//!
//! Pure arithmetic. Everything that the process will hold is an input; the
//! result says how many neuron slots the cold region gets and whether the Gate
//! rows stay resident (DESIGN: in exact mode a third of the FFN buys exact text
//! at a predictable number of reads).

use emberflow_storage::budget::Ledger;

use crate::Error;

/// Sizes that do not depend on the plan, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Resident set of the process before anything below is allocated
    /// (program, tokenizer, tables).
    pub process: u64,
    /// Highest resident set so far; a budget below it is already broken.
    pub process_peak: u64,
    /// Attention, norms, embedding, head, resident scales.
    pub fixed: u64,
    /// Keys and values at full context.
    pub kv: u64,
    /// Activations, partial sums, logits, I/O and sampling buffers.
    pub scratch: u64,
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
    /// Slots below which a layer cannot be worked on.
    pub min_slots: u64,
    /// Whether resident Gate rows help: true for `exact` on a sparse activation.
    pub gates_help: bool,
}

/// Pages the process touches later that no ledger line names: thread stacks,
/// code pages, allocator slack. Checked by the peak-RSS tests.
pub const RUNTIME_MARGIN: u64 = 2 << 20;

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
    /// Neurons the cold region holds at once.
    pub slots: u64,
}

impl MemoryPlan {
    /// The budget, bytes.
    pub fn budget(&self) -> u64 {
        self.ledger.budget()
    }

    /// Share of the FFN's weights that stay in memory, 0 to 1. Weights count
    /// once, and neither padding nor a second copy in a slot counts.
    pub fn ffn_resident_share(&self, needs: &Needs) -> f64 {
        let slots = self.slots.min(needs.neurons) as f64;
        let neurons = (needs.neurons as f64).max(1.0);
        let gate = needs.gate_len as f64 / (needs.gate_len + needs.rest_len).max(1) as f64;
        match self.residency {
            Residency::GatesResident => gate + (1.0 - gate) * slots / neurons,
            Residency::Bundles => slots / neurons,
        }
    }
}

impl Needs {
    /// What is held whatever the plan, by the names of the ledger.
    fn base_entries(&self) -> [(&'static str, u64); 5] {
        [
            ("process", self.process),
            ("fixed", self.fixed),
            ("kv", self.kv),
            ("scratch", self.scratch),
            ("margin", RUNTIME_MARGIN),
        ]
    }

    fn base(&self) -> u64 {
        self.base_entries()
            .iter()
            .fold(0u64, |sum, entry| sum.saturating_add(entry.1))
    }

    /// The smallest budget that works.
    pub fn smallest_budget(&self) -> u64 {
        let streaming = self
            .base()
            .saturating_add(self.min_slots.saturating_mul(self.whole_slot));
        let gates = self
            .base()
            .saturating_add(self.gates)
            .saturating_add(self.min_slots.saturating_mul(self.rest_slot));
        let least = if self.gates_help {
            streaming.min(gates)
        } else {
            streaming
        };
        least.max(self.process_peak.saturating_add(RUNTIME_MARGIN))
    }

    /// The budget that holds the whole model.
    pub fn full_budget(&self) -> u64 {
        let ffn = if self.gates_help {
            self.gates
                .saturating_add(self.neurons.saturating_mul(self.rest_slot))
        } else {
            self.neurons.saturating_mul(self.whole_slot)
        };
        self.base().saturating_add(ffn).max(self.smallest_budget())
    }

    /// The budget that keeps `share` (0 to 1) of the FFN's weights in memory, or
    /// the smallest that works if that is more.
    pub fn budget_for_share(&self, share: f64) -> u64 {
        let neurons = self.neurons as f64;
        let gate = self.gate_len as f64 / (self.gate_len + self.rest_len).max(1) as f64;
        let beside_gates = ((share - gate) / (1.0 - gate) * neurons) as u64;
        let ffn = if self.gates_help && share > gate && beside_gates >= self.min_slots {
            self.gates
                .saturating_add(beside_gates.saturating_mul(self.rest_slot))
        } else {
            let slots = (share * neurons) as u64;
            slots.saturating_mul(self.whole_slot)
        };
        self.base().saturating_add(ffn).max(self.smallest_budget())
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
        for (what, bytes) in self.base_entries() {
            ledger
                .charge(what, bytes)
                .map_err(emberflow_storage::Error::from)?;
        }
        let slots_in = |left: u64, slot: u64| (left / slot.max(1)).min(self.neurons);
        let left = ledger.left();
        let beside_gates = left
            .checked_sub(self.gates)
            .map_or(0, |left| slots_in(left, self.rest_slot));
        let (residency, gates, slot, slots) =
            if self.gates_help && beside_gates >= self.min_slots.min(self.neurons) {
                let residency = Residency::GatesResident;
                (residency, self.gates, self.rest_slot, beside_gates)
            } else {
                let slots = slots_in(left, self.whole_slot);
                (Residency::Bundles, 0, self.whole_slot, slots)
            };
        for (what, bytes) in [("hot", gates), ("cold", slots * slot)] {
            ledger
                .charge(what, bytes)
                .map_err(emberflow_storage::Error::from)?;
        }
        Ok(MemoryPlan {
            ledger,
            residency,
            slots,
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
            fixed: 4 << 20,
            kv: 1 << 20,
            scratch: 1 << 20,
            gates: 340 * 8000,
            gate_len: 340,
            rest_len: 680,
            whole_slot: 1024,
            rest_slot: 1024,
            neurons: 8000,
            min_slots: 128,
            gates_help: true,
        }
    }

    #[test]
    fn gates_come_first_when_they_fit() {
        let n = needs();
        let smallest = n.smallest_budget();
        let plan = n.plan(smallest).unwrap();
        assert_eq!((plan.residency, plan.slots), (Residency::Bundles, 128));
        let plan = n.plan(smallest + n.gates).unwrap();
        assert_eq!(plan.residency, Residency::GatesResident);
        let all = n.plan(n.full_budget()).unwrap();
        assert_eq!((all.slots, all.residency), (8000, Residency::GatesResident));
        assert_eq!(all.ffn_resident_share(&n), 1.0);
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
        for share in [0.34, 0.45, 0.5, 0.75, 1.0] {
            let plan = n.plan(n.budget_for_share(share)).unwrap();
            let slots = plan.slots as f64 * 680.0;
            let resident = match plan.residency {
                Residency::GatesResident => slots + 8000.0 * 340.0,
                Residency::Bundles => plan.slots as f64 * 1020.0,
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
        fn a_plan_never_exceeds_its_budget(extra in 0u64..20 << 20, gates_help: bool) {
            let n = Needs { gates_help, ..needs() };
            let plan = n.plan(n.smallest_budget() + extra).unwrap();
            let held = n.base() + plan.ledger.held("cold") + plan.ledger.held("hot");
            prop_assert_eq!(held, plan.ledger.used());
            prop_assert!(held <= plan.budget());
            prop_assert!(plan.slots >= n.min_slots);
            let more = n.plan(n.smallest_budget() + extra + (1 << 20)).unwrap();
            prop_assert!(more.ffn_resident_share(&n) >= plan.ffn_resident_share(&n)
                || more.residency != plan.residency);
        }
    }
}
