//! Hyper-connections: several residual streams, all read and changed by each mixer and each FFN.

use serde::{Deserialize, Serialize};

use super::{BadField, MAX_WIDTH, ModelConfig};

/// Most residual streams.
pub const MAX_STREAMS: u32 = 8;

/// Residual streams: each mixer and each FFN reads a mixture of them, and its output is added to all.
/// The embedding initialises every stream, and the head reads one more mixture.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HyperConnections {
    /// Streams, of `d_model` elements each.
    pub count: u32,
    /// Kind of mixture.
    pub mixing: Mixing,
}

/// Mixture of the streams that a mixer or an FFN reads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mixing {
    /// The mean of the normed streams, each element times a gate from a low-rank path
    /// (`modeling_qwen4_exp.py`). This norm replaces all norms before mixers, FFNs and the head.
    Gated {
        /// Width of the low-rank path.
        rank: u32,
    },
    /// A weighted sum of the streams; each stream becomes a sum of all by a matrix whose rows and columns
    /// sum to 1 (mHC, `modeling_deepseek_v4.py`).
    Sinkhorn {
        /// Steps that divide rows and columns by their sums.
        iterations: u32,
        /// Added to weights and to sums.
        eps: f32,
    },
}

/// Most steps of [`Mixing::Sinkhorn`].
const MAX_ITERATIONS: u32 = 1000;

impl Mixing {
    /// Whether its numbers are valid, and norms before mixers and FFNs are as it requires.
    fn is_sound(self, pre_norm: bool) -> bool {
        match self {
            Self::Gated { rank } => (1..=MAX_WIDTH).contains(&rank) && !pre_norm,
            Self::Sinkhorn { iterations, eps } => {
                let number = eps.is_finite() && eps > 0.0 && eps < 1.0;
                (1..=MAX_ITERATIONS).contains(&iterations) && number && pre_norm
            }
        }
    }
}

impl HyperConnections {
    /// Elements of all streams of a row.
    pub fn width(self, d_model: u32) -> usize {
        self.count as usize * d_model as usize
    }

    /// The first invalid or unsupported field.
    pub(super) fn bad(self, config: &ModelConfig) -> Option<BadField> {
        let (form, hyper) = (&config.form, self);
        let widest = MAX_WIDTH / config.d_model.max(1);
        let sized = (2..=widest.min(MAX_STREAMS)).contains(&hyper.count);
        let alone = form.streams.is_none() && form.layer_inputs.is_none();
        let plain = !form.parallel.is_parallel() && !form.post_norm && !form.layer_scale;
        let built = alone && plain && form.residual_scale == 1.0 && !form.layer_norm;
        if !(sized && built && hyper.mixing.is_sound(form.pre_norm)) {
            let expected = "2 to 8 streams, without other norms or factors";
            return BadField::some("hyper-connections", &hyper, expected);
        }
        None
    }
}
