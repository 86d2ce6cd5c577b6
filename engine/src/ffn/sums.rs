//! The arithmetic of ready clusters on a compute thread.

use std::ops::Range;
use std::sync::Mutex;

use arrayvec::ArrayVec;
use emberflow_kernels::Cpu;

use super::gates::add_bias;
use super::mask;
use super::products::{RowList, WantedPairs, products, products_floats};
use super::seen::{ClusterRecord, keep};
use super::shape::FfnShape;
use super::units::Bias;
use crate::activation::{Gating, of_up};
use crate::bundle::across;
use crate::cluster::CLUSTER;
use crate::input::Input;
use crate::store::{ClusterBytes, NeuronBytes, NeuronStore};
use crate::thread_buffer::with_thread_buffer;
use crate::trace;

/// Floats of a thread's buffer for chunks of `tokens` tokens of `d` elements.
pub(crate) fn thread_floats(d: usize, tokens: usize) -> usize {
    2 * CLUSTER * tokens + products_floats(d, tokens)
}

/// Counters of a job.
#[derive(Default)]
pub(super) struct Done {
    /// (neuron, token) pairs that fired, where this job computed the gates.
    pub fired: u64,
    /// Neurons whose Up and Down were computed.
    pub neurons: u64,
}

/// Shared read-only state of one unit's clusters.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub cpu: Cpu,
    pub shape: &'a FfnShape,
    pub gating: Gating,
    /// As in [`GateWork`](super::gates::GateWork).
    pub cutoffs: &'a [f32],
    pub store: &'a NeuronStore,
    pub input: Input<'a>,
    pub bias: Bias<'a>,
    /// Activated gates, `[neurons × tokens]`, valid for clusters with known gates.
    pub gates: &'a [f32],
    /// Hidden values that a lane has computed, `[neurons × tokens]`: only Down is missing.
    pub hidden: Option<&'a [f32]>,
    /// For the other clusters: mask of the wanted pairs, or `None` for all.
    pub wanted: Option<&'a [u64]>,
}

/// Rows of several clusters, up to [`CLUSTER`] in all: a cluster may need few neurons, and long
/// lists keep the memory bus busy.
struct Batch<'r> {
    ups: RowList<'r>,
    downs: RowList<'r>,
    /// Items, and the end of each item's rows.
    items: ArrayVec<(usize, usize), CLUSTER>,
}

impl Batch<'_> {
    fn new() -> Self {
        Self {
            ups: RowList::new(),
            downs: RowList::new(),
            items: ArrayVec::new_const(),
        }
    }
}

impl<'a> Job<'a> {
    /// Sums the needed neurons of each of the unit's `items` into its part of `partials`,
    /// `[items from first on × tokens × d]`. Stores gates and hidden values in `records`, if any.
    pub fn sum(
        &self,
        first: usize,
        items: impl Iterator<Item = usize>,
        partials: &mut [f32],
        records: &[Mutex<ClusterRecord<'_>>],
    ) -> Done {
        let mut done = Done::default();
        let mut items = items
            .map(|item| (item, self.store.cluster(item)))
            .peekable();
        let (n, tokens) = (self.input.n(), self.input.tokens());
        with_thread_buffer(thread_floats(n, tokens), |memory| {
            let (gates, memory) = memory.split_at_mut(CLUSTER * tokens);
            let (hidden, memory) = memory.split_at_mut(CLUSTER * tokens);
            while let Some(&(_, start)) = items.peek() {
                let mut rows = 0;
                let mut fits = |(_, cluster): &(usize, ClusterBytes<'a>)| {
                    rows += cluster.ids().len();
                    rows <= CLUSTER && cluster.gates_known == start.gates_known
                };
                let mut these = ArrayVec::<(usize, ClusterBytes<'a>), CLUSTER>::new_const();
                while let Some(next) = items.next_if(&mut fits) {
                    these.push(next);
                    if these.is_full() {
                        break;
                    }
                }
                let mut batch = Batch::new();
                if let Some(known) = self.hidden {
                    self.known_values(known, &these, hidden, &mut batch);
                } else if start.gates_known {
                    self.known_values(self.gates, &these, gates, &mut batch);
                } else {
                    done.fired += self.own_gates(&these, gates, &mut batch, memory);
                }
                done.neurons += batch.ups.len() as u64;
                let hidden = &mut hidden[..batch.ups.len() * tokens];
                if self.hidden.is_none() {
                    self.hidden(&these, &batch, gates, hidden, memory);
                }
                let mut from = 0;
                for (&(item, end), (_, cluster)) in batch.items.iter().zip(&these) {
                    let at = item - first;
                    let partial = &mut partials[at * tokens * n..(at + 1) * tokens * n];
                    let values = from * tokens..end * tokens;
                    if let Some(record) = records.get(at) {
                        let ids = batch.ups.ids(from..end);
                        let gates = &gates[values.clone()];
                        keep(record, ids, tokens, gates, &hidden[values.clone()]);
                    }
                    let hidden = &mut hidden[values];
                    self.down(
                        cluster,
                        &mut batch.downs,
                        from..end,
                        hidden,
                        memory,
                        partial,
                    );
                    from = end;
                }
            }
        });
        done
    }

    /// Hidden values of a batch: `gate × up`, or the gates where there is no Up.
    fn hidden(
        &self,
        clusters: &[(usize, ClusterBytes<'_>)],
        batch: &Batch<'_>,
        gates: &[f32],
        hidden: &mut [f32],
        memory: &mut [f32],
    ) {
        if self.shape.kind.ungated {
            hidden.copy_from_slice(&gates[..hidden.len()]);
            return;
        }
        let _span = clusters.first().and_then(|(_, c)| c.trace(&trace::UP));
        let (rows, tokens) = (batch.ups.list(), self.input.tokens());
        let mut firing = WantedPairs::new(tokens, !self.shape.dense);
        for gates in gates.chunks_exact(tokens).take(rows.len()) {
            firing.push(|t| gates[t] != 0.0);
        }
        products(self.cpu, rows, self.input, &firing, hidden, memory);
        self.add_biases(
            self.bias.up,
            clusters,
            &batch.ups,
            batch.items.iter().map(|item| item.1),
            hidden,
        );
        for (h, g) in hidden.iter_mut().zip(gates) {
            *h = g * of_up(self.shape.kind, *h);
        }
    }

    /// Adds the bias of each row's neuron, if any, to its `values`, `[rows × tokens]`; `ends` has the
    /// end of each cluster's rows.
    fn add_biases(
        &self,
        bias: &[f32],
        clusters: &[(usize, ClusterBytes<'_>)],
        rows: &RowList<'_>,
        ends: impl Iterator<Item = usize>,
        values: &mut [f32],
    ) {
        if bias.is_empty() {
            return;
        }
        let mut values = values.chunks_exact_mut(self.input.tokens());
        let mut from = 0;
        for ((_, cluster), end) in clusters.iter().zip(ends) {
            let of_cluster = &bias[cluster.cluster() as usize * CLUSTER..];
            for (id, values) in rows.ids(from..end).zip(&mut values) {
                add_bias(&of_cluster[id..=id], values);
            }
            from = end;
        }
    }

    /// Sums a cluster's Down rows, `rows` of `downs`, into `partial`.
    fn down(
        &self,
        cluster: &ClusterBytes<'_>,
        downs: &mut RowList<'_>,
        rows: Range<usize>,
        hidden: &mut [f32],
        memory: &mut [f32],
        partial: &mut [f32],
    ) {
        let _span = cluster.trace(&trace::DOWN);
        if self.shape.format.is_across() {
            let (rows, tokens) = (&downs.list()[rows], self.input.tokens());
            across::sum(self.cpu, hidden, rows, tokens, memory, partial);
        } else {
            self.sum_downs(downs, rows, hidden, partial)
        }
    }

    /// [`Job::down`] for vectors with their own scales.
    fn sum_downs(
        &self,
        downs: &mut RowList<'_>,
        rows: Range<usize>,
        hidden: &mut [f32],
        partial: &mut [f32],
    ) {
        let tokens = self.input.tokens();
        if tokens > 1 {
            (self.cpu).sum_rows_tokens(hidden, &downs.list()[rows], tokens, partial);
            return;
        }
        // With a ReLU on Up, a firing gate can yield zero.
        let kept = if self.shape.dense {
            hidden.len()
        } else {
            downs.keep_if_not_zero(rows.start, hidden)
        };
        let downs = &downs.list()[rows][..kept];
        self.cpu.sum_rows(&hidden[..kept], downs, partial);
    }

    /// Appends a neuron's rows. Without Up, the list of Ups contains its Down row, which is then
    /// not multiplied.
    fn push(&self, batch: &mut Batch<'a>, neuron: u32, bytes: NeuronBytes<'a>) {
        let format = self.shape.format;
        let down = format.down(bytes.down, bytes.scales);
        let up = if format.ungated {
            down
        } else {
            format.up(bytes.up, bytes.scales)
        };
        batch.ups.push(neuron, up);
        batch.downs.push(neuron, down);
    }

    /// Collects the rows of the cluster's resident neurons, with their gates or hidden values out of `known`.
    fn known_values(
        &self,
        known: &[f32],
        clusters: &[(usize, ClusterBytes<'a>)],
        values: &mut [f32],
        batch: &mut Batch<'a>,
    ) {
        let tokens = self.input.tokens();
        let mut to = values.chunks_exact_mut(tokens);
        for (item, cluster) in clusters {
            cluster.touch();
            for (i, &id) in cluster.ids().iter().enumerate() {
                let Some(bytes) = cluster.neuron(i) else {
                    continue;
                };
                let value = &known[id as usize * tokens..][..tokens];
                // Resident, but its gate does not fire.
                if !self.shape.dense && value.iter().all(|&v| v == 0.0) {
                    continue;
                }
                self.push(batch, id, bytes);
                if let Some(to) = to.next() {
                    to.copy_from_slice(value);
                }
            }
            batch.items.push((*item, batch.ups.len()));
        }
    }

    /// Computes the gates and collects the rows of firing neurons. Returns the number of firing
    /// pairs.
    fn own_gates(
        &self,
        clusters: &[(usize, ClusterBytes<'a>)],
        gates: &mut [f32],
        batch: &mut Batch<'a>,
        memory: &mut [f32],
    ) -> u64 {
        let (format, tokens, dense) = (self.shape.format, self.input.tokens(), self.shape.dense);
        let mut rows = RowList::new();
        // Gates of neurons that may not fire.
        let mut rest: ArrayVec<NeuronBytes<'a>, CLUSTER> = ArrayVec::new_const();
        let mut ends: ArrayVec<usize, CLUSTER> = ArrayVec::new_const();
        let mut pairs = WantedPairs::new(tokens, self.wanted.is_some());
        for (_, cluster) in clusters {
            cluster.touch();
            let wanted = self.wanted_of(cluster.cluster());
            for (i, &id) in cluster.ids().iter().enumerate() {
                if let Some(bytes) = cluster.neuron(i) {
                    rows.push(id, format.gate(bytes.gate, bytes.scales));
                    if dense {
                        self.push(batch, id, bytes)
                    } else {
                        rest.push(bytes)
                    }
                    if let Some(wanted) = wanted {
                        pairs.push(|t| mask::has(wanted, tokens, id as usize % CLUSTER, t));
                    }
                }
            }
            ends.push(rows.len());
        }
        let gates = &mut gates[..rows.len() * tokens];
        let span = clusters.first().and_then(|(_, c)| c.trace(&trace::GATE));
        products(self.cpu, rows.list(), self.input, &pairs, gates, memory);
        self.add_biases(self.bias.gate, clusters, &rows, ends.iter().copied(), gates);
        self.gating.apply(self.cpu, self.cutoffs, gates);
        drop(span);
        let (mut fired, mut row) = (0, 0);
        for ((item, cluster), end) in clusters.iter().zip(ends) {
            let words = self.wanted_of(cluster.cluster());
            for row in row..end {
                let n = rows.id(row);
                let gate = &mut gates[row * tokens..(row + 1) * tokens];
                if let Some(words) = words {
                    mask::keep_wanted(words, n, gate);
                }
                let firing = gate.iter().filter(|&&g| g != 0.0).count();
                fired += firing as u64;
                if firing > 0 && !dense {
                    // In place: `ups` has at most `row` rows.
                    let to = batch.ups.len() * tokens;
                    gates.copy_within(row * tokens..(row + 1) * tokens, to);
                    self.push(batch, n as u32, rest[row]);
                }
            }
            row = end;
            batch
                .items
                .push((*item, if dense { end } else { batch.ups.len() }));
        }
        fired
    }

    /// A cluster's mask; `None` if all pairs are wanted.
    fn wanted_of(&self, cluster: u32) -> Option<&'a [u64]> {
        let words = mask::words(self.input.tokens());
        Some(&self.wanted?[cluster as usize * words..][..words])
    }
}
