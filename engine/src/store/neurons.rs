//! [`NeuronStore`]: serves the FFN's neurons from memory or flash. Needed neurons are looked up in
//! [`Residency`], misses are requested from [`Reads`], [`Job`] tracks what each cluster waits for,
//! and [`Prefetch`] proposes further reads when no needed neuron is missing.

mod ahead;
mod arrivals;
mod fill;
mod items;
mod layer;
mod report;
mod rows;
mod tiles;

pub(crate) use rows::RowReads;

use std::sync::Arc;

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::cache::{Eviction, SlotCache};
use emberflow_storage::io::{Completion, FileSource, IoThread, Read};
use emberflow_storage::limits::Limits;
use emberflow_storage::trace::Tracer;

use super::costs::ReadCosts;
use super::job::Job;
use super::latch::Latch;
use super::layout::Layout;
use super::mapping::Mapping;
use super::prefetch::{Guesses, Prefetch};
use super::reads::{IoDriver, Reads};
use super::residency::{Cold, Known, Naming, Preferences, Residency, Resident};
use super::rules::{Rules, Settings};
use crate::ablation::{Overlap, Policy};
use crate::bundle::NeuronRows;
use crate::counters::Counters;
use crate::error::Error;
use crate::lane::Outside;
use crate::memory::MemoryPlan;
use crate::options::Options;

/// The regions use huge pages: reads of 64 KiB and more are up to 2 times as fast, random bundles
/// 1.1 to 1.3 times (benches/README.md). Huge pages end at the arena's limit, so the budget holds.
pub(crate) fn region_memory(lock: bool) -> ArenaOptions {
    ArenaOptions {
        huge_pages: true,
        lock,
        populate: false,
    }
}

/// Receives the rows of a cluster outside the regions: bank, and index of the cluster.
pub(crate) type Upload<'a> =
    dyn FnMut([u32; 2], &mut dyn Iterator<Item = NeuronRows<'_>>) -> Result<(), Error> + 'a;

/// Arguments of [`NeuronStore::open`].
pub(crate) struct StoreSetup<'a> {
    pub layout: Layout,
    pub source: FileSource,
    pub memory: &'a MemoryPlan,
    pub naming: Naming,
    /// Most stream buffers of any plan.
    pub buffers: u32,
    /// Hot clusters of each bank, by the statistics.
    pub hot_wanted: Vec<u32>,
    /// Activation statistics.
    pub known: &'a Known,
    pub costs: ReadCosts,
    /// Two-phase loading where Gate rows are not resident: Gate rows are read before Up and Down.
    pub gates_first: bool,
    /// By layer: every token needs all neurons, while other layers are sparse.
    pub always: Vec<bool>,
    /// Enabled mechanisms.
    pub policy: Policy,
    pub options: &'a Options,
    pub tracer: Tracer,
}

/// The neurons of a model under a memory budget.
pub(crate) struct NeuronStore {
    pub layout: Arc<Layout>,
    settings: Settings,
    overlap: Overlap,
    pub(super) residency: Residency,
    pub(super) reads: Reads,
    prefetch: Prefetch,
    pub(super) job: Job,
    /// Clusters outside of these regions.
    pub outside: Outside,
    /// The mapped file, from which bytes come instead of reads.
    mapped: Option<Mapping>,
    /// Number of compute threads; they are idle while memory is filled.
    threads: usize,
    counters: Counters,
    /// The counters before the passes that made the last drafts, which do not count as lookups.
    before_drafts: Option<Counters>,
    /// The first failure, including one of a device, ends all passes.
    latch: Arc<Latch>,
    pub tracer: Tracer,
}

impl NeuronStore {
    /// Starts the I/O thread and creates empty regions; [`NeuronStore::warm`] fills them.
    pub fn open(setup: StoreSetup<'_>) -> Result<Self, Error> {
        let StoreSetup {
            memory: plan,
            policy,
            options,
            tracer,
            source,
            buffers,
            ..
        } = setup;
        let (layout, latch) = (Arc::new(setup.layout), Arc::<Latch>::default());
        let memory = region_memory(options.lock);
        let mapped = (policy.mapped.then(|| Mapping::new(&layout, plan))).transpose()?;
        let prefers = Preferences {
            naming: setup.naming,
            always: setup.always,
            hot_wanted: setup.hot_wanted,
            known: setup.known,
            keep: policy.keep,
            memory,
        };
        let shared = || Arc::clone(&layout);
        let residency = Residency::new(shared(), plan, prefers)?;
        let reads = {
            let (inline, trace) = (policy.reads_inline, tracer.clone());
            let io = IoDriver::open(&layout, source, options, inline, trace)?;
            let (latch, tracer) = (Arc::clone(&latch), tracer.clone());
            Reads::new(shared(), io, buffers, memory, latch, tracer)?
        };
        let (neurons, clusters) = (layout.neurons_at_once(), layout.clusters_at_once());
        Ok(Self {
            settings: Settings {
                mapped: policy.mapped,
                bundles: policy.bundles,
                costs: setup.costs,
                gates_first: setup.gates_first,
            },
            overlap: policy.overlap,
            residency,
            reads,
            prefetch: Prefetch::new(shared(), policy.prefetches, options.lab.read_ahead),
            job: Job::new(layout.banks(), neurons, clusters),
            outside: Outside::new(vec![0; layout.banks()]),
            mapped,
            threads: options.threads,
            counters: Counters::default(),
            before_drafts: None,
            latch,
            tracer,
            layout,
        })
    }

    /// Fills the regions from the front of every bank: the hottest neurons, if the container is sorted by temperature. The
    /// first clusters, which are outside the regions, are passed to `upload`.
    pub fn warm(
        &mut self,
        plan: &MemoryPlan,
        outside: Outside,
        upload: &mut Upload<'_>,
    ) -> Result<(), Error> {
        self.residency.begin_behind(outside.prefix());
        self.outside = outside;
        self.residency.adopt(plan)?;
        self.reads.set_buffers(plan.stream_buffers);
        self.fill(0, upload)
    }

    /// Switches to another plan between two passes. Results do not depend on the plan. Returns the
    /// resident Gate rows if they are those of other banks now.
    pub fn set_plan(&mut self, plan: &MemoryPlan) -> Result<Option<&mut Resident>, Error> {
        self.latch.check()?;
        let before = self.residency.banks.with_gates;
        let changed = self.change(plan);
        self.latch.keep(changed)?;
        let moved = self.residency.banks.with_gates != before;
        Ok(moved.then(|| self.residency.gates_mut()))
    }

    /// The resident Gate rows, if gates determine the active set.
    pub fn naming_gates(&mut self) -> Option<&mut Resident> {
        let names = self.residency.banks.names_by_gates();
        names.then(|| self.residency.gates_mut())
    }

    /// Resident Gate rows and scales, for reading.
    pub fn gates(&self) -> &Resident {
        self.residency.gates()
    }

    /// Moves the border between the regions towards that of `plan`, which has the same budget, with
    /// `wanted` hot clusters per bank.
    pub fn aim_border(&mut self, plan: &MemoryPlan, wanted: &[u32]) {
        self.residency.aim_border(plan, wanted);
    }

    fn change(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        // Prefetched clusters are dropped.
        while self.reads.outstanding() > 0 {
            self.wait()?;
        }
        self.prefetch.forget();
        self.reads.drop_unclaimed(|_, _| false);
        if let Some(mapped) = &mut self.mapped {
            mapped.set_plan(&self.layout, plan)?;
        }
        // Frees memory before allocating.
        let buffers = plan.stream_buffers.min(self.reads.most_buffers());
        self.reads.set_buffers(buffers);
        let first = self.residency.set_plan(plan)?;
        self.reads.set_buffers(plan.stream_buffers);
        if let Some(first) = first {
            self.fill(first, &mut |_, _| Ok(()))?;
        }
        Ok(())
    }

    /// Begins a pass that makes drafts: nothing is read, and neurons that are not in memory are left out.
    pub fn begin_drafts(&mut self) {
        self.job.held_only = true;
        self.before_drafts.get_or_insert(self.counters);
    }

    /// Ends passes that made drafts, which do not count as lookups.
    pub fn end_drafts(&mut self) {
        self.job.held_only = false;
        if let Some(before) = self.before_drafts.take() {
            self.counters = self.counters.with_lookups_of(before);
        }
    }

    /// Begins a pass over all layers. `single`: it has one token.
    pub fn begin_pass(&mut self, single: bool) {
        self.residency.begin_pass();
        self.prefetch.begin_pass(single);
    }

    /// Moves the border between the regions one step towards its target, between two passes.
    pub fn step_border(&mut self) -> Result<(), Error> {
        if !self.residency.border_moves() {
            return Ok(());
        }
        self.latch.check()?;
        let mut buffer: Option<Slot> = self.reads.take_buffer();
        self.residency.step_border(buffer.as_mut());
        if let Some(buffer) = buffer {
            self.reads.put(buffer);
        }
        Ok(())
    }
}

/// The rules of a bank in the current layer.
fn rules<'a>(
    settings: Settings,
    residency: &'a Residency,
    job: &Job,
    outside: &Outside,
) -> impl Fn(u32) -> Rules + use<'a> {
    let (many, whole) = (job.many, outside.all_needed);
    move |bank| settings.rules(residency.bank(bank), many, whole)
}

/// Bytes of the queues, tables and `buffers` stream buffers of a store, whose file may be `mapped`.
pub(crate) fn io_bytes(layout: &Layout, buffers: u32, mapped: bool) -> u64 {
    let per_neuron = size_of::<Read>() + 2 * size_of::<Completion>() + 40;
    let units = u32::try_from(layout.total_clusters()).unwrap_or(u32::MAX);
    let roaming = if layout.has_experts() {
        layout.total_clusters()
    } else {
        0
    };
    let mapped = match mapped {
        true => Mapping::least_bytes(layout),
        false => 0,
    };
    mapped
        + (layout.neurons_at_once() * per_neuron) as u64
        + Guesses::bytes_for(layout)
        + Cold::bytes_for(layout)
        + SlotCache::overhead(Eviction::Lrfu, 0, layout.total())
        + SlotCache::overhead(Eviction::Lru, units, layout.total_clusters())
        + SlotCache::overhead(Eviction::Lrfu, 0, roaming)
        + IoThread::overhead(Limits::PRODUCTION)
        + Arena::charge(buffers, layout.stream_len())
}
