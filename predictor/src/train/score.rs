//! Computes gates and predictor scores over a text, block by block.

use std::time::Instant;

use emberflow_kernels::{Activations, DType, matmul_scratch};

use super::{GateLayer, Trainer};
use crate::predict::{Features, Predictor, RANGE, Shared, predict_all};

/// Receives the first neuron of a block and its gates, `[neurons × tokens]`.
type GatesFn<'f> = dyn Fn(usize, &[f32]) + Sync + 'f;

/// Also receives the scores, `[neurons × tokens]`.
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
                // The inputs are the matrix and the gate rows its "tokens", so the products of a
                // neuron are adjacent.
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
                f(first, &gates);
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
        cpu.quantize_activations(inputs, tokens, &mut quantized);
        let features = Features {
            normed: inputs,
            quantized: quantized.all(),
            residual: &[],
        };
        let mut shared = Shared::new(predictor.shape(), tokens);
        predictor.prepare(self.on, features, &mut shared);
        let shared = &shared;
        self.for_each_block(layer, inputs, &|first, gates| {
            let mut scores = vec![0.0; gates.len()];
            predictor.scores(cpu, features, shared, first, &mut scores);
            f(first, gates, &scores);
        });
    }

    /// Nanoseconds of one token's prediction, the minimum of several runs.
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
