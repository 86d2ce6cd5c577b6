//! Residual streams beside the first, and inputs by layer.

use serde::{Deserialize, Serialize};

use super::{BadField, MAX_VOCAB, MAX_WIDTH, ModelConfig};

/// Residual streams beside the one that layers read and change, as in `modeling_gemma3n.py`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Streams {
    /// Streams in all; layers read and change the first.
    pub count: u32,
    /// Width of the low-rank path beside attention (LAuReL).
    pub laurel: u32,
    /// Elements of a token's input to each layer.
    pub per_layer: u32,
    /// Rows of the table of these inputs; tokens past it have those of token 0.
    pub per_layer_vocab: u32,
    /// Whether the first stream is scaled before it meets the layer's input.
    pub scaled: bool,
}

/// A vector for each layer and token, from a table and from the embedding. At its end a layer adds it
/// through a gate and a projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInputs {
    /// Elements of a token's input to each layer.
    pub width: u32,
    /// Rows of the table; tokens past it have those of token 0.
    pub vocab: u32,
}

impl ModelConfig {
    /// Inputs by layer that cannot be.
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

    /// Streams out of range.
    pub(super) fn bad_streams(&self) -> Option<BadField> {
        let streams = self.form.streams?;
        let widest = self.d_model.min(MAX_WIDTH / self.layers);
        let bounded = [
            ("streams", streams.count, 2, 8),
            ("laurel", streams.laurel, 1, self.d_model),
            ("inputs by layer", streams.per_layer, 1, widest),
            (
                "rows of inputs by layer",
                streams.per_layer_vocab,
                1,
                MAX_VOCAB,
            ),
        ];
        for (key, value, least, most) in bounded {
            if value < least || value > most {
                return BadField::some(key, &value, format!("{least} to {most}"));
            }
        }
        let plain = self.mixture.is_none() && !self.form.parallel.is_parallel();
        if !(plain && self.form.pre_norm && self.form.residual_scale == 1.0) {
            let expected = "absent, as the layers are not built for them";
            return BadField::some("streams", &streams, expected);
        }
        None
    }
}
