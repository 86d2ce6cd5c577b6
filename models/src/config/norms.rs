//! Which layers norm the inputs of their mixer and FFN, and which the outputs.

use super::{BadField, ModelConfig};

/// Norms of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerNorms {
    /// Of the inputs of its mixer and its FFN.
    pub before: bool,
    /// Of their outputs.
    pub after: bool,
}

impl ModelConfig {
    /// The norms of layer `layer`.
    pub fn norms_of(&self, layer: u32) -> LayerNorms {
        let form = &self.form;
        let late = form.late_norms && self.has_keys(layer);
        LayerNorms {
            before: form.pre_norm && !late,
            after: form.post_norm || late,
        }
    }
}

/// Norms that differ by layer, with what they are not implemented with.
pub(super) fn bad(config: &ModelConfig) -> Option<BadField> {
    let form = &config.form;
    let alone = form.pre_norm && !form.post_norm && !form.parallel.is_parallel();
    let streams = form.streams.is_some() || form.hyper.is_some();
    if form.late_norms && (!alone || streams || config.mixture.is_some()) {
        let expected = "false, with experts, several streams or other norms";
        return BadField::some("late norms", &true, expected);
    }
    None
}
