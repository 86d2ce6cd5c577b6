//! [`NeuronStore`]: serves the FFN's neurons from memory or flash.

use std::sync::{Arc, Mutex, PoisonError};

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::cache::{Eviction, Key, SlotCache};
use emberflow_storage::io::{Completion, FileSource, IoThread, Read};
use emberflow_storage::limits::Limits;
use emberflow_storage::trace::Tracer;

use super::asked::Guesses;
use super::content::SlotContent;
use super::costs::ReadCosts;
use super::foresight::{Foreseen, Foresight};
use super::hot::HotClusters;
use super::layout::Layout;
use super::mapping::Mapping;
use super::plan::Rules;
use super::reader::Reader;
use super::regions::{CLUSTER, prefixes};
use super::resident::Resident;
use super::spread::Spread;
use super::tier::{Tier, TierSetup};
use super::work::LayerWork;
use crate::ablation::{Ablation, Overlap};
use crate::counters::Counters;
use crate::device::products::Products;
use crate::device::share::Sharing;
use crate::error::Error;
use crate::memory::MemoryPlan;
use crate::options::Options;

/// Regions use huge pages: reads of 64 KiB and more are up to 2× as fast, random bundles 1.1 to
/// 1.3× (benches/README.md). Huge pages end at the arena's limit, so the budget holds.
fn region_memory(lock: bool) -> ArenaOptions {
    ArenaOptions {
        huge_pages: true,
        lock,
        populate: false,
    }
}

/// How a layer's active set is determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// Every token needs every neuron.
    All,
    /// Neurons whose gate fires.
    Gates,
    /// Neurons that the predictor wants.
    Predictor,
}

/// Activation statistics by bank; both empty without any.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    /// Each neuron's activation frequency.
    pub frequencies: Vec<Vec<f32>>,
    /// Share of the tokens that visit an expert.
    pub visits: Vec<f32>,
}

impl Known {
    pub fn new(frequencies: Vec<Vec<f32>>, visits: Vec<f32>) -> Self {
        Self {
            frequencies,
            visits,
        }
    }
}

/// Arguments of [`NeuronStore::open`].
pub(crate) struct StoreSetup<'a> {
    pub layout: Layout,
    pub source: FileSource,
    pub memory: &'a MemoryPlan,
    pub naming: Naming,
    /// Most stream buffers of any plan.
    pub buffers: u32,
    /// Hot clusters of each bank by the statistics.
    pub hot_wanted: Vec<u32>,
    /// Activation statistics.
    pub known: &'a Known,
    pub costs: ReadCosts,
    /// Two-phase: read Gate parts before Up and Down where Gate rows are not resident.
    pub gates_first: bool,
    /// By layer: whether every token needs all of its neurons, although those of others are told
    /// apart.
    pub always: Vec<bool>,
    /// The device, if there is one.
    pub tier: Option<TierSetup>,
    pub options: &'a Options,
    pub tracer: Tracer,
}

/// Target of the border.
#[derive(Debug)]
pub(super) struct Goal {
    /// Clusters of the hot region.
    pub(super) hot: u64,
    /// Slots of the cold region.
    pub(super) cold: u64,
    /// Bytes of both together.
    pub(super) bytes: u64,
}

/// Reads of tensor rows.
#[derive(Default)]
pub(super) struct RowsUnderway {
    /// Completed rows: position in the request, row, bytes.
    pub arrived: Vec<(u32, u32, Slot)>,
    /// Rows in flight or completed and not yet handled.
    pub coming: usize,
}

/// The neurons of a model under a memory budget.
pub(crate) struct NeuronStore {
    pub(super) layout: Layout,
    pub(super) naming: Naming,
    /// Slot contents without and with resident Gate rows.
    contents: [SlotContent; 2],
    /// Shared with threads while an active set is determined; exclusive between layers.
    pub(super) resident: Arc<Resident>,
    pub(super) hot: HotClusters,
    pub(super) cold: SlotCache,
    /// The device, which holds clusters instead of these regions.
    pub(super) tier: Option<Tier>,
    /// Hot clusters of each bank by the statistics.
    pub(super) hot_wanted: Vec<u32>,
    /// By bank: share of the tokens that visit it; empty without routing statistics.
    pub(super) visits: Vec<f32>,
    /// Target of the border between the two regions, while it moves.
    pub(super) goal: Option<Goal>,
    /// Number of leading banks with resident Gate rows.
    gate_banks: usize,
    pub(super) costs: ReadCosts,
    gates_first: bool,
    /// By layer: see [`StoreSetup`].
    always: Vec<bool>,
    /// A device that computes gates, if there is one.
    pub(super) gate_products: Option<Arc<Products>>,
    memory: ArenaOptions,
    /// Compute threads, which have nothing to do while memory is filled.
    pub(super) threads: usize,
    pub(super) reader: Reader,
    pub(super) layer: LayerWork,
    pub(super) rows: RowsUnderway,
    pub(super) guesses: Guesses,
    pub(super) foresight: Foresight,
    pub(super) spreads: Vec<Spread>,
    pub(super) ablation: Ablation,
    /// The mapped file, for the mmap ablation.
    pub(super) mapped: Option<Mapping>,
    pub(super) counters: Counters,
    /// Evictions of replaced regions.
    past_evictions: u64,
    /// The first failure. Residency may be inconsistent afterwards, so the store refuses further
    /// work.
    failed: Option<String>,
    /// The first damage found by a compute thread.
    pub(super) damage: Mutex<Option<Error>>,
    tracer: Tracer,
}

impl NeuronStore {
    /// Starts the I/O thread, allocates the regions and warms them from the front of every bank:
    /// the hottest neurons, if the container is sorted by temperature.
    pub fn open(setup: StoreSetup<'_>) -> Result<Self, Error> {
        let StoreSetup {
            layout,
            source,
            memory: plan,
            options,
            tracer,
            ..
        } = setup;
        let memory = region_memory(options.lock);
        let contents = [false, true].map(|resident| layout.content(resident));
        let content = &contents[usize::from(plan.gate_banks > 0)];
        let ablation = options.ablation;
        let mut store = Self {
            ablation,
            mapped: match ablation {
                Ablation::Mmap => Some(Mapping::new(&layout)?),
                _ => None,
            },
            resident: Arc::new(Resident::read(&layout)?),
            hot: HotClusters::new(&layout, content, memory)?,
            cold: new_cold(&layout, content, memory, ablation)?,
            reader: Reader::start(
                &layout,
                source,
                options,
                setup.buffers,
                memory,
                tracer.clone(),
            )?,
            layer: LayerWork::new(&layout),
            rows: RowsUnderway::default(),
            guesses: Guesses::new(&layout),
            foresight: Foresight::new(options.read_ahead),
            spreads: vec![Spread::default(); layout.banks()],
            tier: None,
            naming: setup.naming,
            contents,
            hot_wanted: setup.hot_wanted,
            visits: setup.known.visits.clone(),
            goal: None,
            gate_banks: 0,
            costs: setup.costs,
            gates_first: setup.gates_first,
            always: setup.always,
            gate_products: None,
            memory,
            threads: options.threads,
            counters: Counters::default(),
            past_evictions: 0,
            failed: None,
            damage: Mutex::new(None),
            tracer,
            layout,
        };
        for (bank, frequencies) in (0..).zip(&setup.known.frequencies) {
            for (neuron, &often) in (0..).zip(frequencies) {
                store.cold.set_prior(Key { bank, neuron }, often.into());
            }
        }
        if let Some(tier) = setup.tier {
            store.add_tier(tier)?;
        }
        store.limit_mapped(plan)?;
        store.adopt(plan)?;
        if let Some(tier) = &mut store.tier {
            tier.settle()?;
        }
        Ok(store)
    }

    /// Makes room on a device for the hottest clusters.
    fn add_tier(&mut self, setup: TierSetup) -> Result<(), Error> {
        let (wanted, clusters) = (self.wanted(), self.layout.clusters_of_each());
        let hot = wanted.iter().copied().map(u64::from).sum();
        let prefix = match setup.clusters <= hot {
            true => prefixes(setup.clusters, &wanted, &clusters),
            // Somebody asked for more than is hot.
            false => prefixes(setup.clusters, &clusters, &clusters),
        };
        let neurons = |bank: u32, clusters: u32| {
            let last = self.layout.cluster_neurons(bank, clusters - 1);
            last.end as usize
        };
        let tier = Tier::new(setup, prefix, neurons)?;
        self.hot.begin_behind(tier.prefixes());
        self.tier = Some(tier);
        Ok(())
    }

    /// Switches to another plan between two passes. Results do not depend on the plan.
    pub fn set_plan(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        self.usable()?;
        let drained = self.drain_stream();
        self.latch(drained)?;
        self.goal = None;
        let mapped = self.limit_mapped(plan);
        self.latch(mapped)?;
        // Free first, then allocate.
        let buffers = plan.stream_buffers.min(self.reader.stream.limit());
        self.reader.stream.set_limit(buffers);
        if (plan.gate_banks > 0) == (self.gate_banks > 0) {
            let moved = self.move_gates(plan);
            self.latch(moved)?;
            self.reader.stream.set_limit(plan.stream_buffers);
            return Ok(());
        }
        // Free the old contents before loading new ones, to stay within the budget.
        self.cold.resize(0);
        self.hot.set_border(0, &vec![0; self.layout.banks()]);
        self.past_evictions += self.cold.stats().evictions + self.hot.evictions();
        let resident = exclusive(&mut self.resident);
        resident.unshare();
        let freed = resident.hold_gates(&self.layout, 0);
        self.latch(freed)?;
        let content = &self.contents[usize::from(plan.gate_banks > 0)];
        self.hot = HotClusters::new(&self.layout, content, self.memory)?;
        if let Some(tier) = &self.tier {
            self.hot.begin_behind(tier.prefixes());
        }
        self.cold = new_cold(&self.layout, content, self.memory, self.ablation)?;
        let adopted = self.adopt(plan);
        self.latch(adopted)
    }

    /// Switches to a plan whose slots have the same contents: banks gain or lose their Gate rows,
    /// and the neurons of the others stay.
    fn move_gates(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        let (before, after) = (self.gate_banks, plan.gate_banks as usize);
        self.gate_banks = after;
        if after < before {
            for bank in after as u32..before as u32 {
                self.forget_bank(bank);
            }
            let resident = exclusive(&mut self.resident);
            resident.unshare();
            resident.hold_gates(&self.layout, after)?;
        }
        self.set_border(plan);
        if after > before {
            exclusive(&mut self.resident).hold_gates(&self.layout, after)?;
            self.fill(before)?;
        }
        if let (true, Some(products)) = (after != before, &self.gate_products) {
            exclusive(&mut self.resident).share(products);
        }
        Ok(())
    }

    /// A mapped file may hold what the plan leaves, beside what was set aside for it.
    fn limit_mapped(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        let least = Mapping::least_bytes(&self.layout);
        match &mut self.mapped {
            Some(mapped) => mapped.set_limit(&self.layout, plan.ledger.left() + least),
            None => Ok(()),
        }
    }

    /// Applies a plan to empty regions and warms them.
    fn adopt(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        self.gate_banks = plan.gate_banks as usize;
        self.hot.set_visits(&self.layout, &self.visits);
        self.set_border(plan);
        self.reader.stream.set_limit(plan.stream_buffers);
        exclusive(&mut self.resident).hold_gates(&self.layout, self.gate_banks)?;
        self.fill(0)?;
        if let Some(products) = &self.gate_products {
            exclusive(&mut self.resident).share(products);
        }
        Ok(())
    }

    /// Has a device compute some of the resident gates, where all of a layer's are needed.
    pub fn share_gates(&mut self, sharing: &mut Sharing<'_>) -> Result<(), Error> {
        if self.naming == Naming::Gates {
            self.gate_products = exclusive(&mut self.resident).try_on(sharing)?;
        }
        Ok(())
    }

    /// Fails after the first failure.
    pub(super) fn usable(&self) -> Result<(), Error> {
        match &self.failed {
            None => Ok(()),
            Some(first) => Err(Error::Failed {
                first: first.clone(),
            }),
        }
    }

    /// Records the first failure.
    pub(super) fn latch<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(e) = &result {
            self.failed.get_or_insert_with(|| e.to_string());
        }
        result
    }

    /// Whether a compute thread found damage.
    pub fn is_damaged(&mut self) -> bool {
        let damage = self.damage.get_mut();
        damage.unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Takes the first damage found by a compute thread.
    pub(super) fn take_damage(&mut self) -> Option<Error> {
        let damage = self.damage.get_mut();
        damage.unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether a bank's Gate rows are resident; otherwise they are read with the bundle.
    #[inline]
    pub fn gates_resident(&self, bank: u32) -> bool {
        (bank as usize) < self.gate_banks
    }

    /// Whether cold slots hold Up and Down alone: any bank has resident Gate rows.
    pub(super) fn slots_lack_gates(&self) -> bool {
        self.gate_banks > 0
    }

    /// Number of leading banks with resident Gate rows.
    #[cfg(test)]
    pub(super) fn gate_banks(&self) -> usize {
        self.gate_banks
    }

    /// Whether some banks have resident Gate rows and others have none.
    pub(super) fn gates_partly_resident(&self) -> bool {
        (1..self.layout.banks()).contains(&self.gate_banks)
    }

    /// Whether a bank's neurons can be in the cold region.
    pub(super) fn has_cold(&self, bank: u32) -> bool {
        self.cold.slots() > 0
            && self.gates_resident(bank) == self.slots_lack_gates()
            && !self.is_always_needed(bank)
    }

    /// Whether every token needs every neuron of a bank, although those of others are told apart.
    fn is_always_needed(&self, bank: u32) -> bool {
        self.always.get(self.layout.layer_of(bank)) == Some(&true)
    }

    /// Slot contents for a bank's neurons.
    #[inline]
    pub(super) fn content(&self, bank: u32) -> &SlotContent {
        &self.contents[usize::from(self.gates_resident(bank))]
    }

    /// Whether every token needs every neuron of a bank, or its Gate part from flash.
    pub(super) fn scans(&self, bank: u32) -> bool {
        match self.naming {
            Naming::All => true,
            Naming::Gates => !self.gates_resident(bank) || self.is_always_needed(bank),
            Naming::Predictor => self.is_always_needed(bank),
        }
    }

    /// Whether any of a bank's clusters may become hot: in models with experts, where whole clusters
    /// of those banks are read which the router chooses.
    pub(super) fn roams(&self, bank: u32) -> bool {
        self.layout.has_experts() && self.scans(bank) && self.hot.units() > 0
    }

    /// Whether a cluster goes to the hot region when it is read.
    pub(super) fn belongs_hot(&self, bank: u32, cluster: u32) -> bool {
        self.hot.wants(bank, cluster) || self.roams(bank)
    }

    /// Whether a bank's neurons are read in two phases, Gate part first.
    pub(super) fn reads_gates_first(&self, bank: u32) -> bool {
        self.gates_first && !self.gates_resident(bank) && self.has_cold(bank)
    }

    /// A bank's rules for the current layer.
    pub(super) fn rules(&self, bank: u32) -> Rules {
        Rules {
            mapped: self.mapped.is_some(),
            scans: self.scans(bank),
            many: self.layer.many,
            cold: self.has_cold(bank),
            // For a device all of a neuron is needed.
            gates_first: self.reads_gates_first(bank) && !self.streams_through_device(),
            gates_resident: self.gates_resident(bank),
            bundles: self.ablation.bundles(),
            costs: self.costs,
        }
    }

    /// Resident Gate rows and scales. Drop the reference before the layer ends.
    pub fn resident(&self) -> Arc<Resident> {
        Arc::clone(&self.resident)
    }

    /// Exclusive access between two layers.
    pub(super) fn resident_mut(&mut self) -> &mut Resident {
        exclusive(&mut self.resident)
    }

    /// The bytes of the resident hot clusters.
    pub fn hot_bytes(&mut self) -> Vec<&[u8]> {
        self.hot.resident(&self.layout.clusters_of_each())
    }

    /// Most neurons that can be resident at once.
    pub fn capacity(&self) -> u64 {
        let total = self.layout.total();
        let hot = self.hot.units() * CLUSTER as u64;
        match self.mapped {
            Some(_) => total,
            None => total.min(hot + u64::from(self.cold.slots())),
        }
    }

    /// Neurons of the banks that stream while others have resident Gate rows.
    pub fn streamed(&self) -> u64 {
        let banks = self.layout.sizes().get(self.gate_banks..).unwrap_or(&[]);
        match self.gates_partly_resident() {
            true => banks.iter().map(|&neurons| u64::from(neurons)).sum(),
            false => 0,
        }
    }

    /// The container's banks.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether guesses at the experts of layer `next` are worth reading in this pass.
    pub fn foresees(&self, next: usize) -> bool {
        let mut banks = self.layout.banks_of(next);
        let several = banks.len() > 1;
        several
            && self.foresight.pays()
            && self.ablation.looks_ahead()
            && self.hot.units() < self.layout.total_clusters()
            && banks.next().is_some_and(|bank| self.scans(bank))
    }

    /// What reading experts ahead has done; `None` without experts.
    pub fn foreseen(&self) -> Option<Foreseen> {
        self.layout.has_experts().then_some(self.foresight.seen)
    }

    /// The tracer for events of this store.
    pub fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    /// Which overlap the ablation allows.
    pub fn overlap(&self) -> Overlap {
        self.ablation.overlap()
    }

    /// Name of the I/O engine.
    pub fn io_name(&self) -> &'static str {
        self.reader.engine()
    }

    /// Totals since the store was opened.
    pub fn counters(&self) -> Counters {
        let io = self.reader.stats();
        Counters {
            evictions: self.past_evictions + self.cold.stats().evictions + self.hot.evictions(),
            reads: io.reads,
            commands: io.commands,
            bytes_read: io.bytes + io.gap_bytes,
            wait_ns: u64::try_from(self.reader.waited().as_nanos()).unwrap_or(u64::MAX),
            busy_ns: io.busy_ns,
            ..self.counters
        }
    }
}

/// Exclusive access between two layers.
fn exclusive(resident: &mut Arc<Resident>) -> &mut Resident {
    match Arc::get_mut(resident) {
        Some(resident) => resident,
        None => unreachable!("lent while a layer's neurons are named only"),
    }
}

/// An empty cache with capacity for every neuron; the plan limits its use.
fn new_cold(
    layout: &Layout,
    content: &SlotContent,
    memory: ArenaOptions,
    ablation: Ablation,
) -> Result<SlotCache, Error> {
    let slots = u32::try_from(layout.total()).map_err(|_| layout.too_many())?;
    let arena = Arena::with_limit(0, slots, content.slot_len, layout.memory_align(), memory)
        .map_err(emberflow_storage::Error::from)?;
    SlotCache::with_eviction(arena, layout.sizes(), ablation.eviction())
        .ok_or_else(|| layout.too_many())
}

/// Bytes of queues, tables and `buffers` stream buffers of a store.
pub(crate) fn io_bytes(layout: &Layout, buffers: u32, ablation: Ablation) -> u64 {
    let per_neuron = size_of::<Read>() + 2 * size_of::<Completion>() + 40;
    let units = u32::try_from(layout.total_clusters()).unwrap_or(u32::MAX);
    let roaming = match layout.has_experts() {
        true => layout.total_clusters(),
        false => 0,
    };
    let mapped = match ablation {
        Ablation::Mmap => Mapping::least_bytes(layout),
        _ => 0,
    };
    mapped
        + (layout.neurons_at_once() * per_neuron) as u64
        + Guesses::bytes_for(layout)
        + SlotCache::overhead(Eviction::Lrfu, 0, layout.total())
        + SlotCache::overhead(Eviction::Lru, units, layout.total_clusters())
        + SlotCache::overhead(Eviction::Lrfu, 0, roaming)
        + IoThread::overhead(Limits::PRODUCTION)
        + Arena::charge(buffers, layout.stream_len())
}
