//! Further residual streams, and per-layer inputs.

use serde::{Deserialize, Serialize};

use super::{BadField, MAX_VOCAB, MAX_WIDTH, ModelConfig};

/// Residual streams in addition to the one that layers read and change, as in
/// `modeling_gemma3n.py`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Streams {
    /// Total number of streams; layers read and change the first.
    pub count: u32,
    /// Rank of the low-rank path parallel to attention (LAuReL).
    pub laurel: u32,
    /// Elements of a token's input to each layer.
    pub per_layer: u32,
    /// Rows of the table of these inputs; tokens beyond it use row 0.
    pub per_layer_vocab: u32,
    /// Whether the first stream is scaled before it is combined with the layer's input.
    pub scaled: bool,
}

/// A vector for each layer and token, computed from a table and from the embedding. A layer ends by
/// adding it through a gate and a projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInputs {
    /// Elements of a token's input to each layer.
    pub width: u32,
    /// Rows of the table; tokens beyond it use row 0.
    pub vocab: u32,
}

impl ModelConfig {
    /// Invalid per-layer inputs.
    pub(super) fn bad_layer_inputs(&self) -> Option<BadField> {
        let inputs = self.form.layer_inputs?;
        let widest = self.d_model.min(MAX_WIDTH / self.layers);
        let sound = (1..=widest).contains(&inputs.width) && (1..=MAX_VOCAB).contains(&inputs.vocab);
        if !sound || self.form.streams.is_some() {
            let expected = format!(
                "a width up to {widest} and up to {MAX_VOCAB} rows, without further streams"
            );
            return BadField::some("inputs by layer", &inputs, expected);
        }
        None
    }

    /// Invalid streams.
    pub(super) fn bad_streams(&self) -> Option<BadField> {
        let streams = self.form.streams?;
        let widest = self.d_model.min(MAX_WIDTH / self.layers);
        let rows = streams.per_layer_vocab;
        let bounded = [
            ("streams", streams.count, 2, 8),
            ("laurel", streams.laurel, 1, self.d_model),
            ("inputs by layer", streams.per_layer, 1, widest),
            ("rows of inputs by layer", rows, 1, MAX_VOCAB),
        ];
        if let Some(bad) = BadField::outside(&bounded) {
            return Some(bad);
        }
        let plain = self.mixture.is_none() && !self.form.parallel.is_parallel();
        if !(plain && self.form.pre_norm && self.form.residual_scale == 1.0) {
            let expected = "absent, as the layers are not built for them";
            return BadField::some("streams", &streams, expected);
        }
        None
    }
}
