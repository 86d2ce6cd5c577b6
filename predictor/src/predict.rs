//! What a predictor is: it names, for every token, the neurons of one layer that are
//! worth computing.
//!
//! A prediction depends on its input and on the predictor's weights alone, token by
//! token: not on the other tokens of a chunk, on how a layer is divided among threads,
//! or on what is in memory. Which neurons are computed, and so the model's output, is
//! therefore the same under every budget.

use emberflow_kernels::{Activations, ActivationsRef, Compute, Cpu};

/// Which vector a predictor reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// The FFN's input after its norm, as Gate and Up read it.
    Normed,
    /// The residual stream before the FFN's norm, as PowerInfer's predictors do.
    Residual,
}

/// Some tokens' input of a layer.
#[derive(Clone, Copy)]
pub struct Features<'a> {
    /// The FFN's input after its norm, `[tokens × d_model]`.
    pub normed: &'a [f32],
    /// The same, quantised.
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

    /// The vector of token `t` that a predictor reads.
    pub fn token(&self, reads: Reads, t: usize) -> &'a [f32] {
        let d = self.quantized.n();
        let all = match reads {
            Reads::Normed => self.normed,
            Reads::Residual => self.residual,
        };
        &all[t * d..(t + 1) * d]
    }
}

/// Names the neurons of one layer that are worth computing.
pub trait Predictor: Send + Sync {
    /// Bytes it holds in memory.
    fn bytes(&self) -> u64;

    /// What it needs of [`Shared`] for a token.
    fn shape(&self) -> SharedShape;

    /// Computes into `shared` what all neurons have in common.
    fn prepare(&self, on: &Compute, input: Features<'_>, shared: &mut Shared);

    /// After [`prepare`](Predictor::prepare) of the same input: `scores[i × tokens + t]`
    /// of neuron `first + i` for token `t`. Called by several threads for different
    /// neurons; the longer the list, the more of it is on its way from memory.
    fn scores(
        &self,
        cpu: Cpu,
        input: Features<'_>,
        shared: &Shared,
        first: usize,
        scores: &mut [f32],
    );

    /// The scores from which on the neurons from `first` on are wanted.
    fn thresholds(&self, cpu: Cpu, first: usize, thresholds: &mut [f32]);

    /// As [`scores`](Predictor::scores), with how far each score is above the neuron's threshold:
    /// what is not negative is worth computing.
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

    /// As [`margins`](Predictor::margins), with 1 where a neuron is worth computing for a
    /// token and 0 where not.
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

/// Makes margins into 1 where a neuron is worth computing and 0 where not.
pub fn keep_wanted(margins: &mut [f32]) {
    for margin in margins {
        *margin = f32::from(u8::from(*margin >= 0.0));
    }
}

/// Both steps of a prediction for all neurons of a layer, shared among the threads: 1 in
/// `wanted [neurons × tokens]` where a neuron is worth computing for a token, 0 where not.
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

/// Neurons between two places where a layer is cut among threads.
pub const RANGE: usize = 128;

/// `values [neurons × tokens]` of the neurons from `first` on, at most [`RANGE`] neurons at
/// a time, each with its first neuron.
pub(crate) fn blocks(
    first: usize,
    values: &mut [f32],
    tokens: usize,
) -> impl Iterator<Item = (usize, &mut [f32])> {
    let firsts = (first..).step_by(RANGE);
    firsts.zip(values.chunks_mut(RANGE * tokens))
}

/// Per token: what a predictor keeps between its two steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SharedShape {
    /// Floats of the hidden layer.
    pub hidden: usize,
    /// Bytes of the signs of the input.
    pub signs: usize,
    /// Elements of an input that has to be quantised first.
    pub quantized: usize,
}

impl SharedShape {
    /// What serves both.
    pub fn max(self, other: Self) -> Self {
        Self {
            hidden: self.hidden.max(other.hidden),
            signs: self.signs.max(other.signs),
            quantized: self.quantized.max(other.quantized),
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
}

impl Shared {
    /// Memory for up to `chunk` tokens.
    pub fn new(shape: SharedShape, chunk: usize) -> Self {
        Self {
            hidden: vec![0.0; shape.hidden * chunk],
            hidden_q: Activations::with_capacity(shape.hidden, chunk),
            input_q: Activations::with_capacity(shape.quantized, chunk),
            signs: vec![0; shape.signs * chunk],
        }
    }

    /// Bytes that [`Shared::new`] allocates.
    pub fn bytes_for(shape: SharedShape, chunk: usize) -> u64 {
        let floats = shape.hidden.saturating_mul(chunk).saturating_mul(4);
        let quantized = Activations::bytes(shape.hidden, chunk)
            .saturating_add(Activations::bytes(shape.quantized, chunk));
        let signs = shape.signs.saturating_mul(chunk);
        (floats.saturating_add(quantized).saturating_add(signs)) as u64
    }
}
