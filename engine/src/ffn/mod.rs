//! The sparse FFN of one layer: which neurons, where their bytes are, the sums.
//!
//! Neurons are worked on in *clusters* of [`CLUSTER`] consecutive packed ids.
//! Each cluster sums its neurons into its own partial vector, ids ascending, and
//! the partials are added in cluster order. The order of every floating-point
//! sum is thus fixed by packed ids alone: threads, cache contents and the
//! arrival order of reads cannot change a bit of the result.
//!
//! `exact` and `dense` differ in what they skip, not in what they add: a neuron
//! whose gate does not fire contributes zeros in `dense` mode and nothing in
//! `exact` mode.

mod activation;
mod banks;
mod fill;
mod store;

use std::sync::atomic::{AtomicU64, Ordering};

use emberflow_kernels::{Cpu, Row, Workers};
use emberflow_models::config::FfnKind;
use emberflow_predictor::ActiveSet;

use crate::Error;
use crate::bundle::NeuronFormat;
use crate::counters::Counters;
use crate::scratch::with_thread_buffer;

pub(crate) use banks::Banks;
pub(crate) use store::NeuronStore;

/// Neurons per cluster.
pub const CLUSTER: usize = 64;

/// Bytes of partial sums that are filled before they are reduced.
const PARTIAL_BYTES: usize = 1 << 20;

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
}

/// The FFN of every layer, over a [`NeuronStore`].
pub(crate) struct Ffn {
    shape: FfnShape,
    pub store: NeuronStore,
    active: ActiveSet,
    /// Activated gates, `[neurons × tokens]`; used when Gate rows are resident.
    gates: Vec<f32>,
    partials: Vec<f32>,
    /// (neuron, token) pairs whose gate fired, and all of them.
    fired: u64,
    possible: u64,
}

impl Ffn {
    pub fn new(shape: FfnShape, store: NeuronStore, chunk: usize, threads: usize) -> Self {
        let (gates, partials) = buffer_lens(&shape, chunk, threads);
        Self {
            active: ActiveSet::with_capacity(shape.neurons),
            gates: vec![0.0; gates],
            partials: vec![0.0; partials],
            shape,
            store,
            fired: 0,
            possible: 0,
        }
    }

    /// Bytes that [`Ffn::new`] allocates.
    pub fn bytes_for(shape: &FfnShape, chunk: usize, threads: usize) -> u64 {
        let (gates, partials) = buffer_lens(shape, chunk, threads);
        4 * (gates + partials + 2 * shape.neurons) as u64
    }

    /// What was done since the FFN was made.
    pub fn counters(&self) -> Counters {
        Counters {
            fired: self.fired,
            possible: self.possible,
            ..self.store.counters()
        }
    }

    /// `out[t] = FFN(x[t])` for `tokens` rows of `[d_model]`.
    pub fn layer(
        &mut self,
        cpu: Cpu,
        workers: &Workers,
        bank: u32,
        x: &[f32],
        tokens: usize,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let FfnShape {
            format, neurons, ..
        } = self.shape;
        let d = format.d;
        let (x, out) = (&x[..tokens * d], &mut out[..tokens * d]);
        out.fill(0.0);

        let gates = &mut self.gates[..neurons * tokens];
        let gates_known = self.store.gates_resident();
        let mut fired = 0u64;
        if gates_known {
            gates_of_bank(
                cpu,
                workers,
                &self.shape,
                &self.store,
                bank,
                x,
                tokens,
                gates,
            );
            fired = self.active.fill_firing(gates, tokens) as u64;
        }
        if self.shape.dense || !gates_known {
            self.active.fill_all(neurons);
        }

        let ids = self.active.ids();
        let clusters = neurons.div_ceil(CLUSTER);
        let group = clusters_per_group(tokens, d, clusters, workers.threads());
        let fired_in_bundles = AtomicU64::new(0);
        self.store.begin(bank, ids)?;
        let mut done = 0;
        for first_cluster in (0..clusters).step_by(group) {
            let here = group.min(clusters - first_cluster);
            let partials = &mut self.partials[..here * tokens * d];
            partials.fill(0.0);
            let end = ids.partition_point(|&id| (id as usize) < (first_cluster + here) * CLUSTER);
            while done < end {
                self.store.issue(ids)?;
                let ready = self.store.wait(ids, end)?;
                if ready == done {
                    return Err(self.store.stuck());
                }
                let job = Job {
                    shape: &self.shape,
                    store: &self.store,
                    gates: gates_known.then_some(&*gates),
                    x,
                    tokens,
                };
                workers.for_each_chunk_mut(partials, tokens * d, &|_, c, partial| {
                    let low = (first_cluster + c) * CLUSTER;
                    let from = ids.partition_point(|&id| (id as usize) < low).max(done);
                    let to = ids
                        .partition_point(|&id| (id as usize) < low + CLUSTER)
                        .min(ready);
                    if from < to {
                        let n = job.cluster(cpu, &ids[from..to], from, partial);
                        fired_in_bundles.fetch_add(n, Ordering::Relaxed);
                    }
                });
                self.store.release(ids, ready);
                done = ready;
            }
            reduce(workers, partials, out);
        }
        if !gates_known {
            fired = fired_in_bundles.into_inner();
        }
        self.fired += fired;
        self.possible += (neurons * tokens) as u64;
        Ok(())
    }
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

/// Activated gates of a whole bank from its resident Gate rows,
/// `gates [neurons × tokens]`.
#[expect(clippy::too_many_arguments, reason = "a leaf with everything it reads")]
fn gates_of_bank(
    cpu: Cpu,
    workers: &Workers,
    shape: &FfnShape,
    store: &NeuronStore,
    bank: u32,
    x: &[f32],
    tokens: usize,
    gates: &mut [f32],
) {
    workers.for_each_chunk_mut(gates, CLUSTER * tokens, &|_, c, values| {
        for (i, values) in values.chunks_exact_mut(tokens).enumerate() {
            let row = store.resident_gate(bank, (c * CLUSTER + i) as u32);
            dots(cpu, row, x, values);
        }
        activation::apply(cpu, shape.kind.activation, values);
    });
}

/// `out[t] = row · x[t]`. A row used for several tokens is decoded once; the
/// values are the same because decoding is exact.
fn dots(cpu: Cpu, row: Row<'_>, x: &[f32], out: &mut [f32]) {
    if let [one] = out {
        *one = cpu.dot(row, x);
        return;
    }
    let d = x.len() / out.len();
    with_thread_buffer(d, |decoded| {
        cpu.dequantize(row, decoded);
        for (x, out) in x.chunks_exact(d).zip(out) {
            *out = cpu.dot_f32(decoded, x);
        }
    });
}

/// `y[t] += a[t] · row` for every `t`, or only where `a[t] ≠ 0`.
fn axpys(cpu: Cpu, row: Row<'_>, a: &[f32], skip_zeros: bool, y: &mut [f32]) {
    if let [a] = a {
        if *a != 0.0 || !skip_zeros {
            cpu.axpy(*a, row, y);
        }
        return;
    }
    let d = y.len() / a.len();
    with_thread_buffer(d, |decoded| {
        cpu.dequantize(row, decoded);
        for (&a, y) in a.iter().zip(y.chunks_exact_mut(d)) {
            if a != 0.0 || !skip_zeros {
                cpu.axpy(a, Row::f32(decoded), y);
            }
        }
    });
}

/// Longest chunk of tokens the FFN accepts (bounds the per-neuron stack buffers).
pub const MAX_CHUNK: usize = 64;

/// One parallel section: everything a cluster reads.
struct Job<'a> {
    shape: &'a FfnShape,
    store: &'a NeuronStore,
    gates: Option<&'a [f32]>,
    x: &'a [f32],
    tokens: usize,
}

impl Job<'_> {
    /// Adds the neurons `ids` (ascending; places `first..` of the layer's active
    /// set) to `partial`, `[tokens × d]`. Returns how many (neuron, token) pairs
    /// fired.
    fn cluster(&self, cpu: Cpu, ids: &[u32], first: usize, partial: &mut [f32]) -> u64 {
        let FfnShape {
            format,
            kind,
            dense,
            ..
        } = *self.shape;
        let tokens = self.tokens;
        let (mut gate_buffer, mut up_buffer) = ([0.0f32; MAX_CHUNK], [0.0f32; MAX_CHUNK]);
        let mut fired = 0;
        for (place, &id) in (first..).zip(ids) {
            let bytes = self.store.bytes(place, id);
            let gate = match self.gates {
                Some(all) => &all[id as usize * tokens..][..tokens],
                None => {
                    let values = &mut gate_buffer[..tokens];
                    dots(cpu, format.gate(bytes.gate, bytes.scales), self.x, values);
                    activation::apply(cpu, kind.activation, values);
                    values
                }
            };
            let firing = gate.iter().filter(|&&g| g != 0.0).count();
            fired += firing as u64;
            if firing == 0 && !dense {
                continue;
            }
            let hidden = &mut up_buffer[..tokens];
            dots(cpu, format.up(bytes.rest, bytes.scales), self.x, hidden);
            for (h, g) in hidden.iter_mut().zip(gate) {
                let up = if kind.relu_on_up { h.max(0.0) } else { *h };
                *h = g * up;
            }
            if dense || hidden.iter().any(|&h| h != 0.0) {
                axpys(
                    cpu,
                    format.down(bytes.rest, bytes.scales),
                    hidden,
                    !dense,
                    partial,
                );
            }
        }
        fired
    }
}

/// `out += partials[0] + partials[1] + …`, in that order for every element.
fn reduce(workers: &Workers, partials: &[f32], out: &mut [f32]) {
    const PIECE: usize = 1024;
    let width = out.len();
    workers.for_each_chunk_mut(out, PIECE, &|_, piece, out| {
        for partial in partials.chunks_exact(width) {
            let part = &partial[piece * PIECE..][..out.len()];
            for (y, p) in out.iter_mut().zip(part) {
                *y += p;
            }
        }
    });
}
