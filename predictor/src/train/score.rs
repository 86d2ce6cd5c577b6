//! Computes gates and predictor scores over a text, block by block.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use emberflow_kernels::{Activations, DType, matmul_scratch};

use super::{Fires, GateLayer, Trainer, lock};
use crate::coarse::CoarseGate;
use crate::moments::Moments;
use crate::predict::{Features, Predictor, RANGE, Shared, predict_all};
use crate::top::CutoffFit;

/// Receives the first neuron of a block and its gates, `[neurons × tokens]`.
type GatesFn<'f> = dyn Fn(usize, &mut [f32]) + Sync + 'f;

/// Receives the first neuron of a block, its gates minus their cutoffs, and its scores, `[neurons ×
/// tokens]` each.
type ScoresFn<'f> = dyn Fn(usize, &[f32], &[f32]) + Sync + 'f;

/// Tokens for timing a predictor.
const TIMED: usize = 64;

impl Trainer<'_> {
    /// Computes the gates of a layer for `inputs` in blocks of neurons, each on one thread.
    pub(super) fn for_each_block(&self, layer: &GateLayer<'_>, inputs: &[f32], f: &GatesFn<'_>) {
        let (cpu, d) = (self.on.cpu, layer.d);
        let (neurons, tokens) = (layer.gate.len() / d, inputs.len() / d);
        if tokens == 0 {
            return;
        }
        let bytes: &[u8] = bytemuck::cast_slice(inputs);
        self.on
            .workers
            .for_each_chunk(neurons.div_ceil(RANGE), &|_, block| {
                let first = block * RANGE;
                let end = (first + RANGE).min(neurons);
                let mut gates = vec![0.0; (end - first) * tokens];
                let mut scratch = vec![0.0; matmul_scratch(d)];
                // The inputs are the matrix and the gate rows its "tokens", so a neuron's products
                // are contiguous.
                cpu.matmul(
                    DType::F32,
                    bytes,
                    4 * d,
                    d,
                    &layer.gate[first * d..end * d],
                    end - first,
                    &mut gates,
                    tokens,
                    &mut scratch,
                );
                f(first, &mut gates);
            });
    }

    /// Like [`for_each_block`](Self::for_each_block), with a predictor's scores.
    pub(super) fn score(
        &self,
        predictor: &dyn Predictor,
        layer: &GateLayer<'_>,
        inputs: &[f32],
        f: &ScoresFn<'_>,
    ) {
        let (cpu, tokens) = (self.on.cpu, inputs.len() / layer.d);
        if tokens == 0 {
            return;
        }
        let mut quantized = Activations::default();
        let pruning = cpu.pruning(layer.pruned);
        pruning.quantize_activations(inputs, tokens, &mut quantized);
        let features = Features {
            normed: inputs,
            quantized: quantized.all(),
            residual: &[],
        };
        let mut shared = Shared::new(predictor.shape(), tokens);
        predictor.prepare(self.on, features, &mut shared);
        let (shared, cutoffs) = (&shared, self.cutoffs(layer, inputs));
        self.for_each_block(layer, inputs, &|first, gates| {
            let mut scores = vec![0.0; gates.len()];
            predictor.scores(cpu, features, shared, first, &mut scores);
            for gates in gates.chunks_exact_mut(tokens) {
                gates.iter_mut().zip(&cutoffs).for_each(|(g, c)| *g -= c);
            }
            f(first, gates, &scores);
        });
    }

    /// The value that the gates of each input must exceed to fire.
    pub(super) fn cutoffs(&self, layer: &GateLayer<'_>, inputs: &[f32]) -> Vec<f32> {
        match layer.fires {
            Fires::Above(cutoff) => vec![cutoff; inputs.len() / layer.d],
            Fires::Top(multiple) => {
                let of = self.moments(layer, inputs, &|_, _| {});
                of.iter().map(|of| of.above(multiple)).collect()
            }
        }
    }

    /// Moments of each input's gates, or of their transformation by `change`.
    pub(super) fn moments(
        &self,
        layer: &GateLayer<'_>,
        inputs: &[f32],
        change: &GatesFn<'_>,
    ) -> Vec<Moments> {
        let (d, neurons) = (layer.d, layer.gate.len() / layer.d);
        let tokens = inputs.len() / d;
        // By block, so that they are added in order.
        let blocks = neurons.div_ceil(RANGE);
        let sums = Mutex::new(vec![Vec::new(); blocks]);
        self.for_each_block(layer, inputs, &|first, gates| {
            change(first, gates);
            let mut of = vec![[0.0f64; 2]; tokens];
            for gates in gates.chunks_exact(tokens) {
                for (of, &gate) in of.iter_mut().zip(gates) {
                    let gate = f64::from(gate);
                    of[0] += gate;
                    of[1] += gate * gate;
                }
            }
            lock(&sums)[first / RANGE] = of;
        });
        let mut all = vec![[0.0; 2]; tokens];
        for block in sums.into_inner().unwrap_or_else(PoisonError::into_inner) {
            for (all, of) in all.iter_mut().zip(block) {
                *all = [all[0] + of[0], all[1] + of[1]];
            }
        }
        (all.iter()
            .map(|&[sum, squares]| Moments::of(sum, squares, neurons)))
        .collect()
    }

    /// Fits cutoffs to the products of `gate`, a coarse copy of the gate rows.
    pub(super) fn fit_cutoffs(
        &self,
        gate: &CoarseGate,
        layer: &GateLayer<'_>,
        inputs: &[f32],
    ) -> CutoffFit {
        let (cpu, tokens) = (self.on.cpu, inputs.len() / layer.d);
        let mut quantized = Activations::default();
        let pruning = cpu.pruning(layer.pruned);
        pruning.quantize_activations(inputs, tokens, &mut quantized);
        let features = Features {
            normed: inputs,
            quantized: quantized.all(),
            residual: &[],
        };
        let scores = |first: usize, gates: &mut [f32]| gate.products(cpu, features, first, gates);
        let of = self.moments(layer, inputs, &scores);
        CutoffFit::new(&of, &self.cutoffs(layer, inputs))
    }

    /// Nanoseconds per token of a prediction: minimum of several runs.
    pub(super) fn time(&self, predictor: &dyn Predictor, layer: &GateLayer<'_>) -> f64 {
        let (cpu, d) = (self.on.cpu, layer.d);
        let neurons = layer.gate.len() / d;
        let mut shared = Shared::new(predictor.shape(), 1);
        let mut wanted = vec![0.0; neurons];
        let mut quantized = Activations::default();
        let mut best = f64::INFINITY;
        for x in layer.texts.train.chunks_exact(d).take(TIMED) {
            cpu.quantize_activations(x, 1, &mut quantized);
            let features = Features {
                normed: x,
                quantized: quantized.all(),
                residual: &[],
            };
            let start = Instant::now();
            let on = self.on;
            predict_all(predictor, on, features, &mut shared, &mut wanted);
            best = best.min(start.elapsed().as_nanos() as f64);
        }
        best
    }
}
