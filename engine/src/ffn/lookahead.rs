//! Who is likely to be needed by the next layer, before its own input is known.
//!
//! The residual stream changes little from one layer to the next, so the next layer's predictor is
//! mostly right about it a layer early. Where it was wrong for the last token, by how much is known
//! once that layer was named, and it will be wrong in nearly the same way for this one: what a layer
//! adds to the stream changes slowly, and some of it never. So each guess is corrected by the error of
//! the last one, times the share of such errors that has lasted of late (least squares). What is named
//! is only read ahead, never computed: a wrong guess costs a read and changes no result.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use emberflow_kernels::{Activations, Compute, Cpu, Lane, Lanes};

use super::mask;
use super::predict::Predictors;
use super::units::Norm;
use crate::input::Input;
use crate::store::regions::CLUSTER;

/// Pieces of a layer that each thread names one after the other: what is missing of those that are
/// done is looked up and read while the others are named.
pub const GATE_PIECES: usize = 8;

/// Most tokens of a pass that looks ahead: those of as many sequences, not of a prompt.
pub(super) const FEW: usize = 8;

/// A layer to look ahead to.
pub(super) struct Upcoming<'a> {
    /// Its bank.
    pub bank: u32,
    /// The residual stream of the layer before, `[tokens × d_model]`.
    pub residual: &'a [f32],
    /// The norm before its FFN.
    pub norm: Norm<'a>,
}

/// Part of what is known of the errors' agreement that a new token leaves.
const KEPT: f32 = 0.95;

/// How wrong the guesses for a bank were.
struct Errors {
    /// By neuron: its margin less the guess, for the last token that both are known of.
    last: Vec<f32>,
    /// Sums over neurons and tokens, older ones counting less: of an error times the one before,
    /// and of the one before times itself.
    agreed: f32,
    size: f32,
}

impl Errors {
    fn new(neurons: usize) -> Self {
        Self {
            last: vec![0.0; neurons],
            agreed: 0.0,
            size: 0.0,
        }
    }

    /// The part of an error that the next one has, too (least squares).
    fn kept(&self) -> f32 {
        let part = self.agreed / self.size;
        if part.is_finite() {
            part.clamp(0.0, 1.0)
        } else {
            0.0
        }
    }
}

/// Memory for looking one layer ahead, for a few tokens.
pub(super) struct Lookahead {
    neurons: usize,
    normed: Vec<f32>,
    input: Activations,
    margins: Vec<f32>,
    /// Which pairs are named, by cluster.
    named: Vec<u64>,
    ids: Vec<u32>,
    /// The margins that were guessed for one token, not corrected, and for which bank. Errors once
    /// the bank was named.
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

    /// Whether margins of `bank` were guessed for this token, so that there is something to learn
    /// when it is named.
    pub fn guessed(&self, bank: u32) -> bool {
        self.guessed == Some(bank)
    }

    /// The guess for `bank` was made for a token whose margins are `margins` from neuron `first` on;
    /// in order, each neuron once.
    pub fn learn(&mut self, cpu: Cpu, bank: u32, first: usize, margins: &[f32]) {
        let errors = &mut self.errors[bank as usize];
        let range = first..first + margins.len();
        let (guess, last) = (&mut self.guess[range.clone()], &mut errors.last[range]);
        for (guess, margin) in guess.iter_mut().zip(margins) {
            let error = margin - *guess;
            *guess = if error.is_finite() { error } else { 0.0 };
        }
        if first == 0 {
            errors.agreed *= KEPT;
            errors.size *= KEPT;
        }
        errors.agreed += cpu.dot_f32(guess, last);
        errors.size += cpu.dot_f32(last, last);
        last.copy_from_slice(guess);
        if first + margins.len() == self.neurons {
            self.guessed = None;
        }
    }

    /// Hands the neurons, ascending, that the predictor of the upcoming layer names for the tokens of
    /// this one to `then`, some at a time while others are named. Returns the time of naming alone, by
    /// thread.
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
        } = *next;
        let (cpu, d) = (on.cpu, norm.weight.len());
        let tokens = residual.len() / d;
        let normed = &mut self.normed[..residual.len()];
        for (x, out) in residual.chunks_exact(d).zip(normed.chunks_exact_mut(d)) {
            cpu.rmsnorm(x, norm.weight, norm.eps, out);
        }
        let input = Input::new(cpu, normed, tokens, &mut self.input);
        let features = input.features(residual);
        if !predictors.prepare(on, bank, features) {
            return start.elapsed();
        }
        let (together, alone) = (start.elapsed(), AtomicU64::new(0));
        let (predictors, ids) = (&*predictors, &mut self.ids);
        // Errors of several sequences are not told apart.
        let single = tokens == 1;
        if single {
            self.guessed = Some(bank);
        }
        let guess = &mut self.guess[..if single { self.neurons } else { 0 }];
        let errors = &self.errors[bank as usize];
        let kept = errors.kept();
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
                    *margin += kept * error;
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

    /// What is kept of errors after some tokens, for which guesses are wrong by `error(token,
    /// neuron)`.
    fn kept(error: impl Fn(usize, usize) -> f32) -> f32 {
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
        assert_eq!(ahead.errors[0].kept(), 0.0);
        ahead.errors[1].kept()
    }

    fn noise(token: usize, neuron: usize) -> f32 {
        let n = ((token * NEURONS + neuron) as u32).wrapping_mul(0x9E37_79B9);
        (n ^ n >> 15).wrapping_mul(0x85EB_CA6B) as f32 / u32::MAX as f32 - 0.5
    }

    #[test]
    fn errors_are_kept_as_far_as_they_agree() {
        assert!(kept(|_, neuron| neuron as f32) > 0.99);
        assert!(kept(noise) < 0.1);
        let half = kept(|token, neuron| noise(0, neuron) + noise(token + 1, neuron));
        assert!((0.4..0.6).contains(&half), "{half}");
        // An error that turns each time is none to correct by.
        assert_eq!(
            kept(|token, _| if token % 2 == 0 { 1.0 } else { -1.0 }),
            0.0
        );
    }

    #[test]
    fn what_is_no_number_spoils_nothing() {
        let error = |_, neuron| match neuron {
            1 => f32::NAN,
            2 => f32::NEG_INFINITY,
            _ => 1.0,
        };
        assert!(kept(error) > 0.99);
        // Too large to be squared.
        assert_eq!(kept(|_, _| f32::MAX), 0.0);
    }
}
