//! Which neurons a unit needs, and the requests for those that memory misses.
//!
//! With resident Gate rows those that fire for a row at least; else those that a predictor wants, or
//! all. Threads name a part of the bank each, and between its own parts the calling thread looks up
//! and requests what the complete ones need.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use arrayvec::ArrayVec;
use emberflow_kernels::{Compute, Cpu, Lane, Lanes};
use emberflow_predictor::Features;
use emberflow_storage::trace::Tracer;

use super::gates::GateWork;
use super::layer::{Ffn, UnitInput};
use super::lookahead::GATE_PIECES;
use super::mask;
use super::predict::Predictors;
use crate::ablation::Overlap;
use crate::counters::nanoseconds;
use crate::error::Error;
use crate::store::Resident;
use crate::store::regions::CLUSTER;
use crate::thread_buffer::with_thread_buffer;
use crate::trace;

/// Numbers of a cluster's needed neurons in their bank.
type Needed = ArrayVec<u32, CLUSTER>;

/// What the threads that name a bank's neurons look at.
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
    /// The words of an active set that is known in advance.
    oracle: Option<&'a [u64]>,
    /// Gate rows, where they are resident.
    resident: Option<&'a Resident>,
    tracer: &'a Tracer,
    /// Pairs that the predictor wants, and nanoseconds that it took.
    wanted: AtomicU64,
    spent: AtomicU64,
}

impl Naming<'_> {
    /// Names the clusters from `c` on: fills their words of the mask where something names them, and
    /// their gates where the rows are resident. `margins` are kept if there is room for them.
    fn part(&self, c: usize, wanted: &mut [u64], gates: &mut [f32], margins: &mut [f32]) {
        if let Some(set) = self.oracle {
            let first = c * mask::words(1);
            let here = wanted.len().min(set.len() - first);
            wanted.fill(0);
            wanted[..here].copy_from_slice(&set[first..][..here]);
        } else if let Some(predictor) = self.predictor {
            let start = Instant::now();
            let count = self.predict(predictor, c, wanted, margins);
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

    /// Fills the mask by the predictor's margins. Returns how many pairs are wanted.
    fn predict(
        &self,
        predictor: &Predictors,
        c: usize,
        wanted: &mut [u64],
        margins: &mut [f32],
    ) -> u64 {
        let words = mask::words(self.rows);
        let margins_of = |c: usize, margins: &mut [f32]| {
            predictor.margins(self.cpu, self.bank, self.features, c * CLUSTER, margins);
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
                let margins = &mut buffer[..self.of_cluster(c + i).len() * self.rows];
                margins_of(c + i, margins);
                mask::set_wanted(words, margins)
            });
            clusters.sum()
        })
    }

    fn of_cluster(&self, c: usize) -> std::ops::Range<usize> {
        let first = c * CLUSTER;
        first..(first + CLUSTER).min(self.neurons)
    }
}

impl Ffn {
    /// Finds out which neurons a unit needs, and requests the missing ones.
    pub(super) fn name(
        &mut self,
        on: &Compute,
        unit: usize,
        UnitInput { input, residual }: UnitInput<'_>,
    ) -> Result<(), Error> {
        let of = self.units[unit];
        let (rows, clusters) = (of.rows, of.end - of.first);
        let features = input.features(residual);
        let start = Instant::now();
        let predictor = match &mut self.predictors {
            Some(p) => p.prepare(on, of.bank, features).then_some(&*p),
            None => None,
        };
        self.counts.predict_ns += nanoseconds(start.elapsed());
        self.counts.bytes += predictor.map_or(0, |p| p.bytes(of.bank));
        let oracle = if rows == 1 { self.oracle.next() } else { None };
        let (named, known) = (
            predictor.is_some() || oracle.is_some(),
            self.store.gates_resident(of.bank),
        );
        self.units[unit].named = named;
        let gate_len = self.shape.format.gate_len();
        if !named {
            self.counts.looked_at += (of.neurons * rows) as u64;
            self.counts.bytes += (of.neurons * gate_len) as u64;
        }
        if !named && !known {
            for c in 0..clusters {
                let ids = c * CLUSTER..((c + 1) * CLUSTER).min(of.neurons);
                let ids: Needed = ids.map(|n| n as u32).collect();
                self.store.need(unit, &ids);
            }
            return self.store.advance();
        }
        let (resident, tracer) = (self.store.resident(), self.store.tracer().clone());
        let naming = Naming {
            cpu: on.cpu,
            layer: self.store.layer_number(),
            bank: of.bank,
            neurons: of.neurons,
            rows,
            gates: GateWork {
                cpu: on.cpu,
                format: self.shape.format,
                gating: of.gating,
                input,
            },
            features,
            predictor,
            oracle,
            resident: known.then_some(&*resident),
            tracer: &tracer,
            wanted: AtomicU64::new(0),
            spent: AtomicU64::new(0),
        };
        // Of several sequences it is not told apart what is whose.
        let keeps_margins = predictor.is_some() && rows == 1;
        let words = mask::words(rows);
        let pairs = clusters * CLUSTER * rows;
        let lens = [named, known, keeps_margins].map(usize::from);
        let wanted = &mut self.pairs.wanted[of.pairs / 64..][..lens[0] * clusters * words];
        let gates = &mut self.pairs.gates[of.pairs..][..lens[1] * pairs];
        let margins = &mut self.pairs.margins[..lens[2] * pairs];
        let overlaps = self.store.overlap() == Overlap::Clusters;
        let (store, counts) = (&mut self.store, &mut self.counts);
        let mut lookahead = (self.lookahead.as_mut()).filter(|l| l.guessed(of.bank));
        let (mut outcome, mut needed) = (Ok(()), 0);
        let mut take = |c: usize, wanted: &[u64], gates: &[f32], margins: &[f32]| {
            let first = c * CLUSTER;
            if !margins.is_empty() {
                let margins = &margins[..margins.len().min(of.neurons - first)];
                store.set_margins(on.cpu, of.bank, first, margins, true);
                if let Some(lookahead) = &mut lookahead {
                    lookahead.learn(on.cpu, of.bank, first, margins);
                }
            }
            let count = (gates.len() / (CLUSTER * rows)).max(wanted.len() / words);
            for i in 0..count {
                let here = naming.of_cluster(c + i);
                let ids = if known {
                    let gates = &gates[i * CLUSTER * rows..][..here.len() * rows];
                    let (ids, pairs) = firing(here.start, gates, rows);
                    counts.fired += pairs;
                    ids
                } else {
                    let mut ids = Needed::new();
                    let words = &wanted[i * words..][..words];
                    mask::for_each_wanted(words, rows, here.len(), |n| {
                        ids.push((here.start + n) as u32);
                    });
                    ids
                };
                needed += ids.len();
                store.need(unit, &ids);
            }
            if outcome.is_ok() {
                outcome = store.poll().and_then(|()| store.advance());
            }
        };
        let name = |c: usize, wanted: &mut [u64], gates: &mut [f32], margins: &mut [f32]| {
            naming.part(c, wanted, gates, margins);
        };
        let pieces = clusters.div_ceil(GATE_PIECES * on.threads());
        {
            let lanes = Lanes {
                units: clusters,
                first: Lane::new(wanted, words),
                second: Lane::new(gates, CLUSTER * rows),
                third: Lane::new(margins, CLUSTER),
            };
            if overlaps {
                on.workers
                    .for_each_part_then(lanes, pieces, &name, &mut take);
            } else {
                let nothing = &mut |_, _: &[u64], _: &[f32], _: &[f32]| ();
                (on.workers).for_each_part_then(lanes, pieces, &name, nothing);
            }
        }
        if !overlaps {
            take(0, wanted, gates, margins);
        }
        outcome?;
        let spent = naming.spent.into_inner() / on.threads() as u64;
        counts.predict_ns += spent;
        counts.looked_at += naming.wanted.into_inner();
        if named {
            counts.bytes += (needed * gate_len) as u64;
        }
        self.oracle.keep(self.store.needed_of(unit), of.neurons);
        Ok(())
    }
}

/// The neurons, the first being `first`, that fire for some row, `gates [neurons × rows]` of a
/// cluster at most, and how many pairs do.
fn firing(first: usize, gates: &[f32], rows: usize) -> (Needed, u64) {
    // No jumps: whether a neuron fires cannot be foreseen.
    let (mut needed, mut count, mut pairs) = ([0u32; CLUSTER], 0, 0);
    for (n, gates) in (first..).zip(gates.chunks_exact(rows)) {
        let fires = gates.iter().filter(|&&g| g != 0.0).count();
        needed[count % CLUSTER] = n as u32;
        count += usize::from(fires > 0);
        pairs += fires as u64;
    }
    (needed[..count].iter().copied().collect(), pairs)
}
