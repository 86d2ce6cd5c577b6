//! Where the neurons' bytes are: resident Gate rows, the hot region, the cold
//! region, and reads for the rest.
//!
//! The FFN works on one bank at a time and asks for whole clusters of needed
//! neurons; `layer.rs` finds or reads them, `fill.rs` loads memory when a plan
//! takes effect. Every byte that comes from flash is checked against its
//! checksum before use.

mod ahead;
mod border;
mod bytes;
mod costs;
mod fetch;
mod fill;
mod foresee;
mod layer;
mod lean;
mod recover;
mod window;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::cache::{ColdCache, Key};
use emberflow_storage::container::MappedBundles;
use emberflow_storage::io::{Completion, FileSource, IoOptions, IoThread, Read};
use emberflow_storage::trace::{self, Kind, Tracer};

use super::banks::{Banks, COLD, Part};
use super::hot::HotRegion;
use super::resident::Resident;
use crate::Error;
use crate::counters::Counters;
use crate::memory::{MemoryPlan, Residency};
use crate::options::Options;
use crate::policy::{Overlap, Policy};

pub(crate) use costs::ReadCosts;
pub(crate) use foresee::Foreseen;
use layer::Layer;
pub(crate) use layer::Step;
pub(crate) use lean::STEPS as NEAR_STEPS;
use lean::Spread;
use window::Window;

/// Reads handed over at once: the first are under way while the next are still
/// looked up.
const BATCH: usize = 256;

/// Regions lie on huge pages: reads of 64 KiB and more run up to twice as fast, and
/// random bundles 1.1 to 1.3 times (benches/README.md). They end at the arena's
/// limit, so no budget is exceeded.
fn region_memory(lock: bool) -> ArenaOptions {
    ArenaOptions {
        huge_pages: true,
        lock,
        populate: false,
    }
}

/// The bytes of one neuron.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NeuronBytes<'a> {
    /// Gate part; empty when Gate rows are resident.
    pub gate: &'a [u8],
    /// Up row.
    pub up: &'a [u8],
    /// Down column.
    pub down: &'a [u8],
    /// Resident scales; empty when inline.
    pub scales: &'a [u8],
}

/// Neurons under a budget.
pub(crate) struct NeuronStore {
    banks: Banks,
    part: Part,
    residency: Residency,
    costs: ReadCosts,
    /// Where Gate rows are not resident, they are read before Up and Down.
    gates_first: bool,
    /// Every token looks at every neuron: all are needed, or their gates are in
    /// the bundles.
    scans: bool,
    /// Clusters of each bank that the statistics call hot.
    hot_wanted: Vec<u32>,
    /// Lent to those who name neurons, and to nobody between two layers.
    resident: Arc<Resident>,
    memory: ArenaOptions,
    hot: HotRegion,
    cold: ColdCache,
    /// Where the border between the two regions is on its way to.
    goal: Option<border::Goal>,
    /// Buffers for whole clusters on their way.
    stream: Arena,
    io: IoThread,
    reads: Vec<Read>,
    completions: Vec<Completion>,
    layer: Layer,
    /// Rows of dense tensors that have come, with their tags, and how many are to come or have.
    pieces: Vec<(u64, Slot)>,
    pieces_coming: usize,
    foreseen: Foreseen,
    spreads: Vec<Spread>,
    counters: Counters,
    /// Evictions of regions that were replaced.
    past_evictions: u64,
    policy: Policy,
    /// The neurons of the last tokens, where only those are kept.
    window: Window,
    /// The file, where the page cache does it all.
    mapped: Option<MappedBundles>,
    /// Time the computation waited for reads.
    waited: Duration,
    /// The first failure. What is in memory may be incomplete after it, so the
    /// store refuses to work on.
    failed: Option<String>,
    /// The first damage that a computing thread found.
    damage: Mutex<Option<Error>>,
    tracer: Tracer,
}

impl NeuronStore {
    /// Starts the I/O thread, allocates the regions and fills them from the front
    /// of every bank (the hottest neurons, where the container is in temperature
    /// order).
    pub fn open(
        banks: Banks,
        source: FileSource,
        plan: &MemoryPlan,
        (hot_wanted, rates): (Vec<u32>, Vec<Vec<f32>>),
        (costs, gates_first): (ReadCosts, bool),
        options: &Options,
        tracer: Tracer,
    ) -> Result<Self, Error> {
        let memory = region_memory(options.lock);
        let io = IoOptions {
            core: options.io_core,
            trace: tracer.clone(),
            ..IoOptions::default()
        };
        let io = IoThread::spawn(source, options.io, io).map_err(emberflow_storage::Error::from)?;
        let resident = Arc::new(Resident::read(&banks)?);
        let part = banks.part(plan.residency);
        let stream = Arena::new(
            banks.stream,
            banks.stream_len(),
            banks.memory_align(),
            memory,
        )
        .map_err(emberflow_storage::Error::from)?;
        let policy = options.policy;
        let mapped = match policy {
            Policy::Mmap => Some(banks.map()?),
            _ => None,
        };
        let mut store = Self {
            policy,
            window: Window::new(banks.count, policy),
            mapped,
            hot: HotRegion::new(&banks, &part, memory)?,
            cold: new_cold(&banks, &part, memory)?,
            goal: None,
            memory,
            stream,
            part,
            residency: plan.residency,
            costs,
            gates_first,
            scans: false,
            hot_wanted,
            resident,
            io,
            reads: Vec::with_capacity(BATCH),
            completions: Vec::with_capacity(2 * banks.neurons),
            layer: Layer::new(banks.neurons, banks.clusters()),
            pieces: Vec::with_capacity(BATCH),
            pieces_coming: 0,
            foreseen: Foreseen::new(banks.count, banks.neurons),
            spreads: vec![Spread::default(); banks.count],
            counters: Counters::default(),
            past_evictions: 0,
            waited: Duration::ZERO,
            failed: None,
            damage: Mutex::new(None),
            tracer,
            banks,
        };
        for (bank, rates) in (0..).zip(&rates) {
            for (neuron, &rate) in (0..).zip(rates) {
                store.cold.expect(Key { bank, neuron }, rate.into());
            }
        }
        store.adopt(plan)?;
        Ok(store)
    }

    /// Changes to another plan between two layers. Results do not depend on it.
    pub fn set_plan(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        self.usable()?;
        let drained = self.drain_stream();
        self.latch(drained)?;
        self.goal = None;
        if plan.residency == self.residency {
            self.set_border(plan);
            return Ok(());
        }
        // The old contents go before the new ones come, so that both never add up.
        self.cold.resize(0);
        self.hot.set_border(0, &vec![0; self.banks.count]);
        self.past_evictions += self.cold.stats().evictions + self.hot.evictions();
        let Self {
            resident, banks, ..
        } = self;
        let freed = alone(resident).hold_gates(banks, false);
        self.latch(freed)?;
        self.part = self.banks.part(plan.residency);
        self.residency = plan.residency;
        self.hot = HotRegion::new(&self.banks, &self.part, self.memory)?;
        self.cold = new_cold(&self.banks, &self.part, self.memory)?;
        let adopted = self.adopt(plan);
        self.latch(adopted)
    }

    /// Takes over a plan with empty regions, and fills them.
    fn adopt(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        self.set_border(plan);
        let hold = self.gates_resident();
        alone(&mut self.resident).hold_gates(&self.banks, hold)?;
        self.fill()
    }

    fn usable(&self) -> Result<(), Error> {
        match &self.failed {
            None => Ok(()),
            Some(first) => Err(Error::Failed {
                first: first.clone(),
            }),
        }
    }

    /// Remembers the first failure.
    fn latch<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(e) = &result {
            self.failed.get_or_insert_with(|| e.to_string());
        }
        result
    }

    /// Whether Gate rows are resident (else they come with the bundle).
    pub fn gates_resident(&self) -> bool {
        self.residency == Residency::GatesResident
    }

    /// The Gate rows and scales that stay, to be given back before the layer ends.
    pub fn resident(&self) -> Arc<Resident> {
        Arc::clone(&self.resident)
    }

    /// The clusters of the hot region.
    pub fn hot_bytes(&mut self) -> Vec<&[u8]> {
        let (banks, clusters) = (self.banks.count as u32, self.banks.clusters() as u32);
        self.hot.resident(banks, clusters)
    }

    /// The container's banks.
    pub fn banks(&self) -> &Banks {
        &self.banks
    }

    /// Where to record what is done.
    pub fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    /// Records from now on what the calling thread does for cluster `c` of the layer.
    pub fn trace_cluster(&self, kind: &'static Kind, c: usize) -> Option<trace::Open<'_>> {
        (self.tracer).open(kind, [u64::from(self.layer.bank), c as u64])
    }

    /// What the policy lets overlap.
    pub fn overlap(&self) -> Overlap {
        self.policy.overlap()
    }

    /// Name of the I/O engine.
    pub fn io_name(&self) -> &'static str {
        self.io.engine()
    }

    /// What was done since the store was opened.
    pub fn counters(&self) -> Counters {
        let io = self.io.stats();
        Counters {
            evictions: self.past_evictions + self.cold.stats().evictions + self.hot.evictions(),
            reads: io.reads,
            commands: io.commands,
            bytes_read: io.bytes + io.gap_bytes,
            wait_ns: u64::try_from(self.waited.as_nanos()).unwrap_or(u64::MAX),
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

/// An empty cache that can grow to hold every neuron; how much of it may be used
/// is the plan's matter.
fn new_cold(banks: &Banks, part: &Part, memory: ArenaOptions) -> Result<ColdCache, Error> {
    let slots = u32::try_from(banks.total()).map_err(|_| banks.too_many())?;
    let len = banks.slot_len_of(part);
    let arena = Arena::with_limit(0, slots, len, banks.memory_align(), memory)
        .map_err(emberflow_storage::Error::from)?;
    let sizes = vec![banks.neurons as u32; banks.count];
    ColdCache::with_policy(arena, &sizes, COLD).ok_or_else(|| banks.too_many())
}
