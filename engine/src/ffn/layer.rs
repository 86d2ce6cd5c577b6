//! One layer's FFN, from its units of work to their sum.

use emberflow_kernels::{Activations, Compute, Cpu};

use super::activation::Gating;
use super::lookahead::{FEW, Lookahead, Upcoming};
use super::mask;
use super::oracle::Oracle;
use super::predict::Predictors;
use super::recent::Recent;
use super::run::Schedule;
use super::seen::Record;
use super::shape::FfnShape;
use super::units::{LayerInput, Rows};
use crate::counters::{Counters, nanoseconds};
use crate::error::Error;
use crate::input::Input;
use crate::store::NeuronStore;
use crate::store::regions::CLUSTER;
use crate::trace;

/// Bytes of partial sums that are filled before they are reduced: those of one token of a 7B model.
const PARTIAL_BYTES: usize = 4 << 20;

/// Clusters whose partials exist at once, for `rows` rows of `clusters` clusters: enough to keep
/// every thread busy.
pub(super) fn clusters_per_group(rows: usize, d: usize, clusters: usize, threads: usize) -> usize {
    let least = (2 * threads).min(clusters);
    (PARTIAL_BYTES / (4 * rows * d)).clamp(least, clusters)
}

/// What the buffers of an [`Ffn`] are made for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FfnRoom {
    /// Most rows of a pass.
    pub rows: usize,
    /// Neurons of all banks that a layer visits, and their clusters.
    pub neurons: usize,
    pub clusters: usize,
    pub threads: usize,
    /// Keep gates and hidden values for [`Ffn::recorded`].
    pub observe: bool,
}

impl FfnRoom {
    /// Pairs of a neuron and a row, in whole clusters.
    pub(super) fn pairs(&self) -> usize {
        self.clusters * CLUSTER * self.rows
    }

    /// Elements of partial sums.
    pub(super) fn partials(&self, d: usize) -> usize {
        let group = |rows| clusters_per_group(rows, d, self.clusters, self.threads) * rows * d;
        (1..=self.rows).map(group).max().unwrap_or(0)
    }
}

/// A unit of work while its layer is computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    pub bank: u32,
    pub rows: usize,
    pub neurons: usize,
    /// Item of its first cluster, and the one after its last.
    pub first: usize,
    pub end: usize,
    /// Where its clusters begin among the pairs of the layer, in pairs.
    pub pairs: usize,
    /// Whether a mask says which pairs are wanted.
    pub named: bool,
    pub gating: Gating,
}

impl Unit {
    /// Its gates in the layer's, `[clusters × CLUSTER × rows]`.
    pub fn gates<'a>(&self, gates: &'a [f32]) -> &'a [f32] {
        &gates[self.pairs..][..(self.end - self.first) * CLUSTER * self.rows]
    }

    /// Its mask in the layer's.
    pub fn wanted<'a>(&self, wanted: &'a [u64]) -> Option<&'a [u64]> {
        let words = (self.end - self.first) * mask::words(self.rows);
        self.named.then(|| &wanted[self.pairs / 64..][..words])
    }
}

/// What is known of the pairs of a neuron and a row, unit after unit.
pub(super) struct Pairs {
    /// Activated gates, where they are known before the sums.
    pub gates: Vec<f32>,
    /// Which pairs a predictor wants, a bit for each.
    pub wanted: Vec<u64>,
    /// How far neurons are above their predictor's thresholds, for passes of one row.
    pub margins: Vec<f32>,
}

/// The rows of a unit that does not take all of a pass.
#[derive(Default)]
pub(super) struct Gathered {
    x: Vec<f32>,
    residual: Vec<f32>,
    quantized: Activations,
}

/// The input of a unit.
#[derive(Clone, Copy)]
pub(super) struct UnitInput<'a> {
    pub input: Input<'a>,
    pub residual: &'a [f32],
}

/// The inputs of all units of a layer.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub at: &'a LayerInput<'a>,
    pub gathered: &'a [Gathered],
}

impl<'a> Inputs<'a> {
    pub fn of(&self, unit: usize) -> UnitInput<'a> {
        match self.at.units[unit].rows {
            Rows::All(_) => UnitInput {
                input: self.at.input,
                residual: self.at.residual,
            },
            Rows::Some(_) => {
                let own = &self.gathered[unit];
                UnitInput {
                    input: Input {
                        x: &own.x,
                        quantized: own.quantized.all(),
                    },
                    residual: &own.residual,
                }
            }
        }
    }
}

/// What was done, in plain sums.
#[derive(Default)]
pub(super) struct Counts {
    /// (neuron, token) pairs whose gate fired, was looked at, and all of them.
    pub fired: u64,
    pub looked_at: u64,
    possible: u64,
    /// Bytes of weights computed with, predictors' included.
    pub bytes: u64,
    /// Nanoseconds that the predictors took.
    pub predict_ns: u64,
}

/// The FFN of every layer, over a [`NeuronStore`].
pub(crate) struct Ffn {
    pub(super) shape: FfnShape,
    pub store: NeuronStore,
    pub(super) predictors: Option<Predictors>,
    pub(super) lookahead: Option<Lookahead>,
    /// Active sets that are known in advance, for measurements.
    pub oracle: Oracle,
    pub(super) units: Vec<Unit>,
    pub(super) pairs: Pairs,
    gathered: Vec<Gathered>,
    pub(super) partials: Vec<f32>,
    pub(super) schedule: Schedule,
    pub(super) recent: Recent,
    pub(super) counts: Counts,
    /// For observers; absent unless asked for.
    pub(super) record: Option<Record>,
}

impl Ffn {
    pub fn new(
        shape: FfnShape,
        store: NeuronStore,
        predictors: Option<Predictors>,
        room: FfnRoom,
    ) -> Self {
        let (pairs, d) = (room.pairs(), shape.format.d);
        let lookahead = (predictors.as_ref())
            .map(|p| Lookahead::new(d, room.neurons, room.rows.min(FEW), p.banks()));
        let margins = if predictors.is_some() {
            room.clusters * CLUSTER
        } else {
            0
        };
        Self {
            lookahead,
            predictors,
            oracle: Oracle::default(),
            units: Vec::with_capacity(16),
            pairs: Pairs {
                gates: vec![0.0; pairs],
                wanted: vec![0; pairs / 64],
                margins: vec![0.0; margins],
            },
            gathered: Vec::new(),
            partials: vec![0.0; room.partials(d)],
            schedule: Schedule::new(room.clusters),
            recent: Recent::new(room.rows),
            counts: Counts::default(),
            record: room.observe.then(|| Record::new(pairs)),
            shape,
            store,
        }
    }

    /// Bytes that [`Ffn::new`] allocates, predictors' apart.
    pub fn bytes_for(shape: &FfnShape, room: &FfnRoom) -> u64 {
        let (pairs, partials) = (room.pairs(), room.partials(shape.format.d));
        let record = if room.observe {
            Record::bytes_for(pairs)
        } else {
            0
        };
        let floats = pairs + partials + 2 * room.neurons;
        (4 * floats + pairs / 8) as u64 + Recent::bytes_for(room.rows) + record
    }

    /// A pass begins, or goes on where it stopped if it is not `fresh`: how many rows each of its
    /// texts has, which lie one after the other.
    pub fn begin_pass(&mut self, rows: impl Iterator<Item = usize>, fresh: bool) {
        let all = self.recent.begin_pass(rows);
        if fresh {
            self.store.begin_pass(all == 1);
        }
    }

    /// Gates and hidden values of the last layer, which had one unit of `neurons` neurons, for
    /// `tokens` tokens, `[neurons × tokens]` each; empty where they were not kept.
    pub fn recorded(&self, tokens: usize) -> (&[f32], &[f32]) {
        let neurons = self.units.first().map_or(0, |unit| unit.neurons);
        match &self.record {
            Some(record) => record.values(neurons * tokens),
            None => (&[], &[]),
        }
    }

    /// What was done since the FFN was made.
    pub fn counters(&self) -> Counters {
        let counts = &self.counts;
        Counters {
            fired: counts.fired,
            looked_at: counts.looked_at,
            possible: counts.possible,
            ffn_bytes: counts.bytes,
            predict_ns: counts.predict_ns,
            ..self.store.counters()
        }
    }

    /// `out[row] = Σ weight × FFN(input[row])` over the units that a row takes part in.
    pub fn layer(
        &mut self,
        on: &Compute,
        at: &LayerInput<'_>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let mut gathered = std::mem::take(&mut self.gathered);
        gather(on.cpu, at, &mut gathered);
        let inputs = Inputs {
            at,
            gathered: &gathered,
        };
        let out = &mut out[..at.residual.len()];
        out.fill(0.0);
        let computed = self.compute(on, inputs, out);
        self.gathered = gathered;
        computed
    }

    fn compute(&mut self, on: &Compute, inputs: Inputs<'_>, out: &mut [f32]) -> Result<(), Error> {
        let at = inputs.at;
        let trace_layer = [at.number as u64, 0];
        self.store.tracer().section(&trace::FFN, trace_layer);
        self.begin_layer(at)?;
        for unit in 0..self.units.len() {
            self.name(on, unit, inputs.of(unit))?;
        }
        self.report_recent(on, inputs);
        self.look_ahead(on, at)?;
        let mut next = 0;
        while next < self.units.len() {
            // Units of as many rows each are summed side by side.
            let rows = self.units[next].rows;
            let same = self.units[next..].iter().take_while(|u| u.rows == rows);
            let end = next + same.count();
            let items = self.units[next].first..self.units[end - 1].end;
            let width = rows * self.shape.format.d;
            let d = self.shape.format.d;
            let group = clusters_per_group(rows.max(1), d, items.len(), on.threads());
            for first in items.clone().step_by(group) {
                let group = first..(first + group).min(items.end);
                self.run(on, inputs, group.clone(), width)?;
                self.store.tracer().section(&trace::REDUCE, trace_layer);
                self.reduce(on, at, group, width, out);
            }
            next = end;
        }
        self.store.end_layer();
        Ok(())
    }

    /// Sets the units up, and the store.
    fn begin_layer(&mut self, at: &LayerInput<'_>) -> Result<(), Error> {
        let banks = at.units.iter().map(|unit| unit.bank);
        self.store
            .begin_layer(at.number, banks, at.input.tokens())?;
        self.units.clear();
        self.schedule.begin_layer();
        let (mut first, mut pairs) = (0, 0);
        for work in at.units {
            let (rows, clusters) = (work.rows.len(), self.store.layout().clusters(work.bank));
            let neurons = self.store.layout().neurons(work.bank);
            let cut = self.predictors.as_ref().map_or(0.0, |p| p.cut(work.bank));
            self.units.push(Unit {
                bank: work.bank,
                rows,
                neurons,
                first,
                end: first + clusters,
                pairs,
                named: false,
                gating: Gating {
                    activation: self.shape.kind.activation,
                    cut,
                },
            });
            first += clusters;
            pairs += clusters * CLUSTER * rows;
            self.counts.possible += (neurons * rows) as u64;
        }
        if let Some(record) = &mut self.record {
            record.clear(pairs);
        }
        Ok(())
    }

    /// Reads ahead for the next layer: at once, behind what this layer misses, so that the device has
    /// work until the next one is named.
    fn look_ahead(&mut self, on: &Compute, at: &LayerInput<'_>) -> Result<(), Error> {
        let next = at.number + 1;
        let mut banks = self.store.layout().banks_of(next);
        let (Some(bank), None, Some(norm)) = (banks.next(), banks.next(), at.next) else {
            return Ok(());
        };
        if at.input.tokens() > FEW || !self.store.guesses_pay(next) {
            return Ok(());
        }
        let (Some(lookahead), Some(predictors)) = (&mut self.lookahead, &mut self.predictors)
        else {
            return Ok(());
        };
        let upcoming = Upcoming {
            bank,
            residual: at.residual,
            norm,
        };
        let (store, mut outcome) = (&mut self.store, Ok(()));
        let took = lookahead.name(on, predictors, &upcoming, &mut |named| {
            if outcome.is_ok() {
                outcome = store.guess(next, bank, named);
            }
        });
        self.counts.predict_ns += nanoseconds(took);
        outcome
    }
}

/// Collects the input of each unit that does not take all rows.
fn gather(cpu: Cpu, at: &LayerInput<'_>, gathered: &mut Vec<Gathered>) {
    let d = at.input.n();
    for (unit, work) in at.units.iter().enumerate() {
        let Rows::Some(rows) = work.rows else {
            continue;
        };
        if gathered.len() <= unit {
            gathered.resize_with(unit + 1, Gathered::default);
        }
        let own = &mut gathered[unit];
        for (from, to) in [(at.input.x, &mut own.x), (at.residual, &mut own.residual)] {
            to.clear();
            for &row in rows {
                to.extend_from_slice(&from[row as usize * d..][..d]);
            }
        }
        cpu.quantize_activations(&own.x, rows.len(), &mut own.quantized);
    }
}
