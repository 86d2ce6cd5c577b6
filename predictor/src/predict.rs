//! The predictor interface: for every token, it selects the neurons of one layer to compute.
//!
//! A prediction for a token depends only on its input and the predictor's weights: not on other
//! tokens of the chunk, the division among threads, or residency. So the selected neurons, and the
//! model's output, are the same under every memory budget.

use emberflow_kernels::{Activations, ActivationsRef, Compute, Cpu};

use crate::moments::Sums;
use crate::products::work_bytes;

/// The vector a predictor reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// The FFN's input after its norm, as read by Gate and Up.
    Normed,
    /// The residual stream before the FFN's norm, as in PowerInfer.
    Residual,
}

/// A layer's input for several tokens.
#[derive(Clone, Copy)]
pub struct Features<'a> {
    /// The FFN's input after its norm, `[tokens × d_model]`.
    pub normed: &'a [f32],
    /// `normed`, quantised.
    pub quantized: ActivationsRef<'a>,
    /// The residual stream before the norm, `[tokens × d_model]`.
    pub residual: &'a [f32],
}

impl<'a> Features<'a> {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.quantized.tokens()
    }

    /// Token `t` alone.
    ///
    /// # Panics
    /// If there is no such token.
    pub fn alone(&self, t: usize) -> Self {
        let d = self.quantized.n();
        Self {
            normed: &self.normed[t * d..(t + 1) * d],
            quantized: self.quantized.range(t, 1),
            residual: &self.residual[t * d..(t + 1) * d],
        }
    }

    /// The vector that a predictor reads for token `t`.
    pub fn token(&self, reads: Reads, t: usize) -> &'a [f32] {
        let d = self.quantized.n();
        &self.all(reads)[t * d..(t + 1) * d]
    }

    /// The vectors that a predictor reads, token after token.
    pub(crate) fn all(&self, reads: Reads) -> &'a [f32] {
        let all = match reads {
            Reads::Normed => self.normed,
            Reads::Residual => self.residual,
        };
        &all[..self.tokens() * self.quantized.n()]
    }
}

/// Selects the neurons of one layer to compute.
pub trait Predictor: Send + Sync {
    /// Bytes in memory.
    fn bytes(&self) -> u64;

    /// Per-token memory in [`Shared`].
    fn shape(&self) -> SharedShape;

    /// Computes everything that all neurons share, into `shared`.
    fn prepare(&self, on: &Compute, input: Features<'_>, shared: &mut Shared);

    /// `scores[i × tokens + t]` of neuron `first + i` for token `t`, after
    /// [`prepare`](Predictor::prepare) with the same input. Several threads call it for different
    /// neurons; longer ranges prefetch better.
    fn scores(
        &self,
        cpu: Cpu,
        input: Features<'_>,
        shared: &Shared,
        first: usize,
        scores: &mut [f32],
    );

    /// Thresholds of the neurons from `first` on. A neuron is selected if its score reaches its
    /// threshold.
    fn thresholds(&self, cpu: Cpu, first: usize, thresholds: &mut [f32]);

    /// After [`prepare`](Predictor::prepare): the value that each token's gates must exceed to
    /// fire; empty if it does not depend on the token.
    fn cutoffs<'s>(&self, _: &'s Shared) -> &'s [f32] {
        &[]
    }

    /// Like [`scores`](Predictor::scores), minus the neuron's threshold: a neuron is selected if
    /// its margin is not negative.
    fn margins(
        &self,
        cpu: Cpu,
        input: Features<'_>,
        shared: &Shared,
        first: usize,
        margins: &mut [f32],
    ) {
        let tokens = input.tokens();
        self.scores(cpu, input, shared, first, margins);
        for (first, scores) in blocks(first, margins, tokens) {
            let mut thresholds = [0.0; RANGE];
            let thresholds = &mut thresholds[..scores.len() / tokens];
            self.thresholds(cpu, first, thresholds);
            for (scores, threshold) in scores.chunks_exact_mut(tokens).zip(thresholds) {
                for score in scores {
                    *score -= *threshold;
                }
            }
        }
    }

    /// Like [`margins`](Predictor::margins), with 1 for a selected (neuron, token) pair and 0
    /// otherwise.
    fn predict(
        &self,
        cpu: Cpu,
        input: Features<'_>,
        shared: &Shared,
        first: usize,
        wanted: &mut [f32],
    ) {
        self.margins(cpu, input, shared, first, wanted);
        keep_wanted(wanted);
    }
}

/// Turns margins into 1 for selected neurons and 0 for others.
pub fn keep_wanted(margins: &mut [f32]) {
    for margin in margins {
        *margin = f32::from(u8::from(*margin >= 0.0));
    }
}

/// Both steps of a prediction for all neurons of a layer, divided among the threads: `wanted
/// [neurons × tokens]` is 1 for a selected neuron and 0 otherwise.
pub fn predict_all(
    predictor: &dyn Predictor,
    on: &Compute,
    input: Features<'_>,
    shared: &mut Shared,
    wanted: &mut [f32],
) {
    predictor.prepare(on, input, shared);
    let (shared, tokens) = (&*shared, input.tokens());
    (on.workers).for_each_part_mut(wanted, RANGE * tokens, &|_, block, wanted| {
        predictor.predict(on.cpu, input, shared, block * RANGE, wanted);
    });
}

/// Neurons per block when a layer is divided among threads.
pub const RANGE: usize = 128;

/// Splits `values [neurons × tokens]` of the neurons from `first` on into blocks of at most
/// [`RANGE`] neurons, each with the id of its first neuron.
pub(crate) fn blocks(
    first: usize,
    values: &mut [f32],
    tokens: usize,
) -> impl Iterator<Item = (usize, &mut [f32])> {
    let firsts = (first..).step_by(RANGE);
    firsts.zip(values.chunks_mut(RANGE * tokens))
}

/// Memory that a predictor needs per token between its two steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SharedShape {
    /// Floats of the hidden layer.
    pub hidden: usize,
    /// Bytes of the input's signs.
    pub signs: usize,
    /// Elements of an input to quantise.
    pub quantized: usize,
    /// Scores of all neurons.
    pub scores: usize,
    /// Longest row that is multiplied with several tokens at once, in elements; determines the
    /// scratch of each thread.
    pub row: usize,
}

impl SharedShape {
    /// The element-wise maximum.
    pub fn max(self, other: Self) -> Self {
        Self {
            hidden: self.hidden.max(other.hidden),
            signs: self.signs.max(other.signs),
            quantized: self.quantized.max(other.quantized),
            scores: self.scores.max(other.scores),
            row: self.row.max(other.row),
        }
    }
}

/// Memory between a predictor's two steps, allocated once for all layers.
#[derive(Debug, Default)]
pub struct Shared {
    pub(crate) hidden: Vec<f32>,
    pub(crate) hidden_q: Activations,
    pub(crate) input_q: Activations,
    pub(crate) signs: Vec<u8>,
    /// Scores of all neurons; each token's cutoff of its gates and deviation of its scores
    /// (`top.rs`).
    pub(crate) scores: Vec<f32>,
    pub(crate) cutoffs: Vec<f32>,
    pub(crate) deviations: Vec<f32>,
    pub(crate) sums: Sums,
}

impl Shared {
    /// Memory for up to `chunk` tokens.
    pub fn new(shape: SharedShape, chunk: usize) -> Self {
        let tops = if shape.scores > 0 { chunk } else { 0 };
        Self {
            scores: vec![0.0; shape.scores * chunk],
            cutoffs: Vec::with_capacity(tops),
            deviations: Vec::with_capacity(tops),
            sums: Sums::with_capacity(tops),
            hidden: vec![0.0; shape.hidden * chunk],
            hidden_q: Activations::with_capacity(shape.hidden, chunk),
            input_q: Activations::with_capacity(shape.quantized, chunk),
            signs: vec![0; shape.signs * chunk],
        }
    }

    /// Bytes allocated by [`Shared::new`] and by `threads` scoring threads.
    pub fn bytes_for(shape: SharedShape, chunk: usize, threads: usize) -> u64 {
        let tops = if shape.scores > 0 { chunk } else { 0 };
        let of_tokens = shape.hidden.saturating_add(shape.scores);
        let floats = of_tokens.saturating_mul(chunk).saturating_mul(4);
        let floats = floats.saturating_add(8 * tops + Sums::bytes_for(tops));
        let quantized = Activations::bytes(shape.hidden, chunk)
            .saturating_add(Activations::bytes(shape.quantized, chunk));
        let signs = shape.signs.saturating_mul(chunk);
        let work = match shape.row {
            0 => 0,
            row => work_bytes(row).saturating_mul(threads as u64),
        };
        (floats.saturating_add(quantized).saturating_add(signs) as u64).saturating_add(work)
    }
}
