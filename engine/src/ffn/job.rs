//! The arithmetic of one cluster: what a compute thread does with its bytes.

use emberflow_kernels::{Cpu, Row};

use super::store::NeuronStore;
use super::{CLUSTER, FfnShape, MAX_CHUNK, activation};
use crate::scratch::with_thread_buffer;

/// Activated gates of the neurons from `first` on, from resident Gate rows;
/// `gates [neurons × tokens]`.
pub(super) fn resident_gates(
    cpu: Cpu,
    shape: &FfnShape,
    store: &NeuronStore,
    bank: u32,
    first: usize,
    x: &[f32],
    gates: &mut [f32],
) {
    let tokens = x.len() / shape.format.d;
    for (i, gates) in gates.chunks_exact_mut(tokens).enumerate() {
        let row = store.resident_gate(bank, (first + i) as u32);
        dots(cpu, row, x, gates);
    }
    activation::apply(cpu, shape.kind.activation, gates);
}

/// Activated gates of all neurons of cluster `c` from their bundles.
pub(super) fn gates_from_bundles(
    cpu: Cpu,
    shape: &FfnShape,
    store: &NeuronStore,
    c: u32,
    ids: &[u32],
    x: &[f32],
    gates: &mut [f32],
) {
    let tokens = x.len() / shape.format.d;
    gates.fill(0.0);
    for place in store.places(c) {
        let id = ids[place];
        if let Some(bytes) = store.bytes(place, id) {
            let gates = &mut gates[id as usize % CLUSTER * tokens..][..tokens];
            dots(cpu, shape.format.gate(bytes.gate, bytes.scales), x, gates);
        }
    }
    activation::apply(cpu, shape.kind.activation, gates);
}

/// One parallel section: everything a cluster reads.
pub(super) struct Job<'a> {
    pub shape: &'a FfnShape,
    pub store: &'a NeuronStore,
    /// Activated gates, `[neurons × tokens]`, of the clusters where the store
    /// says that they are known.
    pub gates: &'a [f32],
    pub ids: &'a [u32],
    pub x: &'a [f32],
    pub tokens: usize,
}

impl Job<'_> {
    /// Sums the needed neurons of cluster `c` into `partial`, `[tokens × d]`.
    /// Returns how many (neuron, token) pairs fired, where that was not known.
    pub fn cluster(&self, cpu: Cpu, c: u32, partial: &mut [f32]) -> u64 {
        let FfnShape {
            format,
            kind,
            dense,
            ..
        } = *self.shape;
        let tokens = self.tokens;
        partial.fill(0.0);
        let known = self.store.gates_known(c);
        let (mut gate_buffer, mut up_buffer) = ([0.0f32; MAX_CHUNK], [0.0f32; MAX_CHUNK]);
        let mut fired = 0;
        for place in self.store.places(c) {
            let id = self.ids[place];
            let Some(bytes) = self.store.bytes(place, id) else {
                continue;
            };
            let gate = if known {
                &self.gates[id as usize * tokens..][..tokens]
            } else {
                let values = &mut gate_buffer[..tokens];
                dots(cpu, format.gate(bytes.gate, bytes.scales), self.x, values);
                activation::apply(cpu, kind.activation, values);
                fired += values.iter().filter(|&&g| g != 0.0).count() as u64;
                values
            };
            if !dense && gate.iter().all(|&g| g == 0.0) {
                continue;
            }
            let hidden = &mut up_buffer[..tokens];
            dots(cpu, format.up(bytes.rest, bytes.scales), self.x, hidden);
            for (h, g) in hidden.iter_mut().zip(gate) {
                let up = if kind.relu_on_up { h.max(0.0) } else { *h };
                *h = g * up;
            }
            if dense || hidden.iter().any(|&h| h != 0.0) {
                let down = format.down(bytes.rest, bytes.scales);
                axpys(cpu, down, hidden, !dense, partial);
            }
        }
        fired
    }
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
