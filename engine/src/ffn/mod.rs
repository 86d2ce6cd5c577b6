//! The sparse FFN of one layer: which neurons, where their bytes are, the sums.
//!
//! Neurons are worked on in *clusters* of [`CLUSTER`] consecutive packed ids, each
//! as soon as its bytes are there (PowerInfer-2 §4.3). A cluster sums its neurons
//! into its own partial vector, ids ascending, and the partials are added in
//! cluster order. The order of every floating-point sum is thus fixed by packed
//! ids alone: threads, cache contents and the arrival order of reads cannot change
//! a bit of the result.
//!
//! `exact` and `dense` differ in what they skip, not in what they add: a neuron
//! whose gate does not fire contributes zeros in `dense` mode and nothing in
//! `exact` mode. `predicted` leaves out besides what its predictor does not want.

mod activation;
mod banks;
mod foresight;
mod hot;
mod job;
mod keep;
mod oracle;
mod predict;
mod record;
pub mod regions;
mod resident;
mod store;
mod temperature;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use emberflow_kernels::{Cpu, Workers, prefetch};
use emberflow_models::config::FfnKind;
use emberflow_predictor::keep_wanted;

use crate::Error;
use crate::bundle::NeuronFormat;
use crate::counters::Counters;
use crate::input::Input;
use crate::policy::Overlap;
use crate::trace;
pub(crate) use foresight::Norm;
use foresight::{Foresight, Next};
use job::Job;
use keep::{RECENT, release};
pub(crate) use oracle::Oracle;
use record::Record;
use store::Step;

pub(crate) use banks::{Banks, COLD};
pub(crate) use job::thread_floats;
pub(crate) use predict::{Predictors, Stored as StoredPredictors};
pub use record::FfnSeen;
pub(crate) use store::{NEAR_STEPS, NeuronStore, ReadCosts};
pub(crate) use temperature::Temperature;

/// Neurons per cluster: one sequential read of about a megabyte for a 7B model,
/// and few enough that one missing neuron holds up little.
pub const CLUSTER: usize = 128;

/// Longest chunk of tokens the FFN accepts.
pub const MAX_CHUNK: usize = 512;

/// Bytes of partial sums that are filled before they are reduced: those of one
/// token of a 7B model.
const PARTIAL_BYTES: usize = 4 << 20;

/// Tokens of a pass that are decoded, of as many sequences, and not part of a prompt.
const FEW: usize = 8;

/// Pieces of a layer that each thread names one after the other: what is missing of those
/// that are done is looked up and read while the others are named.
pub const GATE_PIECES: usize = 8;

/// Clusters whose partials exist at once, for chunks of `tokens`: enough to keep
/// every thread busy.
fn clusters_per_group(tokens: usize, d: usize, clusters: usize, threads: usize) -> usize {
    let least = (2 * threads).min(clusters);
    (PARTIAL_BYTES / (4 * tokens * d)).clamp(least, clusters)
}

/// What the sums need to know about the FFN.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FfnShape {
    pub format: NeuronFormat,
    pub neurons: usize,
    pub kind: FfnKind,
    /// Compute every neuron, firing or not.
    pub dense: bool,
    /// Activated gates below this magnitude count as zero; 0 for none.
    pub cut: f32,
}

/// The FFN of every layer, over a [`NeuronStore`].
pub(crate) struct Ffn {
    shape: FfnShape,
    pub store: NeuronStore,
    /// The layer's needed neurons, ascending.
    ids: Vec<u32>,
    /// Activated gates, `[neurons × tokens]`, where they are known ahead. Until then, if
    /// `named`, 1 for pairs that a predictor wants and 0 for others.
    gates: Vec<f32>,
    named: bool,
    predictors: Option<Predictors>,
    foresight: Option<Foresight>,
    /// How far neurons of the layer are above their thresholds, for one token.
    margins: Vec<f32>,
    /// Active sets that are known in advance, for measurements.
    pub oracle: Oracle,
    partials: Vec<f32>,
    /// Clusters that are ready, and what each cluster of a group is to do now.
    ready: Vec<(u32, Step)>,
    now: Vec<Option<Step>>,
    /// Clusters that were computed and still hold their bytes.
    done: Vec<u32>,
    /// Clusters of a group of which some neuron is needed.
    used: Vec<bool>,
    /// The last rows of each text in the pass, [`RECENT`] at most.
    ends: Vec<Range<usize>>,
    /// (neuron, token) pairs whose gate fired, was looked at, and all of them.
    fired: u64,
    looked_at: u64,
    possible: u64,
    /// Bytes of weights computed with, predictors' included.
    bytes: u64,
    /// Nanoseconds that the predictors took.
    predict_ns: u64,
    overlap: Overlap,
    /// For observers; absent unless asked for.
    record: Option<Record>,
}

impl Ffn {
    /// `observe`: keep gates and hidden values for [`Ffn::recorded`].
    pub fn new(
        shape: FfnShape,
        store: NeuronStore,
        predictors: Option<Predictors>,
        (chunk, threads): (usize, usize),
        observe: bool,
    ) -> Self {
        let (gates, partials) = buffer_lens(&shape, chunk, threads);
        let clusters = shape.neurons.div_ceil(CLUSTER);
        Self {
            ids: Vec::with_capacity(shape.neurons),
            gates: vec![0.0; gates],
            named: false,
            margins: (predictors.as_ref()).map_or(Vec::new(), |_| vec![0.0; shape.neurons]),
            foresight: (predictors.as_ref())
                .map(|p| Foresight::new(shape.format.d, shape.neurons, chunk.min(FEW), p.banks())),
            predictors,
            oracle: Oracle::default(),
            partials: vec![0.0; partials],
            ready: Vec::with_capacity(clusters),
            now: vec![None; clusters],
            done: Vec::with_capacity(clusters),
            used: Vec::with_capacity(clusters),
            ends: Vec::with_capacity(chunk),
            shape,
            overlap: store.overlap(),
            store,
            fired: 0,
            looked_at: 0,
            possible: 0,
            bytes: 0,
            predict_ns: 0,
            record: observe.then(|| Record::new(gates)),
        }
    }

    /// Bytes that [`Ffn::new`] allocates.
    pub fn bytes_for(shape: &FfnShape, chunk: usize, threads: usize, observe: bool) -> u64 {
        let (gates, partials) = buffer_lens(shape, chunk, threads);
        let record = if observe { Record::bytes_for(gates) } else { 0 };
        let ends = chunk * size_of::<Range<usize>>();
        (4 * (gates + partials + 2 * shape.neurons) + ends) as u64 + record
    }

    /// A pass begins: how many rows each of its texts has, which lie one after the other.
    pub fn begin(&mut self, rows: impl Iterator<Item = usize>) {
        self.ends.clear();
        let mut end = 0;
        self.ends.extend(rows.map(|rows| {
            end += rows;
            end - rows.min(RECENT)..end
        }));
    }

    /// Gates and hidden values of the last layer, for `tokens` tokens,
    /// `[neurons × tokens]` each; empty where they were not kept.
    pub fn recorded(&self, tokens: usize) -> (&[f32], &[f32]) {
        match &self.record {
            Some(record) => record.values(self.shape.neurons * tokens),
            None => (&[], &[]),
        }
    }

    /// What was done since the FFN was made.
    pub fn counters(&self) -> Counters {
        Counters {
            fired: self.fired,
            looked_at: self.looked_at,
            possible: self.possible,
            ffn_bytes: self.bytes,
            predict_ns: self.predict_ns,
            ..self.store.counters()
        }
    }

    /// `out[t] = FFN(input[t])` for every token of the input, which is `residual` after
    /// the norm. `next` is the norm before the FFN that comes after this one.
    #[allow(clippy::too_many_arguments)]
    pub fn layer(
        &mut self,
        cpu: Cpu,
        workers: &Workers,
        bank: u32,
        input: Input<'_>,
        residual: &[f32],
        next: Option<Norm<'_>>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let d = self.shape.format.d;
        let tokens = input.tokens();
        let out = &mut out[..tokens * d];
        out.fill(0.0);
        self.possible += (self.shape.neurons * tokens) as u64;
        if let Some(record) = &mut self.record {
            record.clear(self.shape.neurons * tokens);
        }
        let layer = [u64::from(bank), 0];
        self.store.tracer().section(&trace::FFN, layer);
        self.name_needs(cpu, workers, bank, input, residual)?;
        if tokens > 1 {
            self.lean_on_end(cpu, workers, bank, input.features(residual));
        }
        if let Some(norm) = next.filter(|_| tokens <= FEW && self.store.foresees(bank + 1)) {
            self.foresee(cpu, workers, (bank + 1, residual, norm))?;
        }
        let gates = if self.named {
            self.ids.len()
        } else {
            self.shape.neurons
        };
        self.bytes += (gates * self.shape.format.gate_len()) as u64;
        let clusters = self.shape.neurons.div_ceil(CLUSTER);
        let group = clusters_per_group(tokens, d, clusters, workers.threads());
        for first in (0..clusters).step_by(group) {
            let end = (first + group).min(clusters);
            self.sum_group(cpu, workers, input, first..end)?;
            self.used.clear();
            let places = |c: usize| self.store.places(c as u32);
            self.used
                .extend((first..end).map(|c| !places(c).is_empty()));
            let partials = &self.partials[..(end - first) * tokens * d];
            self.store.tracer().section(&trace::REDUCE, layer);
            let (store, done, ids) = (&mut self.store, &mut self.done, &self.ids);
            let gates = (&self.gates[..], tokens, &self.ends[..]);
            reduce(workers, partials, &self.used, out, &mut || {
                release(store, done, ids, gates);
            });
        }
        self.store.end(&self.ids);
        Ok(())
    }

    /// Finds out which neurons are needed and requests the missing ones. With
    /// resident Gate rows those are the ones that fire for a token at least; else those
    /// that a predictor wants, or all.
    fn name_needs(
        &mut self,
        cpu: Cpu,
        workers: &Workers,
        bank: u32,
        input: Input<'_>,
        residual: &[f32],
    ) -> Result<(), Error> {
        let (neurons, tokens) = (self.shape.neurons, input.tokens());
        let clusters = neurons.div_ceil(CLUSTER);
        self.ids.clear();
        self.done.clear();
        self.store.begin(bank, tokens)?;
        let features = input.features(residual);
        let start = Instant::now();
        let predictor = match &mut self.predictors {
            Some(p) => {
                self.shape.cut = p.cut(bank);
                p.prepare(cpu, workers, bank, features).then_some(&*p)
            }
            None => None,
        };
        self.predict_ns += nanoseconds(start.elapsed());
        self.bytes += predictor.map_or(0, |p| p.bytes(bank));
        let known = self.store.gates_resident();
        let oracle = self.oracle.next();
        self.named = predictor.is_some() || oracle.is_some();
        if !self.named {
            self.looked_at += (neurons * tokens) as u64;
        }
        if !known && !self.named {
            self.ids.extend(0..neurons as u32);
            for c in 0..clusters {
                let end = ((c + 1) * CLUSTER).min(neurons);
                self.store.need(&self.ids, c * CLUSTER..end);
            }
            return self.store.advance(&self.ids);
        }
        let (wanted, spent, named) = (AtomicU64::new(0), AtomicU64::new(0), self.named);
        let (resident, tracer) = (self.store.resident(), self.store.tracer().clone());
        let shape = &self.shape;
        let name = |c: usize, part: &mut [f32], margins: &mut [f32]| {
            let first = c * CLUSTER;
            if let Some(set) = oracle {
                oracle::name(set, first, part);
            } else if let Some(predictor) = predictor {
                let start = Instant::now();
                predictor.margins(cpu, bank, features, first, part);
                if !margins.is_empty() {
                    margins.copy_from_slice(part);
                }
                keep_wanted(part);
                spent.fetch_add(nanoseconds(start.elapsed()), Ordering::Relaxed);
                let ones = part.iter().filter(|&&w| w != 0.0).count();
                wanted.fetch_add(ones as u64, Ordering::Relaxed);
            }
            let span = |c: usize| tracer.open(&trace::GATE, [u64::from(bank), c as u64]);
            if known && named {
                let _span = span(c);
                job::wanted_gates(cpu, shape, &resident, bank, first, input, part);
            } else if known {
                for (c, gates) in (c..).zip(part.chunks_mut(CLUSTER * tokens)) {
                    let _span = span(c);
                    job::resident_gates(cpu, shape, &resident, bank, c * CLUSTER, input, gates);
                }
            }
        };
        let (ids, store, fired) = (&mut self.ids, &mut self.store, &mut self.fired);
        // Of several sequences it is not told apart what is whose.
        let margins = match predictor {
            Some(_) if tokens == 1 => &mut self.margins[..],
            _ => &mut [],
        };
        let mut foresight = self.foresight.as_mut().filter(|f| f.guessed(bank));
        let mut outcome = Ok(());
        let mut take = |c: usize, gates: &[f32], margins: &[f32]| {
            if !margins.is_empty() {
                store.lean(cpu, bank, c * CLUSTER, margins, true);
                if let Some(foresight) = &mut foresight {
                    foresight.learn(cpu, bank, c * CLUSTER, margins);
                }
            }
            for (c, gates) in (c..).zip(gates.chunks(CLUSTER * tokens)) {
                let start = ids.len();
                let pairs = list_needed(c * CLUSTER, gates, tokens, ids);
                *fired += if known { pairs } else { 0 };
                store.need(ids, start..ids.len());
            }
            if outcome.is_ok() {
                outcome = store.poll(ids).and_then(|()| store.advance(ids));
            }
        };
        let gates = &mut self.gates[..neurons * tokens];
        let unit = CLUSTER * tokens;
        let parts = (unit, clusters.div_ceil(GATE_PIECES * workers.threads()));
        if self.overlap == Overlap::Clusters {
            workers.for_each_part_then((gates, margins), parts, &name, &mut take);
        } else {
            workers.for_each_part_then((gates, margins), parts, &name, &mut |_, _, _| ());
            take(0, gates, margins);
        }
        outcome?;
        self.predict_ns += spent.into_inner() / workers.threads() as u64;
        self.looked_at += wanted.into_inner();
        self.oracle.keep(&self.ids, neurons);
        Ok(())
    }

    /// Reads ahead for the next bank: at once, behind what this bank misses, so that the device has
    /// work until the next one is named.
    fn foresee(&mut self, cpu: Cpu, workers: &Workers, next: Next<'_>) -> Result<(), Error> {
        let (Some(foresight), Some(predictors)) = (&mut self.foresight, &mut self.predictors)
        else {
            return Ok(());
        };
        let (store, mut outcome) = (&mut self.store, Ok(()));
        self.predict_ns += foresight.name((cpu, workers), predictors, next, &mut |named| {
            if outcome.is_ok() {
                outcome = store.foresee(next.0, named);
            }
        });
        outcome
    }

    /// Fills the partial sums of a group of clusters, in the order in which their
    /// bytes arrive.
    fn sum_group(
        &mut self,
        cpu: Cpu,
        workers: &Workers,
        input: Input<'_>,
        group: Range<usize>,
    ) -> Result<(), Error> {
        let tokens = input.tokens();
        let width = tokens * self.shape.format.d;
        let neurons = self.shape.neurons;
        let mut open = group
            .clone()
            .filter(|&c| !self.store.places(c as u32).is_empty())
            .count();
        let mut begun = false;
        while open > 0 {
            self.store.poll(&self.ids)?;
            self.store.advance(&self.ids)?;
            // What a policy without a pipeline must wait for.
            let barrier = match self.overlap {
                Overlap::Clusters => false,
                Overlap::Matrix => begun,
                Overlap::Nothing => true,
            };
            if barrier && self.store.reading() {
                self.store.wait(&self.ids)?;
                continue;
            }
            begun = true;
            self.store.take_ready(group.end, &mut self.ready);
            if self.ready.is_empty() {
                // There is time now.
                if !self.release_done(tokens) {
                    self.store.wait(&self.ids)?;
                }
                continue;
            }
            let ids = &self.ids;
            self.now[group.clone()].fill(None);
            for &(c, step) in &self.ready {
                self.now[c as usize] = Some(step);
            }
            let now = &self.now;
            let gated = self.ready.iter().any(|r| r.1 == Step::Gates);
            if gated {
                let (shape, store) = (&self.shape, &self.store);
                let range = group.start * CLUSTER..(group.end * CLUSTER).min(neurons);
                let gates = &mut self.gates[range.start * tokens..range.end * tokens];
                let named = self.named;
                workers.for_each_chunk_mut(gates, CLUSTER * tokens, &|_, c, gates| {
                    let c = group.start + c;
                    if now[c] == Some(Step::Gates) {
                        if !named {
                            gates.fill(1.0);
                        }
                        job::gates_from_bundles(cpu, shape, store, c as u32, ids, input, gates);
                    }
                });
            }
            let (fused, computed) = (AtomicU64::new(0), AtomicU64::new(0));
            let values =
                group.start * CLUSTER * tokens..(group.end * CLUSTER).min(neurons) * tokens;
            let records = match &mut self.record {
                Some(record) => record.clusters(values, tokens),
                None => Vec::new(),
            };
            let job = Job {
                shape: &self.shape,
                store: &self.store,
                gates: &self.gates,
                named: self.named,
                ids,
                input,
            };
            let partials = &mut self.partials[..group.len() * width];
            if self.ready.iter().any(|r| r.1 == Step::Sums) {
                // Several at a time make long lists of rows.
                workers.for_each_part_mut(partials, width, &|_, at, partials| {
                    let (first, count) = (group.start + at, partials.len() / width);
                    let ready = (first..first + count).filter(|&c| now[c] == Some(Step::Sums));
                    let ready = ready.map(|c| c as u32);
                    let records = records.get(at..).unwrap_or(&[]);
                    let done = job.clusters(cpu, first as u32, ready, partials, records);
                    fused.fetch_add(done.fired, Ordering::Relaxed);
                    computed.fetch_add(done.neurons, Ordering::Relaxed);
                });
            }
            self.store.intact(ids)?;
            self.fired += fused.into_inner();
            self.bytes += computed.into_inner() * self.shape.format.rest_len() as u64;
            for &(c, step) in &self.ready {
                match step {
                    Step::Sums => {
                        self.done.push(c);
                        open -= 1;
                    }
                    Step::Gates => {
                        let gates = &self.gates;
                        let of = |n: u32| &gates[n as usize * tokens..(n as usize + 1) * tokens];
                        let places = self.store.places(c);
                        let pairs = ids[places].iter().flat_map(|&n| of(n));
                        self.fired += pairs.filter(|&&g| g != 0.0).count() as u64;
                        let fires = |n: u32| of(n).iter().any(|&g| g != 0.0);
                        self.store.resolve(ids, c, fires)?;
                    }
                }
            }
            if self.store.is_short_of_memory() {
                self.release_done(tokens);
            }
        }
        Ok(())
    }

    fn release_done(&mut self, tokens: usize) -> bool {
        let gates = (&self.gates[..], tokens, &self.ends[..]);
        release(&mut self.store, &mut self.done, &self.ids, gates)
    }
}

/// Adds the numbers of the neurons, the first being `first`, that some token needs to `ids`:
/// `gates [neurons × tokens]` of a cluster at most. Returns how many (neuron, token) pairs that are.
fn list_needed(first: usize, gates: &[f32], tokens: usize, ids: &mut Vec<u32>) -> u64 {
    // No jumps: whether a neuron is needed cannot be foreseen.
    let (mut needed, mut count, mut pairs) = ([0u32; CLUSTER], 0, 0);
    for (n, gates) in (first..).zip(gates.chunks_exact(tokens)) {
        let firing = gates.iter().filter(|&&g| g != 0.0).count();
        needed[count % CLUSTER] = n as u32;
        count += usize::from(firing > 0);
        pairs += firing as u64;
    }
    ids.extend_from_slice(&needed[..count]);
    pairs
}

/// As counters hold them.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn buffer_lens(shape: &FfnShape, chunk: usize, threads: usize) -> (usize, usize) {
    let clusters = shape.neurons.div_ceil(CLUSTER);
    let d = shape.format.d;
    let partials = (1..=chunk)
        .map(|t| clusters_per_group(t, d, clusters, threads) * t * d)
        .max()
        .unwrap_or(0);
    (shape.neurons * chunk, partials)
}

/// `out += partials[0] + partials[1] + …`, in that order for every element, over
/// the partials that are `used`, while the calling thread does something else first.
fn reduce(
    workers: &Workers,
    partials: &[f32],
    used: &[bool],
    out: &mut [f32],
    beside: &mut (dyn FnMut() + Send),
) {
    const PIECE: usize = 1024;
    // Partials between the one that is added and the one that is asked for.
    const AHEAD: usize = 2;
    let width = out.len();
    let add = |piece: usize, out: &mut [f32], _: &mut [u8]| {
        let len = out.len();
        let part = |partial: usize| &partials[partial * width + piece * PIECE..][..len];
        for (i, _) in used.iter().enumerate().filter(|(_, used)| **used) {
            // Half of them lie in another core's cache.
            if let Some(next) = (i + AHEAD < used.len()).then_some(i + AHEAD) {
                prefetch(bytemuck::cast_slice(part(next)));
            }
            let part = part(i);
            for (y, p) in out.iter_mut().zip(part) {
                *y += p;
            }
        }
    };
    workers.for_each_part_then((out, &mut [0u8; 0]), (PIECE, 1), &add, &mut |_, _, _| {
        beside()
    });
}
