//! Rotary position embeddings.

use serde::{Deserialize, Serialize};

/// Scaling of the rotary frequencies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RopeScaling {
    /// Plain RoPE.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// Divisor of every frequency.
        factor: f32,
    },
    /// Llama 3.1 and later.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f32,
        /// Wavelengths from `original_context / low_freq_factor` on are divided.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are unchanged.
        high_freq_factor: f32,
        /// Context length before scaling, in tokens.
        original_context: u32,
    },
    /// Only the first pairs rotate, with their frequencies among all pairs (Gemma 4).
    Proportional {
        /// Pairs that rotate.
        pairs: u32,
    },
    /// YaRN (arXiv 2309.00071).
    Yarn {
        /// Divisor of the low frequencies.
        factor: f32,
        /// Frequencies with more rotations over the original context are unchanged.
        beta_fast: f32,
        /// Frequencies with fewer rotations over the original context are divided.
        beta_slow: f32,
        /// Context length before scaling, in tokens.
        original_context: u32,
        /// Factor of the rotated queries and keys.
        attention_factor: f32,
        /// Whether the ends of the ramp between them are rounded outwards.
        truncate: bool,
    },
    /// LongRoPE (Phi-3): every frequency has its own divisor.
    Long {
        /// Divisors in contexts of up to `original_context` tokens.
        short: Vec<f32>,
        /// Divisors in longer ones.
        long: Vec<f32>,
        /// Factor of the rotated queries and keys.
        attention_factor: f32,
        /// The same with the long divisors, if it differs (PhiMoE).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        long_attention_factor: Option<f32>,
        /// Context length before scaling, in tokens.
        original_context: u32,
    },
}

/// YaRN's factor of queries and of keys, for a scaling and the weight of its logarithm.
pub(crate) fn yarn_attention(factor: f32, weight: f32) -> f32 {
    if factor > 1.0 {
        (0.1 * f64::from(weight) * f64::from(factor).ln() + 1.0) as f32
    } else {
        1.0
    }
}

impl RopeScaling {
    /// Factor of the rotated queries and keys in sequences of up to `context` positions.
    pub fn attention_factor(&self, context: usize) -> f32 {
        match *self {
            Self::Long {
                long_attention_factor: Some(factor),
                original_context,
                ..
            } if context > original_context as usize => factor,
            Self::Yarn {
                attention_factor, ..
            }
            | Self::Long {
                attention_factor, ..
            } => attention_factor,
            Self::None | Self::Linear { .. } | Self::Llama3 { .. } | Self::Proportional { .. } => {
                1.0
            }
        }
    }

    /// Whether the factors give `frequencies` finite, positive frequencies.
    pub(super) fn is_sound(&self, frequencies: u32) -> bool {
        let positive = |x: f32| x.is_finite() && x > 0.0;
        match *self {
            Self::None => true,
            Self::Linear { factor } => positive(factor),
            Self::Proportional { pairs } => pairs <= frequencies,
            Self::Long {
                ref short,
                ref long,
                attention_factor,
                long_attention_factor,
                original_context,
            } => {
                let sound = |divisors: &Vec<f32>| {
                    divisors.len() == frequencies as usize && divisors.iter().all(|&x| positive(x))
                };
                let factors = [attention_factor, long_attention_factor.unwrap_or(1.0)];
                sound(short)
                    && sound(long)
                    && factors.into_iter().all(positive)
                    && original_context > 0
            }
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                positive(factor)
                    && positive(low_freq_factor)
                    && positive(high_freq_factor)
                    && low_freq_factor <= high_freq_factor
                    && original_context > 0
            }
            Self::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_context,
                attention_factor,
                ..
            } => {
                [factor, beta_fast, beta_slow, attention_factor]
                    .into_iter()
                    .all(positive)
                    && original_context > 0
            }
        }
    }
}

/// Rotary position embedding, rotate-half convention (readers un-permute checkpoints stored
/// interleaved).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f32,
    /// Dimensions per head that are rotated: the first ones (even, ≤ head_dim); 0 without a rotary
    /// embedding.
    pub dims: u32,
    /// Frequency scaling.
    pub scaling: RopeScaling,
}
