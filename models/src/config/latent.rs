//! Latent attention.

use serde::{Deserialize, Serialize};

use super::{BadField, MAX_HEAD_DIM, MAX_WIDTH, ModelConfig};

/// Attention whose keys and values are products of one latent vector for each position (MLA,
/// DeepSeek-V2). [`ModelConfig::head_dim`] is the width of a query, the last
/// [`Rope::dims`](super::Rope::dims) elements of which are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LatentShape {
    /// Elements of the latent vector from which queries are projected; `None` if they are projected
    /// from the layer's input.
    pub query_rank: Option<u32>,
    /// Elements of the latent vector of keys and values.
    pub rank: u32,
    /// Elements of a head's value.
    pub value_dim: u32,
    /// Epsilon of the norms of latent vectors.
    pub norm_eps: f32,
    /// Each head's output is multiplied by the sigmoid of a gate, computed from the layer's input (Ling
    /// 3).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gated: bool,
}

/// Elements of the vectors of latent attention, and heads.
#[derive(Debug, Clone, Copy)]
pub struct LatentSizes {
    /// Heads.
    pub heads: usize,
    /// Elements of a query.
    pub query: usize,
    /// Rotated elements of a query.
    pub rotated: usize,
    /// Elements of the latent vector.
    pub rank: usize,
    /// Elements of the queries' latent vector; 0 without.
    pub query_rank: usize,
    /// Elements of a head's value.
    pub value: usize,
    /// Gates of a token: one for each head, or 0.
    pub gates: usize,
}

impl LatentSizes {
    /// Sizes for a model with latent attention.
    pub fn new(c: &ModelConfig, shape: LatentShape) -> Self {
        let n = |number: u32| number as usize;
        Self {
            heads: n(c.heads),
            query: n(c.head_dim),
            rotated: n(c.rope.dims),
            rank: n(shape.rank),
            query_rank: shape.query_rank.map_or(0, n),
            value: n(shape.value_dim),
            gates: n(c.heads) * usize::from(shape.gated),
        }
    }

    /// Elements of a query that are not rotated.
    pub fn plain(self) -> usize {
        self.query - self.rotated
    }

    /// Elements stored per position.
    pub fn stored(self) -> usize {
        self.rank + self.rotated
    }
}

impl ModelConfig {
    /// Elements of a key as attention multiplies it.
    pub fn key_width(&self) -> usize {
        let latent = self.form.latent.map(|shape| LatentSizes::new(self, shape));
        latent.map_or(self.head_dim as usize, LatentSizes::stored)
    }

    /// Invalid latent attention.
    pub(super) fn bad_latent(&self) -> Option<BadField> {
        let latent = self.form.latent?;
        for (key, value, most) in [
            ("rank of keys and values", latent.rank, MAX_HEAD_DIM),
            ("width of values", latent.value_dim, MAX_HEAD_DIM),
            ("rank of queries", latent.query_rank.unwrap_or(1), MAX_WIDTH),
        ] {
            if !(1..=most).contains(&value) {
                return BadField::some(key, &value, format!("1 to {most}"));
            }
        }
        if self.rope.dims == 0 || self.rope.dims >= self.head_dim {
            let expected = format!("1 to less than head_dim = {}", self.head_dim);
            return BadField::some("rope.dims", &self.rope.dims, expected);
        }
        let stored = latent.rank + self.rope.dims;
        let widest = stored.max(self.head_dim).max(latent.value_dim);
        if stored > MAX_HEAD_DIM || self.heads > MAX_WIDTH / widest {
            let expected = format!("at most {MAX_HEAD_DIM}, and {MAX_WIDTH} for all heads");
            return BadField::some("elements of a key", &widest, expected);
        }
        if !(latent.norm_eps.is_finite() && latent.norm_eps > 0.0 && latent.norm_eps < 1.0) {
            return BadField::some("epsilon", &latent.norm_eps, "above 0 and below 1");
        }
        let form = &self.form;
        let biases = self.qkv_bias || self.o_bias;
        let norms = self.qk_norm || form.value_norm;
        let others = form.short_conv.is_some() || form.delta_net.is_some();
        let scores = form.sinks || form.attention_cap.is_some() || form.output_gate;
        let two_ropes = form.local_rope.is_some();
        let clipped = self.clip_qkv.is_some() || form.shared_kv > 0;
        if biases || norms || others || scores || two_ropes || clipped {
            let expected = "absent, as attention has what it is not implemented with";
            return BadField::some("latent", &latent, expected);
        }
        None
    }
}
