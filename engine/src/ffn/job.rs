//! The arithmetic of one cluster: what a compute thread does with its bytes.

use std::ops::Range;
use std::sync::Mutex;

use arrayvec::ArrayVec;
use emberflow_kernels::{Columns, Cpu, Row};

use super::record::{ClusterRecord, keep};
use super::resident::Resident;
use super::store::{NeuronBytes, NeuronStore};
use super::{CLUSTER, FfnShape, activation};
use crate::input::Input;
use crate::scratch::with_thread_buffer;
use crate::trace;
use crate::weights::Matrix;

/// Floats of a thread's buffer for chunks of `tokens` tokens of `d` elements.
pub(crate) fn thread_floats(d: usize, tokens: usize) -> usize {
    2 * CLUSTER * tokens + products_floats(d, tokens)
}

/// Floats of working memory that [`products`] needs.
fn products_floats(d: usize, tokens: usize) -> usize {
    CLUSTER * tokens + Matrix::scratch_len(d).max(d)
}

/// Activated gates of the neurons from `first` on, from resident Gate rows;
/// `gates [neurons × tokens]`, at most a cluster.
pub(super) fn resident_gates(
    cpu: Cpu,
    shape: &FfnShape,
    resident: &Resident,
    bank: u32,
    first: usize,
    input: Input<'_>,
    gates: &mut [f32],
) {
    let tokens = input.tokens();
    match resident.gates(bank) {
        // One forward stream, a tenth faster than a list of rows.
        Some((bytes, stride)) if tokens == 1 && shape.format.dtype.is_grouped() => {
            let bytes = &bytes[first * stride..(first + gates.len()) * stride];
            cpu.matvec_q(shape.format.dtype, bytes, stride, input.quantized, gates);
        }
        _ => {
            let ids = first..first + gates.len() / tokens;
            let row = |id: usize| resident.gate(bank, id as u32);
            let rows: ArrayVec<Row<'_>, CLUSTER> = ids.map(row).collect();
            with_thread_buffer(products_floats(input.n(), tokens), |memory| {
                products(cpu, &rows, input, gates, memory);
            });
        }
    }
    activation::apply(cpu, shape, gates);
}

/// As [`resident_gates`] of any number of neurons, where `gates` holds 1 for the (neuron,
/// token) pairs that are wanted and 0 for the others, whose gates become zero.
pub(super) fn wanted_gates(
    cpu: Cpu,
    shape: &FfnShape,
    resident: &Resident,
    bank: u32,
    first: usize,
    input: Input<'_>,
    gates: &mut [f32],
) {
    let tokens = input.tokens();
    let values_len = CLUSTER * tokens;
    let mut wanted = (0..gates.len() / tokens).peekable();
    with_thread_buffer(values_len + products_floats(input.n(), tokens), |memory| {
        let (values, memory) = memory.split_at_mut(values_len);
        while wanted.peek().is_some() {
            let mut rows = ArrayVec::<Row<'_>, CLUSTER>::new_const();
            let mut at = ArrayVec::<usize, CLUSTER>::new_const();
            for i in wanted.by_ref() {
                if gates[i * tokens..(i + 1) * tokens].contains(&1.0) {
                    rows.push(resident.gate(bank, (first + i) as u32));
                    at.push(i);
                    if rows.is_full() {
                        break;
                    }
                }
            }
            let values = &mut values[..rows.len() * tokens];
            products(cpu, &rows, input, values, memory);
            activation::apply(cpu, shape, values);
            for (i, values) in at.into_iter().zip(values.chunks_exact_mut(tokens)) {
                let wanted = &mut gates[i * tokens..][..tokens];
                keep_wanted(values, wanted);
                wanted.copy_from_slice(values);
            }
        }
    });
}

/// Sets to zero what is not wanted.
fn keep_wanted(gates: &mut [f32], wanted: &[f32]) {
    for (gate, wanted) in gates.iter_mut().zip(wanted) {
        if *wanted == 0.0 {
            *gate = 0.0;
        }
    }
}

/// Activated gates of the needed neurons of cluster `c` from their bundles; `gates` holds
/// 1 for the (neuron, token) pairs that are wanted and 0 for the others, whose gates
/// become zero.
pub(super) fn gates_from_bundles(
    cpu: Cpu,
    shape: &FfnShape,
    store: &NeuronStore,
    c: u32,
    ids: &[u32],
    input: Input<'_>,
    gates: &mut [f32],
) {
    let _span = store.trace_cluster(&trace::GATE, c as usize);
    let tokens = input.tokens();
    let mut places = store.places(c).peekable();
    let numbers = 0..gates.len() / tokens;
    with_thread_buffer(tokens + products_floats(input.n(), tokens), |memory| {
        let (values, memory) = memory.split_at_mut(tokens);
        for (number, gates) in numbers.zip(gates.chunks_exact_mut(tokens)) {
            let here = |&place: &usize| ids[place] as usize % CLUSTER == number;
            let bytes = places
                .next_if(here)
                .and_then(|place| store.bytes(place, ids[place]));
            let Some(bytes) = bytes else {
                gates.fill(0.0);
                continue;
            };
            let row = shape.format.gate(bytes.gate, bytes.scales);
            products(cpu, &[row], input, values, memory);
            activation::apply(cpu, shape, values);
            keep_wanted(values, gates);
            gates.copy_from_slice(values);
        }
    });
}

/// What was done.
#[derive(Default)]
pub(super) struct Done {
    /// (neuron, token) pairs that fired, where that was not known before.
    pub fired: u64,
    /// Neurons whose Up and Down were computed.
    pub neurons: u64,
}

/// One parallel section: everything that clusters read.
pub(super) struct Job<'a> {
    pub shape: &'a FfnShape,
    pub store: &'a NeuronStore,
    /// Activated gates, `[neurons × tokens]`, of the clusters where the store
    /// says that they are known.
    pub gates: &'a [f32],
    /// Where they are not known `gates` holds 1 for wanted pairs and 0 for others.
    pub named: bool,
    pub ids: &'a [u32],
    pub input: Input<'a>,
}

/// The rows of some clusters, at most as many as one cluster can have: memory is kept busy
/// by long lists, and few neurons of a cluster may be needed.
struct Batch<'r> {
    ups: Rows<'r>,
    downs: Rows<'r>,
    /// Numbers of the clusters, and where the rows of each end.
    clusters: ArrayVec<(u32, usize), CLUSTER>,
}

impl Batch<'_> {
    fn new() -> Self {
        Self {
            ups: Rows::new(),
            downs: Rows::new(),
            clusters: ArrayVec::new_const(),
        }
    }
}

impl Job<'_> {
    /// Sums the needed neurons of each of `clusters` into its part of `partials`,
    /// `[clusters from first on × tokens × d]`. Gates and hidden values go to `records`, if
    /// there are some.
    pub fn clusters(
        &self,
        cpu: Cpu,
        first: u32,
        clusters: impl Iterator<Item = u32>,
        partials: &mut [f32],
        records: &[Mutex<ClusterRecord<'_>>],
    ) -> Done {
        let mut done = Done::default();
        let mut clusters = clusters.peekable();
        let (n, tokens) = (self.input.n(), self.input.tokens());
        with_thread_buffer(thread_floats(n, tokens), |memory| {
            let (gates, memory) = memory.split_at_mut(CLUSTER * tokens);
            let (hidden, memory) = memory.split_at_mut(CLUSTER * tokens);
            while let Some(&start) = clusters.peek() {
                let mut batch = Batch::new();
                let known = self.store.gates_known(start);
                let mut rows = 0;
                let fits = |&c: &u32| {
                    rows += self.store.places(c).len();
                    rows <= CLUSTER && self.store.gates_known(c) == known
                };
                let these: ArrayVec<u32, CLUSTER> = std::iter::from_fn({
                    let mut fits = fits;
                    let clusters = &mut clusters;
                    move || clusters.next_if(|c| fits(c))
                })
                .take(CLUSTER)
                .collect();
                if known {
                    self.known_gates(&these, gates, &mut batch);
                } else {
                    done.fired += self.own_gates(cpu, &these, gates, &mut batch, memory);
                }
                done.neurons += batch.ups.len() as u64;
                let hidden = &mut hidden[..batch.ups.len() * tokens];
                self.hidden(cpu, start, &batch, gates, hidden, memory);
                let mut from = 0;
                for &(c, end) in &batch.clusters {
                    let at = (c - first) as usize;
                    let partial = &mut partials[at * tokens * n..(at + 1) * tokens * n];
                    let values = from * tokens..end * tokens;
                    if let Some(record) = records.get(at) {
                        let ids = batch.ups.ids(from..end);
                        let gates = &gates[values.clone()];
                        keep(record, ids, tokens, gates, &hidden[values.clone()]);
                    }
                    let rows = from..end;
                    self.sum(cpu, c, &mut batch.downs, rows, &mut hidden[values], partial);
                    from = end;
                }
            }
        });
        done
    }

    /// Hidden values of a batch: gates times Ups.
    fn hidden(
        &self,
        cpu: Cpu,
        start: u32,
        batch: &Batch<'_>,
        gates: &[f32],
        hidden: &mut [f32],
        memory: &mut [f32],
    ) {
        let _span = self.store.trace_cluster(&trace::UP, start as usize);
        products(cpu, batch.ups.list(), self.input, hidden, memory);
        for (h, g) in hidden.iter_mut().zip(gates) {
            let up = if self.shape.kind.relu_on_up {
                h.max(0.0)
            } else {
                *h
            };
            *h = g * up;
        }
    }

    /// Sums the Downs of cluster `c`, which are `rows` of `downs`, into `partial`.
    fn sum(
        &self,
        cpu: Cpu,
        c: u32,
        downs: &mut Rows<'_>,
        rows: Range<usize>,
        hidden: &mut [f32],
        partial: &mut [f32],
    ) {
        let _span = self.store.trace_cluster(&trace::DOWN, c as usize);
        let tokens = self.input.tokens();
        if tokens > 1 {
            partial.fill(0.0);
            cpu.axpy_rows_tokens(hidden, &downs.list()[rows], tokens, partial);
            return;
        }
        // With a ReLU on Up too, some gates fire for nothing.
        let kept = if self.shape.dense {
            hidden.len()
        } else {
            downs.keep_if_not_zero(rows.start, hidden)
        };
        let downs = &downs.list()[rows][..kept];
        cpu.sum_rows(&hidden[..kept], downs, partial);
    }

    /// Collects the rows of the neurons that are there, and their gates.
    fn known_gates<'r>(&'r self, clusters: &[u32], gates: &mut [f32], batch: &mut Batch<'r>) {
        let (format, tokens) = (self.shape.format, self.input.tokens());
        let mut to = gates.chunks_exact_mut(tokens);
        for &c in clusters {
            self.store.touch(self.store.places(c));
            for place in self.store.places(c) {
                let id = self.ids[place];
                let Some(bytes) = self.store.bytes(place, id) else {
                    continue;
                };
                let gate = &self.gates[id as usize * tokens..][..tokens];
                // Neurons that were read because others of their kind fire.
                if !self.shape.dense && gate.iter().all(|&g| g == 0.0) {
                    continue;
                }
                batch.ups.push(id, format.up(bytes.up, bytes.scales));
                batch.downs.push(id, format.down(bytes.down, bytes.scales));
                if let Some(to) = to.next() {
                    to.copy_from_slice(gate);
                }
            }
            batch.clusters.push((c, batch.ups.len()));
        }
    }

    /// Computes the gates, and collects the rows of the neurons that fire.
    fn own_gates<'r>(
        &'r self,
        cpu: Cpu,
        clusters: &[u32],
        gates: &mut [f32],
        batch: &mut Batch<'r>,
        memory: &mut [f32],
    ) -> u64 {
        let (format, tokens) = (self.shape.format, self.input.tokens());
        let mut rows = Rows::new();
        let mut rest: ArrayVec<NeuronBytes<'r>, CLUSTER> = ArrayVec::new_const();
        let mut ends: ArrayVec<usize, CLUSTER> = ArrayVec::new_const();
        for &c in clusters {
            self.store.touch(self.store.places(c));
            for place in self.store.places(c) {
                let id = self.ids[place];
                if let Some(bytes) = self.store.bytes(place, id) {
                    rows.push(id, format.gate(bytes.gate, bytes.scales));
                    rest.push(bytes);
                }
            }
            ends.push(rows.len());
        }
        let gates = &mut gates[..rows.len() * tokens];
        let first = clusters.first().map_or(0, |&c| c as usize);
        let span = self.store.trace_cluster(&trace::GATE, first);
        products(cpu, rows.list(), self.input, gates, memory);
        activation::apply(cpu, self.shape, gates);
        drop(span);
        let (mut fired, mut row) = (0, 0);
        for (&c, end) in clusters.iter().zip(ends) {
            for bytes in &rest[row..end] {
                let id = c * CLUSTER as u32 + u32::from(rows.ids[row]);
                let gate = &mut gates[row * tokens..(row + 1) * tokens];
                if self.named {
                    keep_wanted(gate, &self.gates[id as usize * tokens..][..tokens]);
                }
                let firing = gate.iter().filter(|&&g| g != 0.0).count();
                fired += firing as u64;
                if firing > 0 || self.shape.dense {
                    // `ups` has at most `row` rows: the gates move down.
                    let to = batch.ups.len() * tokens;
                    gates.copy_within(row * tokens..(row + 1) * tokens, to);
                    batch.ups.push(id, format.up(bytes.up, bytes.scales));
                    batch.downs.push(id, format.down(bytes.down, bytes.scales));
                }
                row += 1;
            }
            batch.clusters.push((c, batch.ups.len()));
        }
        fired
    }
}

/// Rows of as many neurons as a cluster can have, on the stack.
struct Rows<'a> {
    rows: ArrayVec<Row<'a>, CLUSTER>,
    /// Numbers of their neurons inside their clusters.
    ids: ArrayVec<u8, CLUSTER>,
}

impl<'a> Rows<'a> {
    fn new() -> Self {
        Self {
            rows: ArrayVec::new_const(),
            ids: ArrayVec::new_const(),
        }
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn push(&mut self, neuron: u32, row: Row<'a>) {
        self.rows.push(row);
        self.ids.push((neuron as usize % CLUSTER) as u8);
    }

    fn ids(&self, rows: Range<usize>) -> impl Iterator<Item = usize> {
        self.ids[rows].iter().map(|&id| usize::from(id))
    }

    /// Of the rows from `first` on that `factors` belong to, moves those with a factor that
    /// is not zero to the front, and the factors with them; returns how many there are.
    fn keep_if_not_zero(&mut self, first: usize, factors: &mut [f32]) -> usize {
        let mut kept = 0;
        for i in 0..factors.len() {
            if factors[i] != 0.0 {
                factors[kept] = factors[i];
                self.rows[first + kept] = self.rows[first + i];
                kept += 1;
            }
        }
        kept
    }

    fn list(&self) -> &[Row<'a>] {
        &self.rows
    }
}

/// `out[r × tokens + t] = rows[r] · token t`, with [`products_floats`] of working
/// memory. A product does not depend on what else is computed with it.
fn products(cpu: Cpu, rows: &[Row<'_>], input: Input<'_>, out: &mut [f32], memory: &mut [f32]) {
    let tokens = input.tokens();
    let Some(first) = rows.first() else { return };
    match (first.dtype().is_grouped(), tokens) {
        (true, 1) => cpu.dot_rows_q(rows, input.quantized, out),
        (true, _) => {
            let (by_token, memory) = memory.split_at_mut(CLUSTER * tokens);
            let mut y = Columns::new(by_token, tokens, rows.len(), rows.len());
            cpu.matmul_rows_q(rows, input.quantized, &mut y, memory);
            for (r, out) in out.chunks_exact_mut(tokens).enumerate() {
                for (t, out) in out.iter_mut().enumerate() {
                    *out = by_token[t * rows.len() + r];
                }
            }
        }
        (false, 1) => {
            for (row, out) in rows.iter().zip(out) {
                *out = cpu.dot(*row, input.x);
            }
        }
        (false, _) => {
            // A row used for several tokens is decoded once, which is exact.
            let decoded = &mut memory[..input.n()];
            for (row, out) in rows.iter().zip(out.chunks_exact_mut(tokens)) {
                cpu.dequantize(*row, decoded);
                for (x, out) in input.x.chunks_exact(input.n()).zip(out) {
                    *out = cpu.dot_f32(decoded, x);
                }
            }
        }
    }
}
