//! Content of the rows of mixers: every kind adds an average of the last tokens' codes to the context.
//!
//! | mixer | average |
//! |---|---|
//! | attention, latent attention | over a window (`window.rs`); over all tokens without rotary positions |
//! | Mamba-2, DeltaNet | s ← λ·s + code, where λ is the wanted correlation |
//! | short convolution | over its taps, fewer than wanted |
//!
//! Gates, steps, keys and queries of the recurrent mixers read the bias group, so they are nearly equal for
//! all tokens. Where an activation follows the convolution of the codes, these are small, so that it is
//! nearly linear.

use emberflow_models::config::{DeltaNetShape, LatentShape, MambaShape, MixerKind};
use emberflow_models::names::{Role, TensorId};

use super::normal::bisect;
use super::random::word;
use super::stream::{BLOCK, Fill, LEAK, RowPlan, SCORE_NOISE, Segment, Stream, random, whole};

/// Deviation of the codes that a DeltaNet convolves: if smaller, its norm's epsilon would matter; if
/// larger, the activation would add a constant.
const DELTA_CODE: f64 = 0.15;
/// The same for Mamba-2.
const MAMBA_CODE: f64 = 0.05;
/// Input of the activation for keys and queries of DeltaNets, and for `B` and `C` of Mamba-2.
const LEVEL: f64 = 2.0;
/// Input of the gates of outputs.
const OPEN: f64 = 1.0;
/// Step of Mamba-2.
const STEP: f64 = 0.05;

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Weights with a sum of squares of 1 in geometric progression, for averages with this correlation with
/// those of the next token; equal weights if that is impossible.
fn averaging(taps: usize, correlation: f64) -> Vec<f32> {
    let square_sum = |ratio: f64| (0..taps as i32).map(|age| ratio.powi(2 * age)).sum::<f64>();
    let found = |ratio: f64| {
        let next: f64 = (1..taps as i32).map(|age| ratio.powi(2 * age - 1)).sum();
        next / square_sum(ratio)
    };
    let ratio = bisect(0.0, 1.0, |ratio| found(ratio) - correlation);
    let newest = 1.0 / square_sum(ratio).sqrt();
    let weight = |age: i32| (newest * ratio.powi(age)) as f32;
    (0..taps as i32).rev().map(weight).collect()
}

/// The x whose softplus is `y`.
fn inverse_softplus(y: f64) -> f64 {
    y.exp_m1().ln()
}

impl Stream {
    /// Row `row` of a matrix of a mixer other than attention, or of an additional matrix of
    /// attention.
    pub fn mixer_row(&self, id: TensorId, row: usize) -> Option<RowPlan> {
        let noise = |deviation: f64| random(self.seed, id, row, deviation);
        match (id.role, self.config.mixer_of(id.layer)) {
            (Role::O, MixerKind::Latent(latent)) => {
                let values = self.config.heads as usize * latent.value_dim as usize;
                Some(self.output(id, row, values, self.window.energy))
            }
            (Role::Q, MixerKind::Latent(latent)) => Some(self.latent_query(id, row, latent)),
            (Role::LatentQ, _) => Some(if row < BLOCK {
                self.reading(1.0, noise(0.0))
            } else {
                self.token_reader(id, row, 1.0)
            }),
            (Role::LatentKv, MixerKind::Latent(latent)) => {
                match row.checked_sub(latent.rank as usize) {
                    None => Some(self.token_reader(id, row, 1.0)),
                    Some(at) => {
                        let pairs = self.window.key.len();
                        let key = self.window.key[at % pairs][at / pairs];
                        Some(self.reading(key, noise(self.read_noise(self.score_noise()))))
                    }
                }
            }
            (Role::LatentKeys, MixerKind::Latent(latent)) => {
                let plain = (self.config.head_dim - self.config.rope.dims) as usize;
                let pairs = plain as f64 * f64::from(latent.rank);
                let deviation = SCORE_NOISE / self.score_scale() / pairs.sqrt();
                Some(whole(plain, noise(deviation)))
            }
            (Role::LatentValues, MixerKind::Latent(latent)) => {
                let rank = latent.rank;
                Some(whole(rank as usize, noise(1.0 / f64::from(rank).sqrt())))
            }
            (Role::ConvIn, _) => {
                let d = self.config.d_model as usize;
                Some(if row < 2 * d {
                    self.reading(1.0, noise(self.read_noise(LEAK)))
                } else {
                    self.token_reader(id, row, 1.0)
                })
            }
            (Role::ConvOut, _) => Some(self.output(id, row, self.config.d_model as usize, 1.0)),
            (_, MixerKind::DeltaNet(net)) => self.delta_row(id, row, net),
            (_, MixerKind::Mamba(mamba) | MixerKind::Beside(mamba)) => {
                self.mamba_row(id, row, mamba)
            }
            _ => None,
        }
    }

    fn delta_row(&self, id: TensorId, row: usize, net: DeltaNetShape) -> Option<RowPlan> {
        let rest = random(self.seed, id, row, self.read_noise(LEAK));
        Some(match id.role {
            Role::DeltaIn if row < 2 * net.keys() => self.reading(LEVEL, rest),
            Role::DeltaIn => self.token_reader(id, row, DELTA_CODE),
            Role::DeltaGate => self.reading(OPEN, rest),
            Role::DeltaBeta => {
                let retention = self.correlation.sqrt();
                self.reading((1.0 / retention - 1.0).ln(), rest)
            }
            Role::DeltaDecay => self.reading(0.0, rest),
            Role::DeltaOut => {
                let value = DELTA_CODE / 2.0 * (1.0 - self.correlation.sqrt());
                let square =
                    value.powi(2) / (1.0 - self.correlation.powi(2)) / f64::from(net.key_dim);
                let normed = square / (square + f64::from(self.config.rms_eps));
                self.output(id, row, net.values(), normed * silu(OPEN).powi(2))
            }
            _ => return None,
        })
    }

    fn mamba_row(&self, id: TensorId, row: usize, mamba: MambaShape) -> Option<RowPlan> {
        let rest = random(self.seed, id, row, self.read_noise(LEAK));
        let values = mamba.values();
        Some(match id.role {
            Role::MambaIn if row < values => self.reading(OPEN, rest),
            Role::MambaIn if row < 2 * values => self.token_reader(id, row, MAMBA_CODE),
            Role::MambaIn if row < values + mamba.channels() => self.reading(LEVEL, rest),
            Role::MambaIn => self.reading(0.0, rest),
            Role::MambaOut => self.output(id, row, values, 1.0),
            _ => return None,
        })
    }

    /// A row of the queries, which reads the latent vector of queries or the residual stream.
    fn latent_query(&self, id: TensorId, row: usize, latent: LatentShape) -> RowPlan {
        let (width, pairs) = (self.config.head_dim as usize, self.window.query.len());
        let rotated = (row % width).checked_sub(width - 2 * pairs);
        let (amplitude, deviation) = match rotated {
            None => (0.0, 1.0),
            Some(at) if at < pairs => (self.window.query[at], self.score_noise()),
            Some(_) => (0.0, self.score_noise()),
        };
        let noise = |deviation| random(self.seed, id, row, deviation);
        let Some(rank) = latent.query_rank.map(|rank| rank as usize) else {
            return self.reading(amplitude, noise(self.read_noise(deviation)));
        };
        let others = (rank - BLOCK) / BLOCK;
        let per = 1.0 / ((others * BLOCK).max(1) as f64).sqrt();
        let segment = |blocks, fill| Segment { blocks, fill };
        [
            segment(1, Fill::Constant((amplitude / BLOCK as f64) as f32)),
            segment(others, noise(deviation * per)),
            segment(0, Fill::Constant(0.0)),
        ]
    }

    /// Weights of a convolution for channel `row`, the current token last.
    pub fn taps(&self, id: TensorId, row: usize, taps: usize) -> Vec<f32> {
        if id.role == Role::Conv {
            return averaging(taps, self.correlation);
        }
        let key = super::random::stream(self.seed, id, row);
        let leak = |tap: usize| match word(key, tap as u64) & 1 {
            0 => -LEAK as f32,
            _ => LEAK as f32,
        };
        let mut weights: Vec<f32> = (0..taps).map(leak).collect();
        if let Some(last) = weights.last_mut() {
            *last = 1.0;
        }
        weights
    }

    /// Elements of a vector of a mixer.
    pub fn mixer_vector(&self, id: TensorId, cols: usize) -> Option<Vec<f32>> {
        let log = self.correlation.ln();
        let value = match id.role {
            Role::LatentQNorm | Role::LatentKvNorm | Role::DeltaNorm | Role::MambaNorm => 1.0,
            Role::MambaStep => inverse_softplus(STEP),
            Role::MambaRate => log / STEP,
            Role::MambaSkip => 1.0,
            // half of the decay; the other half is β's
            Role::DeltaStep => inverse_softplus(1.0),
            Role::DeltaRate => log / 2.0,
            _ => return None,
        };
        Some(vec![value as f32; cols])
    }
}
