//! The arithmetic of one cluster: what a compute thread does with its bytes.

use emberflow_kernels::{Columns, Cpu, DType, Row, prefetch};

use std::sync::Mutex;

use super::record::{ClusterRecord, keep};
use super::store::NeuronStore;
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
    store: &NeuronStore,
    bank: u32,
    first: usize,
    input: Input<'_>,
    gates: &mut [f32],
) {
    let _span = store.trace_cluster(&trace::GATE, first / CLUSTER);
    let tokens = input.tokens();
    match store.resident_gates(bank) {
        // One forward stream, a tenth faster than a list of rows.
        Some((bytes, stride)) if tokens == 1 && shape.format.dtype.is_grouped() => {
            let bytes = &bytes[first * stride..(first + gates.len()) * stride];
            cpu.matvec_q(shape.format.dtype, bytes, stride, input.quantized, gates);
        }
        _ => {
            let mut rows = Rows::new();
            for i in 0..gates.len() / tokens {
                let id = (first + i) as u32;
                rows.push(id, store.resident_gate(bank, id));
            }
            with_thread_buffer(products_floats(input.n(), tokens), |memory| {
                products(cpu, rows.list(), input, gates, memory);
            });
        }
    }
    activation::apply(cpu, shape, gates);
}

/// As [`resident_gates`] of a whole cluster, where `gates` holds 1 for the (neuron, token) pairs that are
/// wanted and 0 for the others, whose gates become zero.
pub(super) fn wanted_gates(
    cpu: Cpu,
    shape: &FfnShape,
    store: &NeuronStore,
    bank: u32,
    first: usize,
    input: Input<'_>,
    gates: &mut [f32],
) {
    let tokens = input.tokens();
    let mut rows = Rows::new();
    for (i, wanted) in gates.chunks_exact(tokens).enumerate() {
        if wanted.contains(&1.0) {
            let id = (first + i) as u32;
            rows.push(id, store.resident_gate(bank, id));
        }
    }
    let values_len = CLUSTER * tokens;
    with_thread_buffer(values_len + products_floats(input.n(), tokens), |memory| {
        let (values, memory) = memory.split_at_mut(values_len);
        let values = &mut values[..rows.len * tokens];
        products(cpu, rows.list(), input, values, memory);
        activation::apply(cpu, shape, values);
        for (id, values) in rows.ids().zip(values.chunks_exact_mut(tokens)) {
            let wanted = &mut gates[id * tokens..][..tokens];
            keep_wanted(values, wanted);
            wanted.copy_from_slice(values);
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

/// What was done for a cluster.
pub(super) struct Done {
    /// (neuron, token) pairs that fired, where that was not known before.
    pub fired: u64,
    /// Neurons whose Up and Down were computed.
    pub neurons: u64,
}

/// One parallel section: everything a cluster reads.
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

impl Job<'_> {
    /// Sums the needed neurons of cluster `c` into `partial`, `[tokens × d]`.
    /// Gates and hidden values go to `record`, if there is one.
    pub fn cluster(
        &self,
        cpu: Cpu,
        c: u32,
        partial: &mut [f32],
        record: Option<&Mutex<ClusterRecord<'_>>>,
    ) -> Done {
        let _span = self.store.trace_cluster(&trace::UP_DOWN, c as usize);
        partial.fill(0.0);
        let (n, tokens) = (self.input.n(), self.input.tokens());
        with_thread_buffer(thread_floats(n, tokens), |memory| {
            let (gates, memory) = memory.split_at_mut(CLUSTER * tokens);
            let (hidden, memory) = memory.split_at_mut(CLUSTER * tokens);
            let mut ups = Rows::new();
            let mut downs = Rows::new();
            let fired = if self.store.gates_known(c) {
                self.known_gates(c, gates, &mut ups, &mut downs);
                0
            } else {
                self.own_gates(cpu, c, gates, &mut ups, &mut downs, memory)
            };
            let neurons = ups.len as u64;
            let hidden = &mut hidden[..ups.len * tokens];
            products(cpu, ups.list(), self.input, hidden, memory);
            for (h, g) in hidden.iter_mut().zip(&*gates) {
                let up = if self.shape.kind.relu_on_up {
                    h.max(0.0)
                } else {
                    *h
                };
                *h = g * up;
            }
            if let Some(record) = record {
                keep(record, ups.ids(), tokens, gates, hidden);
            }
            if tokens == 1 {
                // With a ReLU on Up too, some gates fire for nothing.
                let kept = if self.shape.dense {
                    hidden.len()
                } else {
                    downs.keep_if_not_zero(hidden)
                };
                cpu.axpy_rows(&hidden[..kept], &downs.list()[..kept], partial);
            } else {
                cpu.axpy_rows_tokens(hidden, downs.list(), tokens, partial);
            }
            Done { fired, neurons }
        })
    }

    /// Collects the rows of the neurons that are there, and their gates.
    fn known_gates<'r>(
        &'r self,
        c: u32,
        gates: &mut [f32],
        ups: &mut Rows<'r>,
        downs: &mut Rows<'r>,
    ) {
        let (format, tokens) = (self.shape.format, self.input.tokens());
        let mut to = gates.chunks_exact_mut(tokens);
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
            if ups.len < FIRST {
                prefetch(bytes.up);
            }
            ups.push(id, format.up(bytes.up, bytes.scales));
            downs.push(id, format.down(bytes.down, bytes.scales));
            if let Some(to) = to.next() {
                to.copy_from_slice(gate);
            }
        }
    }

    /// Computes the gates, and collects the rows of the neurons that fire.
    fn own_gates<'r>(
        &'r self,
        cpu: Cpu,
        c: u32,
        gates: &mut [f32],
        ups: &mut Rows<'r>,
        downs: &mut Rows<'r>,
        memory: &mut [f32],
    ) -> u64 {
        let (format, tokens) = (self.shape.format, self.input.tokens());
        let mut rows = Rows::new();
        for place in self.store.places(c) {
            let id = self.ids[place];
            if let Some(bytes) = self.store.bytes(place, id) {
                rows.push(id, format.gate(bytes.gate, bytes.scales));
            }
        }
        let gates = &mut gates[..rows.len * tokens];
        products(cpu, rows.list(), self.input, gates, memory);
        activation::apply(cpu, self.shape, gates);
        let (mut fired, mut row) = (0, 0);
        for place in self.store.places(c) {
            let id = self.ids[place];
            let Some(bytes) = self.store.bytes(place, id) else {
                continue;
            };
            let gate = &mut gates[row * tokens..(row + 1) * tokens];
            if self.named {
                keep_wanted(gate, &self.gates[id as usize * tokens..][..tokens]);
            }
            let firing = gate.iter().filter(|&&g| g != 0.0).count();
            fired += firing as u64;
            if firing > 0 || self.shape.dense {
                // `ups.len` is at most `row`: the gates move down.
                let to = ups.len * tokens;
                gates.copy_within(row * tokens..(row + 1) * tokens, to);
                ups.push(id, format.up(bytes.up, bytes.scales));
                downs.push(id, format.down(bytes.down, bytes.scales));
            }
            row += 1;
        }
        fired
    }
}

/// Rows that are asked from memory before the first product; the products ask for the
/// others.
const FIRST: usize = 4;

/// Rows of a cluster, on the stack.
struct Rows<'a> {
    rows: [Row<'a>; CLUSTER],
    /// Numbers of their neurons inside the cluster.
    ids: [u8; CLUSTER],
    len: usize,
}

impl<'a> Rows<'a> {
    fn new() -> Self {
        Self {
            rows: [Row::split(DType::F32, 0, &[], &[]); CLUSTER],
            ids: [0; CLUSTER],
            len: 0,
        }
    }

    fn push(&mut self, neuron: u32, row: Row<'a>) {
        self.rows[self.len] = row;
        self.ids[self.len] = (neuron as usize % CLUSTER) as u8;
        self.len += 1;
    }

    fn ids(&self) -> impl Iterator<Item = usize> {
        self.ids[..self.len].iter().map(|&id| usize::from(id))
    }

    /// Moves the rows with a factor that is not zero to the front, and the factors with
    /// them; returns how many there are.
    fn keep_if_not_zero(&mut self, factors: &mut [f32]) -> usize {
        let mut kept = 0;
        for i in 0..self.len {
            if factors[i] != 0.0 {
                factors[kept] = factors[i];
                self.rows[kept] = self.rows[i];
                kept += 1;
            }
        }
        kept
    }

    fn list(&self) -> &[Row<'a>] {
        &self.rows[..self.len]
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
