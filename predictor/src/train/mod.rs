//! Trains the predictor of a bank from its gate rows and its inputs over a text.
//!
//! No gradients: each design has a closed form. The gate is known, so training only decides how to
//! preserve as much of it as the bytes allow on the inputs of real text. Sign bits need no
//! training, a low-rank pair is a reduced-rank regression (`low_rank.rs`), a coarse gate is its
//! rows in two or three bits (`coarse.rs`); the latter two are rounded against the inputs'
//! covariance (`rounding/`). Thresholds come from held-out text (`calibrate.rs`).

mod assemble;
mod calibrate;
mod coarse;
mod low_rank;
mod score;

use std::sync::{Mutex, MutexGuard, PoisonError};

use emberflow_kernels::{Compute, DType, Narrow, sign_bytes};
use half::f16;

use crate::coarse::CoarseGate;
use crate::low_rank::LowRankSpec;
use crate::predict::{Predictor, Reads};
use crate::quality::Quality;
use crate::rounding::{Covariance, Rows, round};
use crate::section::{Kind, NewBank};
use crate::thresholds::Thresholds;
use assemble::assemble;
use calibrate::{Curve, cut_for};

/// Tokens to fit a neuron's two-parameter curve to.
const CURVE_TOKENS: usize = 16384;

/// Share of the misses allowed by the recall that calibration uses: other text has slightly more.
const MISSES: f64 = 0.95;

/// Type of predictor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Design {
    /// Signs of gate rows and inputs; one limit per layer.
    Sign,
    /// Two thin factors.
    LowRank {
        /// Rank.
        rank: usize,
        /// Format of both factors.
        dtype: DType,
    },
    /// Gate rows in two or three bits.
    Coarse(Narrow),
}

impl Design {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sign => "sign",
            Self::LowRank { .. } => "low-rank",
            Self::Coarse(_) => "coarse",
        }
    }

    /// Bytes of the weights for `neurons` gates of `d` elements; saturates.
    pub fn bytes(self, d: usize, neurons: usize) -> usize {
        match self {
            Self::Sign => neurons.saturating_mul(sign_bytes(d)),
            Self::LowRank { rank, dtype } => {
                let fc1 = rank.saturating_mul(dtype.row_bytes(d));
                let fc2 = dtype.row_bytes(rank).saturating_add(2);
                fc1.saturating_add(neurons.saturating_mul(fc2))
            }
            Self::Coarse(narrow) => neurons.saturating_mul(narrow.row_bytes(d).saturating_add(2)),
        }
    }

    /// The low-rank pair with the largest rank that fits in `bytes`; `None` if not even rank 32
    /// fits.
    pub fn low_rank_within(bytes: usize, d: usize, neurons: usize, dtype: DType) -> Option<Self> {
        let widest = (1..=d / 32).rev().map(|r| 32 * r);
        widest
            .map(|rank| Self::LowRank { rank, dtype })
            .find(|design| design.bytes(d, neurons) <= bytes)
    }
}

/// Inputs of one bank over a text, after the norm, `[tokens × d]`.
#[derive(Clone, Copy)]
pub struct Texts<'a> {
    /// Training text.
    pub train: &'a [f32],
    /// Text for calibrating the thresholds.
    pub calibrate: &'a [f32],
    /// Text for measuring the quality.
    pub measure: &'a [f32],
}

/// Which gates fire.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fires {
    /// Gates above a constant.
    Above(f32),
    /// Gates above the mean of all gates of their token plus this multiple of their deviation.
    Top(f32),
}

/// A layer to train a predictor for.
#[derive(Clone, Copy)]
pub struct GateLayer<'a> {
    /// Elements of an input.
    pub d: usize,
    /// Gate rows, `[neurons × d]`, in packed order.
    pub gate: &'a [f32],
    /// Which gates fire.
    pub fires: Fires,
    /// The layer's inputs.
    pub texts: Texts<'a>,
    /// Outliers of the inputs are pruned ([`Cpu::pruning`](emberflow_kernels::Cpu::pruning)).
    pub pruned: bool,
    /// Recall to calibrate for, 0 to 1.
    pub recall: f64,
}

/// A trained predictor.
pub struct Made {
    /// Record and weights.
    pub bank: NewBank,
    /// Nanoseconds per token for all neurons of the bank, on this machine.
    pub ns_per_token: f64,
}

/// Trains predictors for the layers of a model.
pub struct Trainer<'a> {
    on: &'a Compute,
}

impl<'a> Trainer<'a> {
    /// A trainer that computes on `on`.
    pub fn new(on: &'a Compute) -> Self {
        Self { on }
    }

    /// Uncentred covariance of the inputs, `[d × d]`.
    pub fn covariance(&self, d: usize, inputs: &[f32]) -> Vec<f32> {
        let mut covariance = Covariance::new(d);
        covariance.add(self.on, inputs);
        covariance.mean()
    }

    /// Trains the predictor of a layer; `covariance` is that of its training inputs. `None` if its
    /// weights are not finite. If gates have a cutoff per token, only coarse gates can be trained.
    pub fn make(&self, design: Design, layer: &GateLayer<'_>, covariance: &[f32]) -> Option<Made> {
        let GateLayer { d, gate, .. } = *layer;
        let neurons = gate.len() / d;
        let rows = Rows { d, values: gate };
        let mut parts = match design {
            Design::Sign => {
                let row = sign_bytes(d);
                let mut signs = vec![0; neurons * row];
                for (gate, signs) in gate.chunks_exact(d).zip(signs.chunks_exact_mut(row)) {
                    self.on.cpu.sign_bits(gate, signs);
                }
                vec![signs]
            }
            Design::LowRank { rank, dtype } => {
                low_rank::make(self.on, rows, covariance, rank, dtype)?.into()
            }
            Design::Coarse(narrow) => {
                let rows = round(self.on, rows, covariance, &coarse::levels(narrow));
                match layer.fires {
                    Fires::Above(_) => vec![rows],
                    Fires::Top(_) => self.with_cutoffs(narrow, rows, layer),
                }
            }
        };
        let size = [d, neurons];
        let mut kind = kind_of(design, layer.fires, size);
        let scorer = assemble(&kind, size, &parts, Thresholds::One(0.0))?;
        let fitted = !matches!(design, Design::Sign);
        let thresholds = self.calibrate(scorer.as_ref(), fitted, layer);
        let predictor = match kind {
            Kind::Sign { .. } => {
                let limit = -thresholds.first().copied().unwrap_or(0.0);
                kind = Kind::Sign {
                    limit: limit.clamp(0.0, d as f32) as u32,
                };
                assemble(&kind, size, &parts, Thresholds::One(0.0))?
            }
            _ => {
                let stored = thresholds.iter().flat_map(|&t| {
                    let t = f16::from_f32(t.clamp(-65504.0, 65504.0));
                    t.to_bits().to_le_bytes()
                });
                let stored: Vec<u8> = stored.collect();
                parts.push(stored.clone());
                assemble(&kind, size, &parts, Thresholds::Each(stored.into()))?
            }
        };
        let quality = self.measure(predictor.as_ref(), layer);
        let ns_per_token = self.time(predictor.as_ref(), layer);
        Some(Made {
            bank: NewBank {
                kind,
                quality,
                parts,
            },
            ns_per_token,
        })
    }

    /// Coarse rows, and the fitted parameters of the cutoffs.
    fn with_cutoffs(&self, narrow: Narrow, rows: Vec<u8>, layer: &GateLayer<'_>) -> Vec<Vec<u8>> {
        let stored = rows.clone().into();
        let gate = CoarseGate::new(narrow, stored, layer.d, Thresholds::One(0.0));
        let fit = self.fit_cutoffs(&gate, layer, &some_inputs(layer));
        vec![rows, fit.to_bytes()]
    }

    /// The smallest magnitude of an activated gate that keeps a `share` of the (neuron, token)
    /// pairs of the calibration text, and the quality on the measurement text.
    pub fn magnitude(
        &self,
        layer: &GateLayer<'_>,
        share: f64,
        activate: &(dyn Fn(&mut [f32]) + Sync),
    ) -> (f32, Quality) {
        // Some neurons per block are a sufficient sample.
        let found = Mutex::new(Vec::new());
        self.for_each_block(layer, layer.texts.calibrate, &|_, gates| {
            activate(gates);
            let mut some: Vec<f32> = gates.iter().step_by(7).map(|g| g.abs()).collect();
            lock(&found).append(&mut some);
        });
        let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        let threshold = cut_for(&mut found, share);
        let quality = Mutex::new(Quality::default());
        self.for_each_block(layer, layer.texts.measure, &|_, gates| {
            activate(gates);
            let mut q = Quality::default();
            gates
                .iter()
                .for_each(|g| q.count(g.abs() >= threshold, true));
            *lock(&quality) += q;
        });
        let quality = quality.into_inner().unwrap_or_else(PoisonError::into_inner);
        (threshold, quality)
    }

    /// Thresholds by neuron.
    fn calibrate(&self, scorer: &dyn Predictor, fitted: bool, layer: &GateLayer<'_>) -> Vec<f32> {
        let neurons = layer.gate.len() / layer.d;
        // Curves are fitted to the training text, the probability to text that nothing was fitted
        // to.
        let curves = Mutex::new(vec![None; neurons]);
        let some = some_inputs(layer);
        if fitted {
            self.score(scorer, layer, &some, &|first, over, scores| {
                let tokens = some.len() / layer.d;
                let rows = over.chunks_exact(tokens).zip(scores.chunks_exact(tokens));
                for (i, (over, scores)) in rows.enumerate() {
                    let curve = Curve::fit(scores, |t| over[t] > 0.0);
                    lock(&curves)[first + i] = Some(curve);
                }
            });
        }
        let curves = curves.into_inner().unwrap_or_else(PoisonError::into_inner);
        let logit = |n: usize, score: f32| curves[n].map_or(score, |c: Curve| c.logit(score));
        let logits = Mutex::new(Vec::new());
        self.score(
            scorer,
            layer,
            layer.texts.calibrate,
            &|first, over, scores| {
                let tokens = layer.texts.calibrate.len() / layer.d;
                let pairs = over.iter().zip(scores).enumerate();
                let mut firing: Vec<f32> = pairs
                    .filter(|(_, (over, _))| **over > 0.0)
                    .map(|(i, (_, &score))| logit(first + i / tokens, score))
                    .collect();
                lock(&logits).append(&mut firing);
            },
        );
        let mut logits = logits.into_inner().unwrap_or_else(PoisonError::into_inner);
        let cut = cut_for(&mut logits, 1.0 - MISSES * (1.0 - layer.recall));
        let score = |curve: &Option<Curve>| curve.map_or(cut, |c| c.score(cut));
        curves.iter().map(score).collect()
    }

    /// Measures the quality.
    fn measure(&self, predictor: &dyn Predictor, layer: &GateLayer<'_>) -> Quality {
        let quality = Mutex::new(Quality::default());
        let tokens = layer.texts.measure.len() / layer.d;
        self.score(
            predictor,
            layer,
            layer.texts.measure,
            &|first, over, scores| {
                let mut thresholds = vec![0.0; scores.len() / tokens.max(1)];
                predictor.thresholds(self.on.cpu, first, &mut thresholds);
                let mut q = Quality::default();
                let rows = over.chunks_exact(tokens).zip(scores.chunks_exact(tokens));
                for ((over, scores), threshold) in rows.zip(&thresholds) {
                    for (over, score) in over.iter().zip(scores) {
                        q.count(*over > 0.0, score >= threshold);
                    }
                }
                *lock(&quality) += q;
            },
        );
        quality.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The kind of a predictor with `design`.
fn kind_of(design: Design, fires: Fires, [d, neurons]: [usize; 2]) -> Kind {
    match design {
        Design::Sign => Kind::Sign { limit: 0 },
        Design::LowRank { rank, dtype } => Kind::LowRank(LowRankSpec {
            d,
            neurons,
            rank,
            fc1: dtype,
            fc2: dtype,
            reads: Reads::Normed,
            relu: false,
        }),
        Design::Coarse(narrow) => match fires {
            Fires::Above(_) => Kind::Coarse(narrow),
            Fires::Top(_) => Kind::CoarseTop(narrow),
        },
    }
}

/// Inputs of the training text for fitting a few parameters.
fn some_inputs(layer: &GateLayer<'_>) -> Vec<f32> {
    let tokens = layer.texts.train.len() / layer.d;
    let step = tokens.div_ceil(CURVE_TOKENS).max(1);
    let some = layer.texts.train.chunks_exact(layer.d).step_by(step);
    some.flatten().copied().collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
