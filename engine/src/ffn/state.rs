//! State for computing the FFN of every layer: store, predictors, buffers.

use emberflow_models::config::{Activation, ModelConfig};

use super::gates_ahead::GatesAhead;
use super::lookahead::{FEW, Lookahead};
use super::oracle::Oracle;
use super::pairs::{Gathered, Pairs, Unit};
use super::predict::Predictors;
use super::recent::Recent;
use super::schedule::Schedule;
use super::seen::{FfnSeen, Record};
use super::shape::FfnShape;
use super::top::Tops;
use crate::cluster::CLUSTER;
use crate::counters::Counters;
use crate::error::Error;
use crate::lane::{Lane, Room};
use crate::memory::MemoryPlan;
use crate::store::{Layout, NeuronStore};
use crate::thread_buffer::renew;

/// Bytes of partial sums before a reduction: those of one token of a 7B model.
const PARTIAL_BYTES: usize = 4 << 20;

/// Clusters per reduction, for `rows` rows and `clusters` clusters: at least two per thread.
pub(super) fn clusters_per_group(rows: usize, d: usize, clusters: usize, threads: usize) -> usize {
    let least = (2 * threads).min(clusters);
    (PARTIAL_BYTES / (4 * rows * d)).clamp(least, clusters)
}

/// Dimensions of an [`Ffn`]'s buffers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FfnRoom {
    /// Most rows of a pass.
    pub rows: usize,
    /// Most neurons and clusters computed at once: those that a row visits in a layer.
    pub neurons: usize,
    pub clusters: usize,
    /// Number of banks that a row visits, each with some of the rows; 0 without experts.
    pub chosen: usize,
    pub threads: usize,
    /// Keep gates and hidden values for [`Ffn::recorded`].
    pub observe: bool,
    /// Count how often each neuron fires.
    pub counts: bool,
}

impl FfnRoom {
    /// (neuron, row) pairs, in whole clusters.
    pub(super) fn pairs(&self) -> usize {
        self.clusters * CLUSTER * self.rows
    }

    /// The largest pieces of a lane's work: as many clusters as partial sums hold.
    pub fn of_lane(&self, d: usize) -> Room {
        Room {
            rows: self.rows,
            clusters: self.clusters,
            pairs: self.partials(d) / d,
        }
    }

    /// Rows gathered for all units.
    fn gathered(&self) -> usize {
        self.chosen * self.rows
    }

    /// Elements of partial sums.
    pub(super) fn partials(&self, d: usize) -> usize {
        let group = |rows| clusters_per_group(rows, d, self.clusters, self.threads) * rows * d;
        (1..=self.rows).map(group).max().unwrap_or(0)
    }
}

/// Zero firing counts for every neuron, by bank.
fn nothing_fired(layout: &Layout) -> Vec<Vec<u64>> {
    let neurons = layout.sizes().iter();
    neurons.map(|&n| vec![0; n as usize]).collect()
}

/// Counters.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    /// (neuron, token) pairs: gate fired, gate computed, all.
    pub fired: u64,
    pub looked_at: u64,
    pub possible: u64,
    /// Bytes of weights used, predictors' included.
    pub bytes: u64,
    /// Nanoseconds spent in predictors.
    pub predict_ns: u64,
}

impl Counts {
    /// Counts a unit with all gates computed, from `bytes` of Gate rows.
    pub fn all(&mut self, of: &Unit, bytes: usize) {
        self.looked_at += (of.neurons * of.rows) as u64;
        self.bytes += bytes as u64;
    }
}

/// The FFN of every layer, over a [`NeuronStore`].
pub(crate) struct Ffn {
    pub(super) shape: FfnShape,
    pub store: NeuronStore,
    /// Who computes beside the compute threads, if anyone does.
    pub lane: Option<Box<dyn Lane>>,
    pub(super) predictors: Option<Predictors>,
    pub(super) lookahead: Option<Lookahead>,
    /// Used without predictors.
    pub(super) by_gates: Option<GatesAhead>,
    /// Recorded active sets, for measurements.
    pub oracle: Oracle,
    pub(super) units: Vec<Unit>,
    pub(super) pairs: Pairs,
    pub(super) gathered: Gathered,
    pub(super) partials: Vec<f32>,
    pub(super) schedule: Schedule,
    pub(super) recent: Recent,
    pub(super) counts: Counts,
    /// The same before the passes that made the last drafts.
    before_drafts: Option<Counts>,
    /// The activation of each layer, if they differ.
    pub(super) activations: Vec<Activation>,
    /// Cutoffs of gates, for banks with all gates computed.
    pub(super) tops: Tops,
    /// Cutoffs estimated by the predictor of the current bank; empty without any.
    pub(super) cutoffs: Vec<f32>,
    /// For observers.
    pub(super) record: Option<Record>,
    /// By bank: number of rows for which each neuron has fired; empty unless counted.
    pub(super) fired: Vec<Vec<u64>>,
}

impl Ffn {
    pub fn new(
        shape: FfnShape,
        store: NeuronStore,
        lane: Option<Box<dyn Lane>>,
        predictors: Option<Predictors>,
        room: FfnRoom,
    ) -> Self {
        let (pairs, d) = (room.pairs(), shape.format.d);
        // The next layer's experts are not known.
        let lookahead = (predictors.as_ref())
            .filter(|_| !store.layout.has_experts())
            .map(|p| Lookahead::new(d, room.neurons, room.rows.min(FEW), p.banks()));
        let one_bank = predictors.is_none() && !store.layout.has_experts();
        let by_gates = (one_bank && shape.kind.activation.is_sparse())
            .then(|| GatesAhead::new(d, room.neurons));
        let margins = if lookahead.is_some() {
            room.clusters * CLUSTER
        } else {
            0
        };
        let gathered = Gathered::new(room.gathered(), d, predictors.is_some());
        Self {
            lookahead,
            by_gates,
            predictors,
            gathered,
            oracle: Oracle::default(),
            units: Vec::with_capacity(16),
            pairs: Pairs {
                gates: vec![0.0; pairs],
                wanted: vec![0; pairs / 64],
                margins: vec![0.0; margins],
                wanted_beside: None,
            },
            partials: vec![0.0; room.partials(d)],
            schedule: Schedule::new(room.clusters),
            recent: Recent::new(room.rows),
            counts: Counts::default(),
            before_drafts: None,
            activations: Vec::new(),
            tops: Tops::default(),
            cutoffs: Vec::with_capacity(room.rows),
            record: (room.observe || room.counts).then(|| Record::new(pairs)),
            fired: if room.counts {
                nothing_fired(&store.layout)
            } else {
                Vec::new()
            },
            shape,
            store,
            lane,
        }
    }

    /// Sets the activations and cutoffs of a model's layers, for passes of up to `rows` rows.
    pub fn with_layers(mut self, c: &ModelConfig, rows: usize) -> Self {
        self.activations = c.form.activations.clone();
        self.tops = Tops::new(c, rows);
        self
    }

    /// Counts neurons that are computed elsewhere, all of them for each of their rows.
    pub fn count_all(&mut self, pairs: u64) {
        self.counts.possible += pairs;
        self.counts.looked_at += pairs;
        self.counts.fired += pairs;
    }

    /// Resizes the buffers for passes of up to `room.rows` rows; the rest of `room` must not
    /// change.
    pub fn set_room(&mut self, c: &ModelConfig, room: &FfnRoom) {
        let (pairs, d, rows) = (room.pairs(), self.shape.format.d, room.rows);
        renew(&mut self.pairs.gates, pairs);
        self.pairs.wanted = Vec::new();
        self.pairs.wanted = vec![0; pairs / 64];
        self.gathered = Gathered::default();
        self.gathered = Gathered::new(room.gathered(), d, self.predictors.is_some());
        renew(&mut self.partials, room.partials(d));
        self.recent = Recent::new(rows);
        self.cutoffs = Vec::with_capacity(rows);
        self.tops = Tops::new(c, rows);
        if let Some(predictors) = &mut self.predictors {
            predictors.set_rows(rows);
        }
    }

    /// Bytes that [`Ffn::new`] allocates, without the predictors.
    pub fn bytes_for(shape: &FfnShape, room: &FfnRoom) -> u64 {
        let (pairs, partials) = (room.pairs(), room.partials(shape.format.d));
        let record = if room.observe || room.counts {
            Record::bytes_for(pairs)
        } else {
            0
        };
        let floats = pairs + partials + 2 * room.neurons;
        let gathered = Gathered::bytes_for(room.gathered(), shape.format.d, true);
        let ahead = GatesAhead::bytes_for(shape.format.d, room.neurons);
        (4 * floats + pairs / 8 + gathered) as u64 + Recent::bytes_for(room.rows) + record + ahead
    }

    /// Switches to another plan between two passes.
    pub fn set_plan(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        let gates = self.store.set_plan(plan)?;
        if let (Some(gates), Some(lane)) = (gates, &self.lane) {
            (gates.matrices_mut()).for_each(|matrix| lane.multiply_again(matrix));
        }
        Ok(())
    }

    /// By bank, in packed order: number of rows for which each neuron has fired since the last
    /// call.
    pub fn take_fired(&mut self) -> Vec<Vec<u64>> {
        if self.fired.is_empty() {
            Vec::new()
        } else {
            std::mem::replace(&mut self.fired, nothing_fired(&self.store.layout))
        }
    }

    /// Counts which neurons fired in the units just computed.
    pub(super) fn count_fired(&mut self) {
        let Some(record) = self.record.as_ref().filter(|_| !self.fired.is_empty()) else {
            return;
        };
        for unit in &self.units {
            let gates = record.gates(unit.pairs, unit.neurons * unit.rows);
            let rows = gates.chunks_exact(unit.rows.max(1));
            for (fired, gates) in self.fired[unit.bank as usize].iter_mut().zip(rows) {
                *fired += gates.iter().filter(|&&gate| gate != 0.0).count() as u64;
            }
        }
    }

    /// Begins a pass over consecutive sequences of `rows` rows each; resumes it unless `fresh`.
    pub fn begin_pass(&mut self, rows: impl Iterator<Item = usize>, fresh: bool) {
        let all = self.recent.begin_pass(rows);
        if fresh {
            self.store.begin_pass(all == 1);
        }
    }

    /// Ends passes that made drafts: nothing of them counts.
    pub fn end_drafts(&mut self) {
        self.counts = self.before_drafts.take().unwrap_or(self.counts);
        self.store.end_drafts();
    }

    /// Begins a pass that makes drafts: neurons that are not in memory are left out.
    pub fn begin_drafts(&mut self, rows: impl Iterator<Item = usize>) {
        self.before_drafts.get_or_insert(self.counts);
        self.recent.begin_pass(rows);
        self.store.begin_drafts();
    }

    /// The observer's view of the layer just computed: `seen` with gates and hidden values.
    pub fn seen<'a>(&'a self, seen: FfnSeen<'a>) -> FfnSeen<'a> {
        let (gates, hidden) = self.recorded(seen.tokens);
        FfnSeen {
            gates,
            hidden,
            ..seen
        }
    }

    /// Gates and hidden values of the last layer, which had one unit, `[neurons × tokens]` each;
    /// empty unless recorded for observers.
    fn recorded(&self, tokens: usize) -> (&[f32], &[f32]) {
        let neurons = self.units.first().map_or(0, |unit| unit.neurons);
        match &self.record {
            Some(record) if self.fired.is_empty() => record.values(neurons * tokens),
            _ => (&[], &[]),
        }
    }

    /// Totals since creation.
    pub fn counters(&self) -> Counters {
        let counts = &self.counts;
        let lane = self.lane.as_ref();
        let [fired, bytes] = lane.map_or([0; 2], |lane| lane.counted());
        Counters {
            fired: counts.fired + fired,
            looked_at: counts.looked_at,
            possible: counts.possible,
            ffn_bytes: counts.bytes + bytes,
            predict_ns: counts.predict_ns,
            ..self.store.counters()
        }
    }
}
