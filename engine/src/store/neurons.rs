//! [`NeuronStore`]: everything between the FFN's needs and the file.

use std::sync::{Arc, Mutex, PoisonError};

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::cache::{Eviction, Key, SlotCache};
use emberflow_storage::container::MappedBundles;
use emberflow_storage::io::{Completion, FileSource, IoThread, Read};
use emberflow_storage::limits::Limits;
use emberflow_storage::trace::Tracer;

use super::asked::Guesses;
use super::content::SlotContent;
use super::costs::ReadCosts;
use super::hot::HotClusters;
use super::layout::{COLD, Layout};
use super::plan::Rules;
use super::reader::Reader;
use super::resident::Resident;
use super::spread::Spread;
use super::window::Window;
use super::work::LayerWork;
use crate::ablation::{Ablation, Overlap};
use crate::counters::Counters;
use crate::error::Error;
use crate::memory::MemoryPlan;
use crate::options::Options;

/// Regions lie on huge pages: reads of 64 KiB and more run up to twice as fast, and random bundles
/// 1.1 to 1.3 times (benches/README.md). They end at the arena's limit, so no budget is exceeded.
fn region_memory(lock: bool) -> ArenaOptions {
    ArenaOptions {
        huge_pages: true,
        lock,
        populate: false,
    }
}

/// How the needed neurons of a layer become known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// Every token needs every neuron.
    All,
    /// Those whose gate fires.
    Gates,
    /// Those that a predictor names.
    Predictor,
}

/// What a store is made of.
pub(crate) struct StoreSetup<'a> {
    pub layout: Layout,
    pub source: FileSource,
    pub memory: &'a MemoryPlan,
    pub naming: Naming,
    /// Stream buffers.
    pub buffers: u32,
    /// Clusters of each bank that the statistics call hot.
    pub hot_wanted: Vec<u32>,
    /// By bank, share of tokens for which each neuron fires; empty without statistics.
    pub frequencies: &'a [Vec<f32>],
    pub costs: ReadCosts,
    /// Where Gate rows are not resident, they are read before Up and Down.
    pub gates_first: bool,
    pub options: &'a Options,
    pub tracer: Tracer,
}

/// Where the border is to be.
#[derive(Debug)]
pub(super) struct Goal {
    /// Clusters of the hot region.
    pub(super) hot: u64,
    /// Slots of the cold region.
    pub(super) cold: u64,
    /// Bytes of both together.
    pub(super) bytes: u64,
}

/// Rows on their way.
#[derive(Default)]
pub(super) struct RowsUnderway {
    /// Rows that have come: number among those asked for together, row, bytes.
    pub arrived: Vec<(u32, u32, Slot)>,
    /// How many are to come or have.
    pub coming: usize,
}

/// Neurons under a budget.
pub(crate) struct NeuronStore {
    pub(super) layout: Layout,
    pub(super) naming: Naming,
    /// What a slot holds where the bank's Gate rows are not resident, and where they are.
    contents: [SlotContent; 2],
    /// Lent to those who name neurons, and to nobody between two layers.
    pub(super) resident: Arc<Resident>,
    pub(super) hot: HotClusters,
    pub(super) cold: SlotCache,
    /// Clusters of each bank that the statistics call hot.
    pub(super) hot_wanted: Vec<u32>,
    /// Where the border between the two regions is on its way to.
    pub(super) goal: Option<Goal>,
    /// Banks, from the first on, whose Gate rows are resident.
    gate_banks: usize,
    pub(super) costs: ReadCosts,
    gates_first: bool,
    memory: ArenaOptions,
    pub(super) reader: Reader,
    pub(super) layer: LayerWork,
    pub(super) rows: RowsUnderway,
    pub(super) guesses: Guesses,
    pub(super) spreads: Vec<Spread>,
    pub(super) ablation: Ablation,
    /// The neurons of the last tokens, where only those are kept.
    pub(super) window: Window,
    /// The file, where the page cache does it all.
    pub(super) mapped: Option<MappedBundles>,
    pub(super) counters: Counters,
    /// Evictions of regions that were replaced.
    past_evictions: u64,
    /// The first failure. What is in memory may be incomplete after it, so the store refuses to work
    /// on.
    failed: Option<String>,
    /// The first damage that a computing thread found.
    pub(super) damage: Mutex<Option<Error>>,
    tracer: Tracer,
}

impl NeuronStore {
    /// Starts the I/O thread, allocates the regions and fills them from the front of every bank (the
    /// hottest neurons, where the container is in temperature order).
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
        let content = &contents[usize::from(plan.gates_resident())];
        let ablation = options.ablation;
        let mut store = Self {
            ablation,
            window: Window::new(layout.banks(), ablation),
            mapped: match ablation {
                Ablation::Mmap => Some(layout.map()?),
                _ => None,
            },
            resident: Arc::new(Resident::read(&layout)?),
            hot: HotClusters::new(&layout, content, memory)?,
            cold: new_cold(&layout, content, memory)?,
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
            spreads: vec![Spread::default(); layout.banks()],
            naming: setup.naming,
            contents,
            hot_wanted: setup.hot_wanted,
            goal: None,
            gate_banks: 0,
            costs: setup.costs,
            gates_first: setup.gates_first,
            memory,
            counters: Counters::default(),
            past_evictions: 0,
            failed: None,
            damage: Mutex::new(None),
            tracer,
            layout,
        };
        for (bank, frequencies) in (0..).zip(setup.frequencies) {
            for (neuron, &often) in (0..).zip(frequencies) {
                store.cold.set_prior(Key { bank, neuron }, often.into());
            }
        }
        store.adopt(plan)?;
        Ok(store)
    }

    /// Changes to another plan between two passes. Results do not depend on it.
    pub fn set_plan(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        self.usable()?;
        let drained = self.drain_stream();
        self.latch(drained)?;
        self.goal = None;
        let gate_banks = self.gate_banks_of(plan);
        if gate_banks == self.gate_banks {
            self.set_border(plan);
            return Ok(());
        }
        // The old contents go before the new ones come, so that both never add up.
        self.cold.resize(0);
        self.hot.set_border(0, &vec![0; self.layout.banks()]);
        self.past_evictions += self.cold.stats().evictions + self.hot.evictions();
        let freed = alone(&mut self.resident).hold_gates(&self.layout, 0);
        self.latch(freed)?;
        let content = &self.contents[usize::from(plan.gates_resident())];
        self.hot = HotClusters::new(&self.layout, content, self.memory)?;
        self.cold = new_cold(&self.layout, content, self.memory)?;
        let adopted = self.adopt(plan);
        self.latch(adopted)
    }

    /// Takes over a plan with empty regions, and fills them.
    fn adopt(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        self.gate_banks = self.gate_banks_of(plan);
        self.set_border(plan);
        alone(&mut self.resident).hold_gates(&self.layout, self.gate_banks)?;
        self.fill()
    }

    /// Banks whose Gate rows a plan keeps in memory.
    fn gate_banks_of(&self, plan: &MemoryPlan) -> usize {
        if plan.gates_resident() {
            self.layout.banks()
        } else {
            0
        }
    }

    /// An error after the first failure.
    pub(super) fn usable(&self) -> Result<(), Error> {
        match &self.failed {
            None => Ok(()),
            Some(first) => Err(Error::Failed {
                first: first.clone(),
            }),
        }
    }

    /// Remembers the first failure.
    pub(super) fn latch<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(e) = &result {
            self.failed.get_or_insert_with(|| e.to_string());
        }
        result
    }

    /// Takes the first damage that a computing thread found.
    pub(super) fn take_damage(&mut self) -> Option<Error> {
        let damage = self.damage.get_mut();
        damage.unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether the Gate rows of a bank are resident (else they come with the bundle).
    #[inline]
    pub fn gates_resident(&self, bank: u32) -> bool {
        (bank as usize) < self.gate_banks
    }

    /// Whether those of all banks are.
    pub(super) fn gates_resident_everywhere(&self) -> bool {
        self.gate_banks >= self.layout.banks()
    }

    /// What a slot of a bank's neurons holds.
    #[inline]
    pub(super) fn content(&self, bank: u32) -> &SlotContent {
        &self.contents[usize::from(self.gates_resident(bank))]
    }

    /// Whether every token looks at every neuron of a bank.
    pub(super) fn scans(&self, bank: u32) -> bool {
        match self.naming {
            Naming::All => true,
            Naming::Gates => !self.gates_resident(bank),
            Naming::Predictor => false,
        }
    }

    /// Whether the Gate parts of a bank's single neurons are read before their Up and Down.
    pub(super) fn reads_gates_first(&self, bank: u32) -> bool {
        self.gates_first && !self.gates_resident(bank)
    }

    /// What is settled for a bank, for the layer at work.
    pub(super) fn rules(&self, bank: u32) -> Rules {
        Rules {
            mapped: self.mapped.is_some(),
            scans: self.scans(bank),
            many: self.layer.many,
            cold: self.cold.slots() > 0,
            gates_first: self.reads_gates_first(bank),
            gates_resident: self.gates_resident(bank),
            bundles: self.ablation.bundles(),
            costs: self.costs,
        }
    }

    /// The Gate rows and scales that stay, to be given back before the layer ends.
    pub fn resident(&self) -> Arc<Resident> {
        Arc::clone(&self.resident)
    }

    /// The same, for changes between two layers.
    pub(super) fn resident_mut(&mut self) -> &mut Resident {
        alone(&mut self.resident)
    }

    /// The clusters of the hot region.
    pub fn hot_bytes(&mut self) -> Vec<&[u8]> {
        self.hot.resident(&self.layout.clusters_of_each())
    }

    /// The container's banks.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Where to record what is done.
    pub fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    /// What may overlap.
    pub fn overlap(&self) -> Overlap {
        self.ablation.overlap()
    }

    /// Name of the I/O engine.
    pub fn io_name(&self) -> &'static str {
        self.reader.engine()
    }

    /// What was done since the store was opened.
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

/// For changes, between two layers.
fn alone(resident: &mut Arc<Resident>) -> &mut Resident {
    match Arc::get_mut(resident) {
        Some(resident) => resident,
        None => unreachable!("lent while a layer's neurons are named only"),
    }
}

/// An empty cache that can grow to hold every neuron; how much of it may be used is the plan's
/// matter.
fn new_cold(
    layout: &Layout,
    content: &SlotContent,
    memory: ArenaOptions,
) -> Result<SlotCache, Error> {
    let slots = u32::try_from(layout.total()).map_err(|_| layout.too_many())?;
    let arena = Arena::with_limit(0, slots, content.slot_len, layout.memory_align(), memory)
        .map_err(emberflow_storage::Error::from)?;
    SlotCache::with_eviction(arena, layout.sizes(), COLD).ok_or_else(|| layout.too_many())
}

/// Bytes of queues, tables and `buffers` stream buffers of a store.
pub(crate) fn io_bytes(layout: &Layout, buffers: u32) -> u64 {
    let per_neuron = size_of::<Read>() + 2 * size_of::<Completion>() + 40;
    let units = u32::try_from(layout.total_clusters()).unwrap_or(u32::MAX);
    (layout.most_in_layer() * per_neuron) as u64
        + Guesses::bytes_for(layout)
        + SlotCache::overhead(COLD, 0, layout.total())
        + SlotCache::overhead(Eviction::Lru, units, layout.total_clusters())
        + IoThread::overhead(Limits::PRODUCTION)
        + Arena::charge(buffers, layout.stream_len())
}
