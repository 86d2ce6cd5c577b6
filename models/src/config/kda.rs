//! Kimi Delta Attention.

use serde::{Deserialize, Serialize};

use super::{BadField, MAX_COUNT, MAX_HEAD_DIM, MAX_TAPS, MAX_WIDTH, ModelConfig};

/// Kimi Delta Attention instead of attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KdaLayers {
    /// The layers that have it, ascending.
    pub layers: Vec<u32>,
    /// Its sizes.
    pub shape: KdaShape,
}

/// Sizes of Kimi Delta Attention.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KdaShape {
    /// Taps of its convolutions, including the current token.
    pub taps: u32,
    /// Heads of queries, of keys and of values.
    pub heads: u32,
    /// Width of a query, a key, a value, and of the low-rank inputs of decays and gates.
    pub dim: u32,
    /// Decays and gates are projected directly from the layer's input, without low rank `dim` (Ling
    /// 3).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub direct: bool,
    /// Least logarithm of a decay, below 0 (Ling 3): decays are `exp(bound · σ(−rate · x))` of a
    /// projection `x`, not `exp(rate · softplus(x))`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<f32>,
}

impl KdaShape {
    /// Width of all values, of all keys, and of all queries.
    pub fn values(self) -> usize {
        self.heads as usize * self.dim as usize
    }
}

impl ModelConfig {
    /// Invalid Kimi Delta Attention.
    pub(super) fn bad_kda(&self) -> Option<BadField> {
        let layers = self.form.kda.as_ref()?;
        let kda = layers.shape;
        for (key, value, least, most) in [
            ("taps of delta attention", kda.taps, 2, MAX_TAPS),
            ("heads of delta attention", kda.heads, 1, MAX_COUNT),
            ("head width of delta attention", kda.dim, 1, MAX_HEAD_DIM),
        ] {
            if !(least..=most).contains(&value) {
                return BadField::some(key, &value, format!("{least} to {most}"));
            }
        }
        if 3 * kda.values() > MAX_WIDTH as usize {
            let expected = format!("at most {MAX_WIDTH}");
            return BadField::some("channels of delta attention", &(3 * kda.values()), expected);
        }
        if let Some(bound) = kda.bound
            && !(bound.is_finite() && bound < 0.0)
        {
            return BadField::some("bound of decays", &bound, "below 0");
        }
        if layers.layers.is_empty() || !self.are_layers(&layers.layers) {
            let expected = format!("layers below {}, ascending", self.layers);
            return BadField::some("layers with delta attention", &layers.layers, expected);
        }
        let form = &self.form;
        let others = form.short_conv.is_some() || form.delta_net.is_some();
        if form.shared_kv > 0 || others {
            let expected = "absent, with shared keys or recurrent mixers of other kinds";
            return BadField::some("kda", layers, expected);
        }
        None
    }
}
