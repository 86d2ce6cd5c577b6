//! Determines a unit's active set and requests the neurons that miss.
//!
//! The active set is the neurons that fire for any row if Gate rows are resident; otherwise the
//! predicted neurons, or all. Threads evaluate the bank in parallel. Between its own pieces the
//! calling thread looks up finished pieces and submits their reads.

use std::time::Instant;

use std::sync::atomic::{AtomicU64, Ordering};

use arrayvec::ArrayVec;
use emberflow_kernels::{Compute, Cpu, Lane, Lanes};
use emberflow_predictor::Features;
use emberflow_storage::trace::Tracer;

use super::gates::GateWork;
use super::lane_gates::{GateProducts, LaneGates};
use super::lookahead::{GATE_PIECES, Lookahead};
use super::mask;
use super::pairs::{Inputs, Pairs, Unit, UnitInput};
use super::predict::Predictors;
use super::shape::FfnShape;
use super::state::{Counts, Ffn};
use super::top::Tops;
use crate::activation::Gating;
use crate::cluster::CLUSTER;
use crate::counters::nanoseconds;
use crate::error::Error;
use crate::store::{NeuronStore, Resident};
use crate::thread_buffer::with_thread_buffer;
use crate::trace;

/// Packed ids of a cluster's needed neurons.
type Needed = ArrayVec<u32, CLUSTER>;

/// Shared read-only state of the threads that determine a bank's active set.
struct Naming<'a> {
    cpu: Cpu,
    /// Number of the layer, for traces.
    layer: usize,
    bank: u32,
    neurons: usize,
    rows: usize,
    gates: GateWork<'a>,
    features: Features<'a>,
    predictor: Option<&'a Predictors>,
    /// The mask words of a recorded active set.
    oracle: Option<&'a [u64]>,
    /// Leading clusters that are left to a lane.
    left: usize,
    /// A lane has time for products of Gate rows.
    shares: bool,
    /// Gate rows, if resident.
    resident: Option<&'a Resident>,
    /// Every neuron is needed, firing or not.
    all: bool,
    /// The same for a lane that computes other rows with all neurons.
    streams: bool,
    tracer: &'a Tracer,
    /// Pairs that the predictor wants, and nanoseconds spent predicting.
    wanted: AtomicU64,
    spent: AtomicU64,
}

impl Naming<'_> {
    /// Evaluates the clusters from `c` on: fills their mask from the oracle or the predictor, and
    /// their gates where Gate rows are resident. Stores `margins` if the slice is not empty.
    fn part(&self, c: usize, wanted: &mut [u64], gates: &mut [f32], margins: &mut [f32]) {
        if let Some(set) = self.oracle {
            let first = c * mask::words(1);
            let here = wanted.len().min(set.len() - first);
            wanted.fill(0);
            wanted[..here].copy_from_slice(&set[first..][..here]);
        } else if let Some(predictor) = self.predictor {
            let start = Instant::now();
            let predicting = Predicting {
                cpu: self.cpu,
                predictor,
                bank: self.bank,
                neurons: self.neurons,
                rows: self.rows,
                features: self.features,
            };
            let count = predicting.part(c, wanted, margins);
            self.wanted.fetch_add(count, Ordering::Relaxed);
            let spent = nanoseconds(start.elapsed());
            self.spent.fetch_add(spent, Ordering::Relaxed);
        }
        let Some(resident) = self.resident else {
            return;
        };
        let span = |c: usize| (self.tracer).open(&trace::GATE, [self.layer as u64, c as u64]);
        let (first, unit) = (c * CLUSTER, CLUSTER * self.rows);
        if wanted.is_empty() {
            for (i, gates) in gates.chunks_mut(unit).enumerate() {
                if c + i < self.left {
                    continue;
                }
                let neurons = self.of_cluster(c + i);
                let _span = span(c + i);
                let gates = &mut gates[..neurons.len() * self.rows];
                self.gates.resident(resident, self.bank, neurons, gates);
            }
        } else {
            let _span = span(c);
            let neurons = first..(first + gates.len() / self.rows).min(self.neurons);
            let gates = &mut gates[..neurons.len() * self.rows];
            self.gates
                .wanted(resident, self.bank, neurons, wanted, gates);
        }
    }

    /// Has a lane begin with some of the gates, if all of them are needed.
    fn begin_beside(&self, unit: &Unit) -> Option<LaneGates> {
        let resident = self.resident.filter(|_| !unit.named && self.shares)?;
        let neurons = self.left * CLUSTER..self.neurons;
        LaneGates::begin(resident, self.bank, neurons, self.gates.input)
    }

    /// As [`Naming::part`], from products of rows.
    fn part_of_products(&self, products: GateProducts<'_>, c: usize, gates: &mut [f32]) {
        for (i, gates) in gates.chunks_mut(CLUSTER * self.rows).enumerate() {
            let neurons = self.of_cluster(c + i);
            let gates = &mut gates[..neurons.len() * self.rows];
            self.gates.of_products(products, neurons, gates);
        }
    }

    fn of_cluster(&self, c: usize) -> std::ops::Range<usize> {
        let first = c * CLUSTER;
        first..(first + CLUSTER).min(self.neurons)
    }
}

/// A bank's predictor, prepared for some rows.
struct Predicting<'a> {
    cpu: Cpu,
    predictor: &'a Predictors,
    bank: u32,
    neurons: usize,
    rows: usize,
    features: Features<'a>,
}

impl Predicting<'_> {
    /// Fills the mask of clusters from `c` on from the predictor's margins, which are stored in `margins` if it is
    /// long enough. Returns the number of wanted pairs.
    fn part(&self, c: usize, wanted: &mut [u64], margins: &mut [f32]) -> u64 {
        let words = mask::words(self.rows);
        let margins_of = |c: usize, margins: &mut [f32]| {
            (self.predictor).margins(self.cpu, self.bank, self.features, c * CLUSTER, margins);
        };
        let each = wanted.chunks_exact_mut(words);
        if !margins.is_empty() {
            let end = (c * CLUSTER + margins.len()).min(self.neurons);
            let margins = &mut margins[..end - c * CLUSTER];
            margins_of(c, margins);
            let clusters = each.zip(margins.chunks(CLUSTER));
            return clusters.map(|(w, m)| mask::set_wanted(w, m)).sum();
        }
        with_thread_buffer(CLUSTER * self.rows, |buffer| {
            let clusters = each.enumerate().map(|(i, words)| {
                let neurons = CLUSTER.min(self.neurons - (c + i) * CLUSTER);
                let margins = &mut buffer[..neurons * self.rows];
                margins_of(c + i, margins);
                mask::set_wanted(words, margins)
            });
            clusters.sum()
        })
    }
}

/// Passes evaluated clusters on to the store, which looks them up and requests misses.
struct Taker<'a> {
    store: &'a mut NeuronStore,
    counts: &'a mut Counts,
    /// Set if early margins of this bank exist.
    lookahead: Option<&'a mut Lookahead>,
    naming: &'a Naming<'a>,
    unit: usize,
    /// Misses are requested while other clusters are evaluated.
    overlaps: bool,
    /// Needed neurons so far.
    needed: usize,
    outcome: Result<(), Error>,
    tops: &'a mut Tops,
}

impl Taker<'_> {
    /// [`Taker::take`] while other clusters are evaluated.
    fn take_early(&mut self, c: usize, wanted: &[u64], gates: &[f32], margins: &[f32]) {
        if self.overlaps {
            self.take(c, wanted, gates, margins);
        }
    }

    /// [`Taker::take`] of all clusters, if none was taken early.
    fn take_late(&mut self, wanted: &[u64], gates: &[f32], margins: &[f32]) {
        if !self.overlaps {
            self.take(0, wanted, gates, margins);
        }
    }

    /// Requests the needed neurons of the clusters from `c` on.
    fn take(&mut self, c: usize, wanted: &[u64], gates: &[f32], margins: &[f32]) {
        let naming = self.naming;
        let (bank, rows, first) = (naming.bank, naming.rows, c * CLUSTER);
        if !margins.is_empty() {
            let margins = &margins[..margins.len().min(naming.neurons - first)];
            (self.store).set_margins(naming.cpu, bank, first, margins, true);
            if let Some(lookahead) = &mut self.lookahead {
                lookahead.learn(naming.cpu, bank, first, margins);
            }
        }
        let words = mask::words(rows);
        let count = (gates.len() / (CLUSTER * rows)).max(wanted.len() / words);
        for i in 0..count {
            if c + i < naming.left {
                self.store.leave(self.unit);
                continue;
            }
            let neurons = naming.of_cluster(c + i);
            let mut ids = Needed::new();
            if naming.resident.is_some() {
                let gates = &gates[i * CLUSTER * rows..][..neurons.len() * rows];
                self.counts.fired += firing(neurons.start, gates, rows, &mut ids);
                if naming.all {
                    ids = neurons.clone().map(|n| n as u32).collect();
                }
            } else {
                let words = &wanted[i * words..][..words];
                mask::for_each_wanted(words, rows, neurons.len(), |n| {
                    ids.push((neurons.start + n) as u32);
                });
            }
            if naming.streams {
                ids = neurons.map(|n| n as u32).collect();
            }
            self.needed += ids.len();
            self.store.need(self.unit, &ids);
        }
        if self.outcome.is_ok() {
            self.outcome = self.store.poll().and_then(|()| self.store.advance());
        }
    }
}

impl Ffn {
    /// Requests all neurons of a unit. Of one whose hidden values a lane computes, they are for Down.
    pub(super) fn name_all(&mut self, unit: usize) -> Result<(), Error> {
        let bank_unit = self.units[unit];
        let left = match bank_unit.hidden {
            Some(_) => {
                self.counts.all(&bank_unit, 0);
                0
            }
            None => self.store.outside.computes(bank_unit.bank),
        };
        need_all(&mut self.store, unit, bank_unit.neurons, left)
    }

    /// Determines a unit's active set and requests the misses.
    pub(super) fn name(
        &mut self,
        on: &Compute,
        unit: usize,
        input: UnitInput<'_>,
    ) -> Result<(), Error> {
        let bank_unit = &mut self.units[unit];
        let features = input.input.features(input.residual);
        let predictor = prepare(
            on,
            &mut self.predictors,
            &mut self.counts,
            bank_unit.bank,
            features,
            &mut self.cutoffs,
        );
        let oracle = bank_unit.is_single().then(|| self.oracle.next()).flatten();
        bank_unit.named = predictor.is_some() || oracle.is_some();
        let bank_unit = *bank_unit;
        let resident = self.store.resident_gates(bank_unit.bank);
        let left = self.store.outside.computes(bank_unit.bank);
        let gate_len = self.shape.format.gate_len();
        if !bank_unit.named {
            let neurons = bank_unit.neurons.saturating_sub(left * CLUSTER);
            self.counts.all(&bank_unit, neurons * gate_len);
        }
        if !(bank_unit.named || resident.is_some()) {
            return self.name_all(unit);
        }
        let tracer = self.store.tracer.clone();
        let naming = Naming {
            cpu: on.cpu,
            layer: self.store.layer(),
            bank: bank_unit.bank,
            neurons: bank_unit.neurons,
            rows: bank_unit.rows,
            gates: self.shape.gates(on, bank_unit.gating, input, &self.cutoffs),
            features,
            predictor,
            oracle,
            left,
            shares: self.lane.as_ref().is_some_and(|lane| !lane.is_busy()),
            resident: resident.as_deref(),
            all: self.shape.dense,
            streams: self.store.outside.all_needed,
            tracer: &tracer,
            wanted: AtomicU64::new(0),
            spent: AtomicU64::new(0),
        };
        let mut taker = Taker {
            lookahead: (self.lookahead.as_mut()).filter(|l| l.guessed(bank_unit.bank)),
            overlaps: self.store.overlaps(),
            store: &mut self.store,
            counts: &mut self.counts,
            naming: &naming,
            unit,
            needed: 0,
            outcome: Ok(()),
            tops: &mut self.tops,
        };
        share(on, &bank_unit, &mut self.pairs, &mut taker);
        taker.outcome?;
        let needed = taker.needed;
        self.counts.predict_ns += naming.spent.into_inner() / on.threads() as u64;
        self.counts.looked_at += naming.wanted.into_inner();
        if bank_unit.named {
            self.counts.bytes += (needed * gate_len) as u64;
        }
        self.oracle
            .keep(self.store.needed_of(unit), bank_unit.neurons);
        Ok(())
    }
}

impl Ffn {
    /// Lets a predictor select the pairs of the rows that a lane computes with all clusters.
    pub(super) fn name_beside(&mut self, on: &Compute, inputs: Inputs<'_>) {
        let (Some((input, _)), Some(&unit)) = (inputs.beside.rows, self.units.first()) else {
            return;
        };
        self.pairs.wanted_beside = None;
        let features = input.input.features(input.residual);
        let (predictors, counts) = (&mut self.predictors, &mut self.counts);
        let cutoffs = &mut self.cutoffs;
        let Some(predictor) = prepare(on, predictors, counts, unit.bank, features, cutoffs) else {
            return;
        };
        let start = Instant::now();
        let predicting = Predicting {
            cpu: on.cpu,
            predictor,
            bank: unit.bank,
            neurons: unit.neurons,
            rows: input.input.tokens(),
            features,
        };
        let (words, clusters) = (mask::words(predicting.rows), unit.end - unit.first);
        let wanted = &mut self.pairs.wanted[unit.words_end()..][..clusters * words];
        let count = AtomicU64::new(0);
        (on.workers).for_each_chunk_mut(wanted, words, &|_, c, wanted| {
            count.fetch_add(predicting.part(c, wanted, &mut []), Ordering::Relaxed);
        });
        self.pairs.wanted_beside = Some(count.into_inner());
        self.counts.predict_ns += nanoseconds(start.elapsed());
    }
}

impl FfnShape {
    /// Gates of a unit from its resident Gate rows.
    fn gates<'a>(
        &self,
        on: &Compute,
        gating: Gating,
        from: UnitInput<'a>,
        cutoffs: &'a [f32],
    ) -> GateWork<'a> {
        GateWork {
            cpu: on.cpu,
            format: self.format,
            gating,
            input: from.input,
            bias: from.bias.gate,
            cutoffs,
        }
    }
}

/// The predictors, after computing the part shared by all neurons; `None` if this bank has none.
/// Their `cutoffs` replace those of the previous bank.
fn prepare<'a>(
    on: &Compute,
    predictors: &'a mut Option<Predictors>,
    counts: &mut Counts,
    bank: u32,
    features: Features<'_>,
    cutoffs: &mut Vec<f32>,
) -> Option<&'a Predictors> {
    cutoffs.clear();
    let predictors = predictors.as_mut()?;
    let start = Instant::now();
    let names = predictors.prepare(on, bank, features);
    counts.predict_ns += nanoseconds(start.elapsed());
    counts.bytes += if names { predictors.bytes(bank) } else { 0 };
    if names {
        cutoffs.extend_from_slice(predictors.cutoffs(bank));
    }
    names.then_some(&*predictors)
}

/// Evaluates a unit's clusters on all threads. The calling thread requests misses concurrently if
/// they may overlap, else afterwards.
fn share(on: &Compute, of: &Unit, pairs: &mut Pairs, taker: &mut Taker<'_>) {
    let naming = taker.naming;
    let (rows, clusters) = (of.rows, of.end - of.first);
    let (words, all) = (mask::words(rows), clusters * CLUSTER * rows);
    // Margins are stored for a single row only, and not for experts, whose last visit may be long
    // ago.
    let keeps_margins = naming.predictor.is_some() && rows == 1 && !pairs.margins.is_empty();
    let lens = [of.named, naming.resident.is_some(), keeps_margins].map(usize::from);
    let wanted = &mut pairs.wanted[of.pairs / 64..][..lens[0] * clusters * words];
    let gates = &mut pairs.gates[of.pairs..][..lens[1] * all];
    let margins = &mut pairs.margins[..lens[2] * all];
    let pieces = clusters.div_ceil(GATE_PIECES * on.threads());
    if let (Some(multiple), false) = (of.gating.top, of.named) {
        return share_top(on, of, multiple, gates, taker, pieces);
    }
    if let Some(begun) = naming.begin_beside(of) {
        return share_beside(on, &begun, gates, taker, pieces);
    }
    let name = |c: usize, wanted: &mut [u64], gates: &mut [f32], margins: &mut [f32]| {
        naming.part(c, wanted, gates, margins);
    };
    let lanes = Lanes {
        units: clusters,
        first: Lane::new(wanted, words),
        second: Lane::new(gates, CLUSTER * rows),
        third: Lane::new(margins, CLUSTER),
    };
    (on.workers).for_each_part_then(lanes, pieces, &name, &mut |c, wanted, gates, margins| {
        taker.take_early(c, wanted, gates, margins);
    });
    taker.take_late(wanted, gates, margins);
}

/// [`share`] for gates with a cutoff, which depends on all gates.
fn share_top(
    on: &Compute,
    of: &Unit,
    multiple: f32,
    gates: &mut [f32],
    taker: &mut Taker<'_>,
    pieces: usize,
) {
    let (naming, unit) = (taker.naming, CLUSTER * of.rows);
    let clusters = of.end - of.first;
    (on.workers).for_each_part_then(
        of_gates(clusters, unit, gates),
        pieces,
        &|c, wanted, gates, margins| naming.part(c, wanted, gates, margins),
        &mut |_, _, _, _| {},
    );
    let mut tops = std::mem::take(taker.tops);
    let cutoffs = tops.find(multiple, &gates[..of.neurons * of.rows], of.rows);
    (on.workers).for_each_part_then(
        of_gates(clusters, unit, gates),
        pieces,
        &|_, _, gates, _| of.gating.apply(on.cpu, cutoffs, gates),
        &mut |c, _, gates, _| taker.take_early(c, &[], gates, &[]),
    );
    taker.take_late(&[], gates, &[]);
    *taker.tops = tops;
}

/// [`share`] while a lane computes the gates of the last clusters.
fn share_beside(
    on: &Compute,
    begun: &LaneGates,
    gates: &mut [f32],
    taker: &mut Taker<'_>,
    pieces: usize,
) {
    let (naming, first) = (taker.naming, begun.first().div_ceil(CLUSTER));
    let unit = CLUSTER * naming.rows;
    let (own, others) = gates.split_at_mut(first * unit);
    (on.workers).for_each_part_then(
        of_gates(first, unit, own),
        pieces,
        &|c, wanted, gates, margins| naming.part(c, wanted, gates, margins),
        &mut |c, _, gates, _| taker.take_early(c, &[], gates, &[]),
    );
    let mut rest = |name: &(dyn Fn(usize, &mut [f32]) + Sync)| {
        (on.workers).for_each_part_then(
            of_gates(others.len() / unit, unit, others),
            pieces,
            &|c, _, gates, _| name(first + c, gates),
            &mut |c, _, gates, _| taker.take_early(first + c, &[], gates, &[]),
        );
    };
    let taken = begun.collect(naming.rows, &mut |products| {
        rest(&|c, gates| naming.part_of_products(products, c, gates));
    });
    if !taken {
        rest(&|c, gates| naming.part(c, &mut [], gates, &mut []));
    }
    taker.take_late(&[], gates, &[]);
}

/// Lanes of gates alone, `[clusters × unit]`.
fn of_gates(clusters: usize, unit: usize, gates: &mut [f32]) -> Lanes<'_, u64, f32, f32> {
    Lanes {
        units: clusters,
        first: Lane::new(&mut [], 1),
        second: Lane::new(gates, unit),
        third: Lane::new(&mut [], 1),
    }
}

/// Marks every neuron of a unit as needed, but for the first `left` clusters, which are left to a lane.
pub(super) fn need_all(
    store: &mut NeuronStore,
    unit: usize,
    neurons: usize,
    left: usize,
) -> Result<(), Error> {
    for first in (0..neurons).step_by(CLUSTER) {
        if first < left * CLUSTER {
            store.leave(unit);
            continue;
        }
        let ids = first..(first + CLUSTER).min(neurons);
        let ids: Needed = ids.map(|n| n as u32).collect();
        store.need(unit, &ids);
    }
    store.advance()
}

/// Lists the neurons, numbered from `first`, that fire for any row; `gates [neurons × rows]` of at
/// most one cluster. Returns the number of firing pairs.
fn firing(first: usize, gates: &[f32], rows: usize, ids: &mut Needed) -> u64 {
    // Branch-free: the branch would be unpredictable.
    let (mut needed, mut count, mut pairs) = ([0u32; CLUSTER], 0, 0);
    for (n, gates) in (first..).zip(gates.chunks_exact(rows)) {
        let fires = gates.iter().filter(|&&g| g != 0.0).count();
        needed[count % CLUSTER] = n as u32;
        count += usize::from(fires > 0);
        pairs += fires as u64;
    }
    ids.extend(needed[..count].iter().copied());
    pairs
}
