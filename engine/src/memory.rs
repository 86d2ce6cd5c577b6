//! The memory plan: the division of a budget, or the smallest feasible budget.
//!
//! Pure arithmetic on the sizes of everything that the process holds. It decides the sizes of the
//! regions and for how many banks Gate rows are resident: in exact mode, a third of the FFN in
//! memory makes the number of reads per token predictable.

use emberflow_storage::budget::Ledger;

use crate::ablation::{Keep, Policy};
use crate::cluster::{LEAST_BUFFERS, split};
use crate::error::Error;

/// Names of the ledger's entries for [`Needs::tables`]: that of the embedding in every plan, the others in those of models that
/// have the tables.
pub(crate) const TABLES: [&str; 3] = ["embedding", "layer_inputs", "ngrams"];

/// Sizes in bytes that do not depend on the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Resident set of the process before the allocations below (program, tokenizer, tables).
    pub process: u64,
    /// Peak resident set so far; smaller budgets are already exceeded.
    pub process_peak: u64,
    /// Attention, norms, head, and buffers for rows of tables.
    pub fixed: u64,
    /// Tables of which a token needs few rows, as whole tables, in the order in which they become
    /// resident: the embedding, per-layer inputs, n-grams; 0 if the model has no such table.
    pub tables: [u64; 3],
    /// Quantisation scales that stay resident.
    pub scales: u64,
    /// Keys and values at full context.
    pub kv: u64,
    /// Positions per text.
    pub context: usize,
    /// Number of texts, each with a context of that length.
    pub batch: usize,
    /// Activations, partial sums, logits, I/O and sampling buffers.
    pub scratch: u64,
    /// Predictor weights and scratch; 0 without predictors.
    pub predictor: u64,
    /// All Gate rows of all layers.
    pub gates: u64,
    /// Payload bytes of one neuron's Gate row; of its Up and Down (`rest_len`).
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
    /// Clusters that a lane holds instead of the store.
    pub lane_clusters: u64,
    /// Bytes of the budget that they take: 0 if the lane has a memory of its own.
    pub lane: u64,
    /// Clusters that are hot by the activation statistics.
    pub hot_clusters: u64,
    /// Clusters of layers that need all neurons for every token, while other layers are sparse.
    pub always: u64,
    /// Tiles of a model whose FFNs lie in tiles; it has no neurons in bundles.
    pub tiles: u64,
    /// Bytes of a slot for a tile, and the fewest slots that allow progress.
    pub tile_slot: u64,
    /// See `tile_slot`.
    pub least_tiles: u64,
    /// Bytes of FFN matrices in `fixed` that a packed model would read from flash.
    pub whole_ffn: u64,
    /// Bytes of projections and the output head that are read for every pass; 0 if they are resident.
    pub streamed: u64,
    /// Two-phase loading where Gate rows are not resident.
    pub two_phases: bool,
    /// Fewest cold slots that allow progress.
    pub min_slots: u64,
    /// Bytes of a stream buffer for a whole cluster. [`LEAST_BUFFERS`] of them are in `scratch`.
    pub stream_len: u64,
    /// Most stream buffers that storage can fill.
    pub stream_most: u32,
    /// Whether resident Gate rows help: with `exact` on a sparse activation, and with `predicted`.
    pub gates_help: bool,
    /// Whether Gate rows must be resident.
    pub gates_must: bool,
    /// Target number of leading banks with resident Gate rows, if they help. The clusters of banks
    /// without them stream.
    pub gate_banks: u64,
    /// Whether only the first banks may have resident Gate rows: banks of one size, one per layer,
    /// that stream otherwise.
    pub gates_divide: bool,
    /// Whether predictors determine the active set, so that not all Gate rows are needed.
    pub predicts: bool,
}

/// Memory touched later without a ledger entry: thread stacks, code pages, allocator slack.
/// Verified by the peak-RSS tests. Measured: 2.0 to 2.5 MiB of the program file, mapped in units of
/// 64 KiB and more, and up to 0.5 MiB of the rest.
pub const RUNTIME_MARGIN: u64 = 4 << 20;

/// 1/128 of the budget is reserved for the kernel: page tables, reads in flight, pages of the
/// program file. RSS does not include all of it, but control groups do; a group limited to the
/// budget would otherwise evict the program's own pages. Measured: 18 MiB at 2.6 GiB.
const KERNEL_PART: u64 = 128;

/// Stream buffers beyond the fewest may use 1/16 of the neurons' memory in a model whose clusters
/// stream for every token.
const STREAM_PART: u64 = 16;
/// The same in a model whose clusters stream only for prompts.
const STREAM_PART_COLD: u64 = 64;

/// The smallest budget that leaves `bytes` after the kernel's share.
fn with_kernel(bytes: u64) -> u64 {
    bytes.saturating_add(bytes.div_ceil(KERNEL_PART - 1))
}

/// Contents of a cold slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotContents {
    /// Up and Down; Gate rows are resident.
    GatesResident,
    /// Whole bundles.
    Bundles,
}

/// Division of one budget.
#[derive(Debug, Clone)]
pub struct MemoryPlan {
    /// The budget and its entries by purpose.
    pub ledger: Ledger,
    /// Number of leading banks with resident Gate rows, out of `banks`.
    pub gate_banks: u64,
    /// Banks of the model.
    pub banks: u64,
    /// Capacity of the hot region in clusters.
    pub hot_clusters: u64,
    /// Capacity of the cold region in neurons.
    pub slots: u64,
    /// Slots for tiles, of the model's `tiles`.
    pub tile_slots: u64,
    /// See `tile_slots`.
    pub tiles: u64,
    /// Bytes of projections and the output head that are read for every pass.
    pub streamed: u64,
    /// Stream buffers: whole clusters in flight at once.
    pub stream_buffers: u32,
    /// The resident ones of [`Needs::tables`]; none unless all neurons are resident.
    pub tables: [bool; 3],
}

/// Division of the memory for neurons.
struct Regions {
    /// Banks with resident Gate rows, and the bytes of those rows.
    gate_banks: u64,
    gates: u64,
    /// Stream buffers beyond the fewest.
    buffers: u32,
    /// Clusters of the hot region, and their bytes.
    hot_clusters: u64,
    hot: u64,
    /// Slots of the cold region, and their bytes.
    slots: u64,
    cold: u64,
}

impl MemoryPlan {
    /// The budget in bytes.
    pub fn budget(&self) -> u64 {
        self.ledger.budget()
    }

    /// Whether all Gate rows are resident.
    pub fn gates_resident(&self) -> bool {
        self.gate_banks == self.banks
    }

    /// Whether some banks have resident Gate rows and the others stream.
    pub fn gates_partly(&self) -> bool {
        self.gate_banks > 0 && self.gate_banks < self.banks
    }

    /// Contents of a slot.
    pub fn residency(&self) -> SlotContents {
        match self.gate_banks {
            0 => SlotContents::Bundles,
            _ => SlotContents::GatesResident,
        }
    }

    /// Upper bound on the bytes read when the plan takes effect. Tiles are read when they are needed.
    pub fn loaded(&self) -> u64 {
        let parts = [
            "fixed",
            "scales",
            "device",
            "predictor",
            "gates",
            "hot",
            "cold",
        ];
        let parts = parts.iter().chain(&TABLES);
        parts.map(|part| self.ledger.held(part)).sum()
    }

    /// Bytes that the process will hold under this plan, possibly less than the budget. Excludes
    /// the reserves: the kernel's share and the margin.
    pub fn held(&self) -> u64 {
        let reserves = ["kernel", "margin"].map(|part| self.ledger.held(part));
        let reserves = reserves.into_iter().fold(0, u64::saturating_add);
        self.ledger.used().saturating_sub(reserves)
    }

    /// The plan of a policy that keeps fewer neurons resident.
    pub(crate) fn limited_to(mut self, policy: Policy, needs: &Needs) -> Self {
        let wanted = match policy.keep {
            // The rest is for pages.
            _ if policy.mapped => {
                self.gate_banks = 0;
                self.ledger.release("gates", u64::MAX);
                0
            }
            Keep::All => return self,
            // As much as fits.
            Keep::Window => needs.neurons,
            // One layer's reads in flight.
            Keep::Nothing => needs.neurons / needs.banks.max(1),
        };
        let slot = match self.residency() {
            SlotContents::GatesResident => needs.rest_slot,
            SlotContents::Bundles => needs.whole_slot,
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
        // Cannot exceed the released bytes, except in models with a few clusters.
        let _ = self.ledger.charge("cold", slots * slot);
        self.hot_clusters = 0;
        self.slots = slots;
        self
    }

    /// Share of the tiles that have no slot, 0 to 1.
    pub fn tiles_missing(&self) -> f64 {
        let held = self.tile_slots as f64 / (self.tiles as f64).max(1.0);
        if self.tiles > 0 { 1.0 - held } else { 0.0 }
    }

    /// Clusters that are resident as a whole: in the hot region, or outside the store.
    pub fn whole_clusters(&self, needs: &Needs) -> u64 {
        self.hot_clusters + needs.lane_clusters
    }

    /// Resident share of the FFN's weights, 0 to 1, without padding and duplicates.
    pub fn ffn_resident_share(&self, needs: &Needs) -> f64 {
        if needs.neurons == 0 {
            return 1.0 - self.tiles_missing();
        }
        // The last cluster of a bank may be partial.
        let hot = self.whole_clusters(needs) as f64 / (needs.clusters as f64).max(1.0);
        let cold = self.slots as f64 / (needs.neurons as f64).max(1.0);
        let share = (hot + cold).min(1.0);
        let gate = needs.gate_share();
        match self.residency() {
            SlotContents::GatesResident => {
                let gates = self.gate_banks as f64 / (self.banks as f64).max(1.0);
                gate * gates + (1.0 - gate) * share
            }
            SlotContents::Bundles => share,
        }
    }
}

impl Needs {
    /// Ledger entries that every plan has.
    fn base_entries(&self) -> [(&'static str, u64); 8] {
        [
            ("process", self.process),
            ("fixed", self.fixed),
            ("scales", self.scales),
            ("kv", self.kv),
            ("predictor", self.predictor),
            ("scratch", self.scratch),
            ("device", self.lane),
            ("margin", RUNTIME_MARGIN),
        ]
    }

    fn base(&self) -> u64 {
        self.base_entries()
            .iter()
            .fold(0u64, |sum, entry| sum.saturating_add(entry.1))
    }

    /// Clusters held by the host.
    pub(crate) fn host_clusters(&self) -> u64 {
        self.clusters.saturating_sub(self.lane_clusters)
    }

    pub(crate) fn gate_share(&self) -> f64 {
        self.gate_len as f64 / (self.gate_len + self.rest_len).max(1) as f64
    }

    /// Bytes of a cluster in the hot region.
    fn cluster_len(&self, residency: SlotContents) -> u64 {
        let neuron = match residency {
            SlotContents::GatesResident => self.rest_len,
            SlotContents::Bundles => self.gate_len + self.rest_len,
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
        let with_gates = self.with_gates();
        let least = if self.gates_must {
            with_gates
        } else if self.gates_help {
            streaming.min(with_gates)
        } else {
            streaming
        };
        let least = least.saturating_add(self.tile_bytes(self.least_tiles));
        let budget = with_kernel(self.base().saturating_add(least));
        budget.max(self.process_peak.saturating_add(RUNTIME_MARGIN))
    }

    /// Whether single neurons are read when Gate rows are not resident.
    fn cold_without_gates(&self) -> bool {
        self.two_phases || self.predicts
    }

    /// Bytes of resident Gate rows plus the fewest slots. With predictors, Gate rows pay off only
    /// if everything fits: otherwise whole bundles in the same memory have a higher hit rate, and
    /// prefetching predicts bundles better than firing neurons.
    fn with_gates(&self) -> u64 {
        let least = self.min_slots.saturating_mul(self.rest_slot);
        let rest = if self.predicts {
            let resident = self
                .host_clusters()
                .saturating_mul(self.cluster_len(SlotContents::GatesResident));
            least.max(resident)
        } else {
            least
        };
        self.gates_of(self.gate_banks).saturating_add(rest)
    }

    /// Bytes of the Gate rows of the first `banks` banks. If `banks` is not all of them, banks have
    /// equal sizes.
    fn gates_of(&self, banks: u64) -> u64 {
        if banks == self.banks {
            self.gates
        } else {
            self.gates.div_ceil(self.banks.max(1)) * banks
        }
    }

    /// The budget that holds the whole model.
    pub fn full_budget(&self) -> u64 {
        let (residency, gates) = if self.gates_help {
            (SlotContents::GatesResident, self.gates)
        } else {
            (SlotContents::Bundles, 0)
        };
        let all = (self.host_clusters()).saturating_mul(self.cluster_len(residency));
        let ffn = all.max(self.min_slots.saturating_mul(self.rest_slot));
        let rest = gates
            .saturating_add(ffn)
            .saturating_add(self.tile_bytes(self.tiles))
            .saturating_add(self.tables.iter().sum());
        with_kernel(self.base().saturating_add(rest)).max(self.smallest_budget())
    }

    /// The largest budget that keeps at most `share` (0 to 1) of the FFN weights resident, but at
    /// least the smallest feasible one.
    pub fn budget_for_share(&self, share: f64) -> u64 {
        let smallest = self.smallest_budget();
        let share_of = |budget: u64| match self.plan(budget) {
            Ok(plan) => plan.ffn_resident_share(self),
            Err(_) => 0.0,
        };
        // The share is monotonic on each side of the step at which Gate rows become resident.
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

    /// Divides `budget`, or returns the smallest feasible one as an error.
    pub fn plan(&self, budget: u64) -> Result<MemoryPlan, Error> {
        let smallest = self.smallest_budget();
        if budget < smallest {
            return Err(Error::BudgetTooSmall {
                budget,
                context: self.context,
                batch: self.batch,
                smallest,
                full: self.full_budget(),
                whole_ffn: self.whole_ffn,
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
        let r = self.regions(left);
        let tile_slots = self.tiles.min(left / self.tile_slot.max(1));
        let ffn = r.gates + r.hot + r.cold + u64::from(r.buffers) * self.stream_len;
        let ffn = ffn.saturating_add(self.tile_bytes(tile_slots));
        let room = if r.hot_clusters == self.host_clusters() && tile_slots == self.tiles {
            left.saturating_sub(ffn)
        } else {
            0
        };
        let tables = self.tables_within(room);
        let named = TABLES.into_iter().zip(tables).zip(self.tables);
        let named =
            named.filter_map(|(named, all)| (all > 0 || named.0 == TABLES[0]).then_some(named));
        let regions = [
            ("gates", r.gates),
            ("stream", u64::from(r.buffers) * self.stream_len),
            ("hot", r.hot),
            ("cold", r.cold),
            ("tiles", self.tile_bytes(tile_slots)),
        ];
        for (what, bytes) in regions.into_iter().chain(named) {
            ledger
                .charge(what, bytes)
                .map_err(emberflow_storage::Error::from)?;
        }
        Ok(MemoryPlan {
            ledger,
            gate_banks: r.gate_banks,
            banks: self.banks,
            hot_clusters: r.hot_clusters,
            slots: r.slots,
            tile_slots,
            tiles: self.tiles,
            streamed: self.streamed,
            stream_buffers: LEAST_BUFFERS + r.buffers,
            tables: tables.map(|bytes| bytes > 0),
        })
    }

    /// Bytes of `slots` slots for tiles.
    fn tile_bytes(&self, slots: u64) -> u64 {
        slots.saturating_mul(self.tile_slot)
    }

    /// The bytes of the tables that `room` bytes hold, one after the other; 0 for those that they do not.
    fn tables_within(&self, room: u64) -> [u64; 3] {
        let mut left = room;
        self.tables.map(|bytes| {
            let held = if bytes <= left { bytes } else { 0 };
            left -= held;
            held
        })
    }

    /// Divides the `left` bytes for neurons.
    fn regions(&self, left: u64) -> Regions {
        let (residency, gate_banks, slot, uses_cold) =
            if self.gates_help && left >= self.with_gates() {
                let residency = SlotContents::GatesResident;
                (residency, self.gate_banks, self.rest_slot, true)
            } else {
                let residency = SlotContents::Bundles;
                (residency, 0, self.whole_slot, self.cold_without_gates())
            };
        let gates = self.gates_of(gate_banks);
        let partly = gate_banks > 0 && gate_banks < self.banks;
        let unit = self.cluster_len(residency).max(1);
        let (all, left) = (self.host_clusters(), left - gates);
        let least = if uses_cold {
            self.min_slots.saturating_mul(slot)
        } else {
            0
        };
        let buffers = if left / unit >= all {
            0
        } else if least > 0 && !partly && self.always == 0 {
            self.more_buffers(left, least, STREAM_PART_COLD)
        } else {
            self.more_buffers(left, least, STREAM_PART)
        };
        let left = left - u64::from(buffers) * self.stream_len;
        let wanted = self.hot_clusters.saturating_sub(self.lane_clusters);
        let neurons = (self.neurons).saturating_sub(self.lane_clusters * self.cluster);
        let (hot_clusters, slots) = if partly {
            // Nothing of the streaming banks stays in memory.
            let neurons = self.neurons * gate_banks / self.banks;
            (0, (left / slot.max(1)).min(neurons))
        } else if left / unit >= all {
            (all, 0)
        } else if uses_cold {
            let hot = [wanted, self.always.min(wanted)];
            let (hot, slots) = split(left, [unit, slot], hot, self.min_slots);
            (hot, slots.min(neurons))
        } else {
            (left / unit, 0)
        };
        Regions {
            gate_banks,
            gates,
            buffers,
            hot_clusters,
            hot: hot_clusters * unit,
            slots,
            cold: slots * slot,
        }
    }

    /// Stream buffers beyond the fewest: at most 1/`part` of the `left` bytes for neurons, within
    /// what the fewest cold slots (`least` bytes) leave.
    fn more_buffers(&self, left: u64, least: u64, part: u64) -> u32 {
        let room = (left / part).min(left.saturating_sub(least));
        let fit = room / self.stream_len.max(1);
        let wanted = self.stream_most.saturating_sub(LEAST_BUFFERS);
        wanted.min(u32::try_from(fit).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests;
