//! Gates that fire above a cutoff per token: Gaussian top-k (Gemma 3n).
//!
//! The cutoff is the mean of all gates of a layer plus a multiple of their deviation, so computing
//! it takes all gates. [`CoarseTop`] scores all neurons with rows in two or three bits and
//! estimates the cutoff from the mean and deviation of the scores. Rounding widens the scores by
//! nearly the same amount for every token; three fitted numbers correct that. Scores are relative
//! to the estimated cutoff, in deviations.

use emberflow_kernels::{Compute, Cpu};

use crate::coarse::CoarseGate;
use crate::moments::Moments;
use crate::predict::{Features, Predictor, RANGE, Shared, SharedShape};

/// Linear fit of a token's cutoff from the moments of its scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CutoffFit {
    /// `cutoff = fixed + by_mean × mean + by_deviation × deviation`.
    fixed: f32,
    by_mean: f32,
    by_deviation: f32,
}

impl CutoffFit {
    /// Bytes in a file.
    pub const BYTES: usize = 12;

    /// Least squares fit for tokens with the moments `of` of their scores and the `cutoffs` of
    /// their gates.
    pub fn new(of: &[Moments], cutoffs: &[f32]) -> Self {
        let count = (of.len().max(1)) as f64;
        let average = |f: &dyn Fn(usize) -> f64| (0..of.len()).map(f).sum::<f64>() / count;
        let mean = |t: usize| of[t].mean;
        let deviation = |t: usize| of[t].deviation;
        let cutoff = |t: usize| f64::from(cutoffs[t]);
        let [m, s, c] = [average(&mean), average(&deviation), average(&cutoff)];
        let with = |a: &dyn Fn(usize) -> f64, b: &dyn Fn(usize) -> f64| average(&|t| a(t) * b(t));
        let (dm, ds) = (|t: usize| mean(t) - m, |t: usize| deviation(t) - s);
        let dc = |t: usize| cutoff(t) - c;
        // A small ridge keeps the solution finite if values do not vary.
        let ridge = 1e-9 * (m * m + s * s) + 1e-30;
        let [mm, ss, ms] = [
            with(&dm, &dm) + ridge,
            with(&ds, &ds) + ridge,
            with(&dm, &ds),
        ];
        let [mc, sc] = [with(&dm, &dc), with(&ds, &dc)];
        let det = mm * ss - ms * ms;
        let (by_mean, by_deviation) = ((mc * ss - sc * ms) / det, (sc * mm - mc * ms) / det);
        Self {
            fixed: (c - by_mean * m - by_deviation * s) as f32,
            by_mean: by_mean as f32,
            by_deviation: by_deviation as f32,
        }
    }

    pub fn to_bytes(self) -> Vec<u8> {
        let numbers = [self.fixed, self.by_mean, self.by_deviation];
        numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
    }

    /// `None` unless all three numbers are finite.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| {
            let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
            Some(f32::from_le_bytes(bytes)).filter(|n| n.is_finite())
        };
        Some(Self {
            fixed: number(0)?,
            by_mean: number(4)?,
            by_deviation: number(8)?,
        })
    }

    fn cutoff(&self, of: Moments) -> f32 {
        let [a, b, c] = [self.fixed, self.by_mean, self.by_deviation].map(f64::from);
        (a + b * of.mean + c * of.deviation) as f32
    }
}

/// Predictor of a layer whose gates fire above a cutoff.
pub struct CoarseTop {
    gate: CoarseGate,
    neurons: usize,
    fit: CutoffFit,
}

impl CoarseTop {
    /// `gate` holds the rows of all `neurons` of the layer.
    pub(crate) fn new(gate: CoarseGate, neurons: usize, fit: CutoffFit) -> Self {
        Self { gate, neurons, fit }
    }

    /// Per-token memory for inputs of `d` elements.
    pub(crate) fn shared_shape(d: usize, neurons: usize) -> SharedShape {
        SharedShape {
            scores: neurons,
            ..CoarseGate::shared_shape(d)
        }
    }
}

impl Predictor for CoarseTop {
    fn shape(&self) -> SharedShape {
        SharedShape {
            scores: self.neurons,
            ..self.gate.shape()
        }
    }

    fn bytes(&self) -> u64 {
        self.gate.bytes() + CutoffFit::BYTES as u64
    }

    fn prepare(&self, on: &Compute, input: Features<'_>, shared: &mut Shared) {
        let tokens = input.tokens();
        let scores = &mut shared.scores[..self.neurons * tokens];
        let part = RANGE * tokens;
        (on.workers).for_each_part_mut(scores, part, &|_, block, scores| {
            self.gate.products(on.cpu, input, block * RANGE, scores);
        });
        shared.cutoffs.clear();
        shared.deviations.clear();
        for of in shared.sums.moments(scores, tokens) {
            shared.cutoffs.push(self.fit.cutoff(of));
            shared
                .deviations
                .push((of.deviation as f32).max(f32::MIN_POSITIVE));
        }
    }

    fn scores(
        &self,
        _: Cpu,
        input: Features<'_>,
        shared: &Shared,
        first: usize,
        scores: &mut [f32],
    ) {
        let tokens = input.tokens();
        let products = &shared.scores[first * tokens..][..scores.len()];
        let rows = scores
            .chunks_exact_mut(tokens)
            .zip(products.chunks_exact(tokens));
        for (scores, products) in rows {
            for (t, (score, product)) in scores.iter_mut().zip(products).enumerate() {
                *score = (product - shared.cutoffs[t]) / shared.deviations[t];
            }
        }
    }

    fn thresholds(&self, cpu: Cpu, first: usize, thresholds: &mut [f32]) {
        self.gate.thresholds(cpu, first, thresholds);
    }

    fn cutoffs<'s>(&self, shared: &'s Shared) -> &'s [f32] {
        &shared.cutoffs
    }
}

/// Builds a predictor of `neurons` neurons from the parts of its payload.
pub(crate) fn assemble(gate: CoarseGate, neurons: usize, fit: &[u8]) -> Option<Box<dyn Predictor>> {
    let fit = CutoffFit::from_bytes(fit)?;
    Some(Box::new(CoarseTop::new(gate, neurons, fit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fit_undoes_what_rounding_adds_to_the_deviation() {
        let of: Vec<Moments> = (0..50)
            .map(|t| Moments {
                mean: -0.3 + 0.01 * f64::from(t % 7),
                deviation: 1.1 + 0.02 * f64::from(t % 11),
            })
            .collect();
        let truth = |of: &Moments| (0.2 + of.mean + 1.645 * 0.9 * of.deviation) as f32;
        let cutoffs: Vec<f32> = of.iter().map(truth).collect();
        let fit = CutoffFit::new(&of, &cutoffs);
        for (of, cutoff) in of.iter().zip(&cutoffs) {
            assert!((fit.cutoff(*of) - cutoff).abs() < 1e-3, "{fit:?}");
        }
        assert_eq!(CutoffFit::from_bytes(&fit.to_bytes()), Some(fit));
        assert_eq!(CutoffFit::from_bytes(&[0; 11]), None);
        assert_eq!(CutoffFit::from_bytes(&[0xff; 12]), None);
        // Tokens with equal moments, and no tokens.
        let same = CutoffFit::new(&[of[0]; 4], &[2.0; 4]);
        assert!((same.cutoff(of[0]) - 2.0).abs() < 1e-4, "{same:?}");
        assert!(CutoffFit::from_bytes(&CutoffFit::new(&[], &[]).to_bytes()).is_some());
    }
}
