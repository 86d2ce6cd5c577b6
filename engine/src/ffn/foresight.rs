//! Naming the next layer's neurons by the residual stream of this one.
//!
//! The stream changes little from one layer to the next, so the next layer's predictor is
//! mostly right about it a layer early. Where it was wrong for the last token, by how much is known
//! once that layer was named, and it will be wrong in nearly the same way for this one: what a
//! layer adds to the stream changes slowly, and some of it never. So each guess is corrected by the
//! error of the last one, as far as errors have agreed of late. What is named is only read ahead,
//! never computed: a wrong guess costs a read and changes no result.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use emberflow_kernels::{Activations, Cpu, Workers};
use emberflow_predictor::keep_wanted;

use super::predict::Predictors;
use super::{CLUSTER, GATE_PIECES, list_needed, nanoseconds};
use crate::input::Input;

/// The norm before a layer's FFN.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub weight: &'a [f32],
    pub eps: f32,
}

/// A bank to look ahead to: its number, the residual stream of the one before, and its norm.
pub(super) type Next<'a> = (u32, &'a [f32], Norm<'a>);

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
pub(super) struct Foresight {
    neurons: usize,
    normed: Vec<f32>,
    input: Activations,
    wanted: Vec<f32>,
    ids: Vec<u32>,
    /// The margins that were guessed for one token, not corrected, and for which bank. Errors once
    /// the bank was named.
    guess: Vec<f32>,
    guessed: Option<u32>,
    /// By bank.
    errors: Vec<Errors>,
}

impl Foresight {
    pub fn new(d: usize, neurons: usize, tokens: usize, banks: usize) -> Self {
        Self {
            neurons,
            normed: vec![0.0; d * tokens],
            input: Activations::with_capacity(d, tokens),
            wanted: vec![0.0; neurons * tokens],
            ids: Vec::with_capacity(neurons),
            guess: vec![0.0; neurons],
            guessed: None,
            errors: (0..banks).map(|_| Errors::new(neurons)).collect(),
        }
    }

    /// Bytes that [`Foresight::new`] allocates.
    pub fn bytes_for(d: usize, neurons: usize, tokens: usize, banks: usize) -> u64 {
        let floats = d * tokens + neurons * (tokens + 2 + banks);
        (4 * floats + Activations::bytes(d, tokens) + banks * size_of::<Errors>()) as u64
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

    /// Hands the neurons, ascending, that the predictor of `bank` names for tokens whose
    /// residual stream is `residual`, to `then`, some at a time while others are named. Returns
    /// the nanoseconds of naming alone, by thread.
    pub fn name(
        &mut self,
        (cpu, workers): (Cpu, &Workers),
        predictors: &mut Predictors,
        (bank, residual, norm): Next<'_>,
        then: &mut (dyn FnMut(&[u32]) + Send),
    ) -> u64 {
        let start = Instant::now();
        self.ids.clear();
        self.guessed = None;
        let d = norm.weight.len();
        let tokens = residual.len() / d;
        let normed = &mut self.normed[..residual.len()];
        for (x, out) in residual.chunks_exact(d).zip(normed.chunks_exact_mut(d)) {
            cpu.rmsnorm(x, norm.weight, norm.eps, out);
        }
        let input = Input::new(cpu, normed, tokens, &mut self.input);
        let features = input.features(residual);
        if !predictors.prepare(cpu, workers, bank, features) {
            return nanoseconds(start.elapsed());
        }
        let (together, alone) = (start.elapsed(), AtomicU64::new(0));
        let wanted = &mut self.wanted[..self.neurons * tokens];
        let (predictors, ids) = (&*predictors, &mut self.ids);
        // Errors of several sequences are not told apart.
        let single = tokens == 1;
        if single {
            self.guessed = Some(bank);
        }
        let guess = &mut self.guess[..if single { self.neurons } else { 0 }];
        let errors = &self.errors[bank as usize];
        let kept = errors.kept();
        let clusters = self.neurons.div_ceil(CLUSTER);
        workers.for_each_part_then(
            (wanted, guess),
            (
                CLUSTER * tokens,
                clusters.div_ceil(GATE_PIECES * workers.threads()),
            ),
            &|c, wanted, guess| {
                let start = Instant::now();
                predictors.margins(cpu, bank, features, c * CLUSTER, wanted);
                if !guess.is_empty() {
                    guess.copy_from_slice(wanted);
                    let last = &errors.last[c * CLUSTER..];
                    for (margin, error) in wanted.iter_mut().zip(last) {
                        *margin += kept * error;
                    }
                }
                keep_wanted(wanted);
                alone.fetch_add(nanoseconds(start.elapsed()), Ordering::Relaxed);
            },
            &mut |c, wanted, _| {
                let start = ids.len();
                for (c, wanted) in (c..).zip(wanted.chunks(CLUSTER * tokens)) {
                    list_needed(c * CLUSTER, wanted, tokens, ids);
                }
                then(&ids[start..]);
            },
        );
        nanoseconds(together) + alone.into_inner() / workers.threads() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEURONS: usize = 2 * CLUSTER;

    /// What is kept of errors after some tokens, for which guesses are wrong by `error(token,
    /// neuron)`.
    fn kept(error: impl Fn(usize, usize) -> f32) -> f32 {
        let mut foresight = Foresight::new(32, NEURONS, 1, 2);
        for token in 0..40 {
            foresight.guess.fill(3.0);
            foresight.guessed = Some(1);
            assert!(foresight.guessed(1) && !foresight.guessed(0));
            for first in [0, CLUSTER] {
                let margins: Vec<f32> = (first..first + CLUSTER)
                    .map(|neuron| 3.0 + error(token, neuron))
                    .collect();
                foresight.learn(Cpu::detect(), 1, first, &margins);
            }
            assert!(!foresight.guessed(1));
        }
        assert_eq!(foresight.errors[0].kept(), 0.0);
        foresight.errors[1].kept()
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
