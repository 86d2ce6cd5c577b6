//! Lookahead: predicts the next layer's active set before its input is known.
//!
//! The residual stream changes little between adjacent layers, so the next layer's predictor is
//! mostly right when it runs one layer early. Its error per neuron (true margin minus early margin)
//! becomes known when that layer is predicted, and it persists from token to token. Each early
//! margin is therefore corrected by `β × (last error)`, with `β = Σ eₜ·eₜ₋₁ / Σ eₜ₋₁·eₜ₋₁` (least
//! squares, exponentially decayed). The result only drives prefetch: a false positive costs a read
//! and changes no output.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use emberflow_kernels::{Activations, Compute, Cpu, Lane, Lanes};

use super::mask;
use super::predict::Predictors;
use crate::cluster::CLUSTER;
use crate::input::Input;
use crate::norm::{Norm, rows_or_copy};

/// Pieces into which each thread splits a layer's gates or predictions. Lookup and reads for finished
/// pieces overlap with the computation of the others.
pub const GATE_PIECES: usize = 8;

/// Most tokens of a pass that looks ahead: decode batches do, prefill does not.
pub(super) const FEW: usize = 8;

/// A layer to look ahead to.
pub(super) struct Upcoming<'a> {
    /// Its bank.
    pub bank: u32,
    /// The residual stream of the layer before, `[tokens × d_model]`.
    pub residual: &'a [f32],
    /// The norm before its FFN, if it has one.
    pub norm: Option<&'a Norm>,
    /// Biases of its gates, by packed id; empty without any.
    pub bias: &'a [f32],
}

/// Decay of the error sums per token.
const DECAY: f32 = 0.95;

/// Prediction errors of the early margins of a bank.
struct Errors {
    /// By neuron: true margin minus early margin, for the last token with both.
    last: Vec<f32>,
    /// Decayed sums over neurons and tokens: `Σ eₜ·eₜ₋₁` and `Σ eₜ₋₁·eₜ₋₁`.
    cross: f32,
    square: f32,
}

impl Errors {
    fn new(neurons: usize) -> Self {
        Self {
            last: vec![0.0; neurons],
            cross: 0.0,
            square: 0.0,
        }
    }

    /// `β`: the share of an error that persists (least squares), clamped to 0..=1.
    fn beta(&self) -> f32 {
        let part = self.cross / self.square;
        if part.is_finite() {
            part.clamp(0.0, 1.0)
        } else {
            0.0
        }
    }
}

/// Buffers for predicting one layer ahead, for a few tokens.
pub(super) struct Lookahead {
    d: usize,
    neurons: usize,
    normed: Vec<f32>,
    input: Activations,
    margins: Vec<f32>,
    /// Mask of predicted pairs, by cluster.
    named: Vec<u64>,
    ids: Vec<u32>,
    /// Uncorrected early margins of one token, and their bank. Overwritten with errors by `learn`.
    guess: Vec<f32>,
    guessed: Option<u32>,
    /// By bank.
    errors: Vec<Errors>,
}

impl Lookahead {
    /// For up to `tokens` tokens of `d` elements and `banks` banks of up to `neurons` neurons.
    pub fn new(d: usize, neurons: usize, tokens: usize, banks: usize) -> Self {
        let clusters = neurons.div_ceil(CLUSTER);
        Self {
            d,
            neurons,
            normed: vec![0.0; d * tokens],
            input: Activations::with_capacity(d, tokens),
            margins: vec![0.0; neurons * tokens],
            named: vec![0; clusters * mask::words(tokens)],
            ids: Vec::with_capacity(neurons),
            guess: vec![0.0; neurons],
            guessed: None,
            errors: (0..banks).map(|_| Errors::new(neurons)).collect(),
        }
    }

    /// Bytes that [`Lookahead::new`] allocates.
    pub fn bytes_for(d: usize, neurons: usize, tokens: usize, banks: usize) -> u64 {
        let floats = d * tokens + neurons * (tokens + 2 + banks);
        let named = 8 * neurons.div_ceil(CLUSTER) * mask::words(tokens);
        let input = Activations::bytes(d, tokens);
        (4 * floats + named + input + banks * size_of::<Errors>()) as u64
    }

    /// Whether early margins of `bank` exist for this token, so that `learn` applies.
    pub fn guessed(&self, bank: u32) -> bool {
        self.guessed == Some(bank)
    }

    /// Updates the errors of `bank` with the true `margins` of neurons from `first` on. Called in
    /// order, each neuron once.
    pub fn learn(&mut self, cpu: Cpu, bank: u32, first: usize, margins: &[f32]) {
        let errors = &mut self.errors[bank as usize];
        let range = first..first + margins.len();
        let (guess, last) = (&mut self.guess[range.clone()], &mut errors.last[range]);
        for (guess, margin) in guess.iter_mut().zip(margins) {
            let error = margin - *guess;
            *guess = if error.is_finite() { error } else { 0.0 };
        }
        if first == 0 {
            errors.cross *= DECAY;
            errors.square *= DECAY;
        }
        errors.cross += cpu.dot_f32(guess, last);
        errors.square += cpu.dot_f32(last, last);
        last.copy_from_slice(guess);
        if first + margins.len() == self.neurons {
            self.guessed = None;
        }
    }

    /// Predicts the next layer's active set from this layer's residual stream. Passes the ids,
    /// ascending, to `then` piece by piece while other pieces are predicted. Returns the prediction
    /// time per thread.
    pub fn name(
        &mut self,
        on: &Compute,
        predictors: &mut Predictors,
        next: &Upcoming<'_>,
        then: &mut (dyn FnMut(&[u32]) + Send),
    ) -> Duration {
        let start = Instant::now();
        self.guessed = None;
        let Upcoming {
            bank,
            residual,
            norm,
            ..
        } = *next;
        let cpu = on.cpu;
        let tokens = residual.len() / self.d;
        let normed = &mut self.normed[..residual.len()];
        rows_or_copy(norm, cpu, residual, normed);
        let input = Input::new(cpu.pruning(false), normed, tokens, &mut self.input);
        let features = input.features(residual);
        if !predictors.prepare(on, bank, features) {
            return start.elapsed();
        }
        let (together, alone) = (start.elapsed(), AtomicU64::new(0));
        let (predictors, ids) = (&*predictors, &mut self.ids);
        // Errors are stored for one sequence only.
        let single = tokens == 1;
        if single {
            self.guessed = Some(bank);
        }
        let guess = &mut self.guess[..if single { self.neurons } else { 0 }];
        let errors = &self.errors[bank as usize];
        let beta = errors.beta();
        let (clusters, words) = (self.neurons.div_ceil(CLUSTER), mask::words(tokens));
        let neurons = self.neurons;
        let lanes = Lanes {
            units: clusters,
            first: Lane::new(&mut self.named[..clusters * words], words),
            second: Lane::new(&mut self.margins[..neurons * tokens], CLUSTER * tokens),
            third: Lane::new(guess, CLUSTER),
        };
        let name = |c: usize, named: &mut [u64], margins: &mut [f32], guess: &mut [f32]| {
            let start = Instant::now();
            predictors.margins(cpu, bank, features, c * CLUSTER, margins);
            if !guess.is_empty() {
                guess.copy_from_slice(margins);
                let last = &errors.last[c * CLUSTER..];
                for (margin, error) in margins.iter_mut().zip(last) {
                    *margin += beta * error;
                }
            }
            let clusters = margins.chunks(CLUSTER * tokens);
            for (margins, named) in clusters.zip(named.chunks_exact_mut(words)) {
                mask::set_wanted(named, margins);
            }
            alone.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        };
        let pieces = clusters.div_ceil(GATE_PIECES * on.threads());
        (on.workers).for_each_part_then(lanes, pieces, &name, &mut |c, named, _, _| {
            ids.clear();
            for (c, named) in (c..).zip(named.chunks_exact(words)) {
                let here = CLUSTER.min(neurons - c * CLUSTER);
                mask::for_each_wanted(named, tokens, here, |n| ids.push((c * CLUSTER + n) as u32));
            }
            then(ids);
        });
        together + Duration::from_nanos(alone.into_inner() / on.threads() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEURONS: usize = 2 * CLUSTER;

    /// `β` after some tokens whose early margins are off by `error(token, neuron)`.
    fn beta(error: impl Fn(usize, usize) -> f32) -> f32 {
        let mut ahead = Lookahead::new(32, NEURONS, 1, 2);
        for token in 0..40 {
            ahead.guess.fill(3.0);
            ahead.guessed = Some(1);
            assert!(ahead.guessed(1) && !ahead.guessed(0));
            for first in [0, CLUSTER] {
                let margins: Vec<f32> = (first..first + CLUSTER)
                    .map(|neuron| 3.0 + error(token, neuron))
                    .collect();
                ahead.learn(Cpu::detect(), 1, first, &margins);
            }
            assert!(!ahead.guessed(1));
        }
        assert_eq!(ahead.errors[0].beta(), 0.0);
        ahead.errors[1].beta()
    }

    fn noise(token: usize, neuron: usize) -> f32 {
        let n = ((token * NEURONS + neuron) as u32).wrapping_mul(0x9E37_79B9);
        (n ^ n >> 15).wrapping_mul(0x85EB_CA6B) as f32 / u32::MAX as f32 - 0.5
    }

    #[test]
    fn beta_is_the_persistent_share_of_errors() {
        assert!(beta(|_, neuron| neuron as f32) > 0.99);
        assert!(beta(noise) < 0.1);
        let half = beta(|token, neuron| noise(0, neuron) + noise(token + 1, neuron));
        assert!((0.4..0.6).contains(&half), "{half}");
        // An error that alternates in sign does not persist.
        assert_eq!(
            beta(|token, _| if token % 2 == 0 { 1.0 } else { -1.0 }),
            0.0
        );
    }

    #[test]
    fn non_finite_margins_are_ignored() {
        let error = |_, neuron| match neuron {
            1 => f32::NAN,
            2 => f32::NEG_INFINITY,
            _ => 1.0,
        };
        assert!(beta(error) > 0.99);
        // Its square overflows.
        assert_eq!(beta(|_, _| f32::MAX), 0.0);
    }
}
