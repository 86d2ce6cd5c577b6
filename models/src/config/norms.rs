//! Which layers norm the inputs of their mixer and FFN, and which the outputs.

use super::{BadField, ModelConfig};

impl ModelConfig {
    /// Whether layer `layer` norms the inputs of its mixer and its FFN.
    pub fn pre_norm(&self, layer: u32) -> bool {
        self.form.pre_norm && !self.norms_late(layer)
    }

    /// Whether layer `layer` norms the outputs of its mixer and its FFN.
    pub fn post_norm(&self, layer: u32) -> bool {
        self.form.post_norm || self.norms_late(layer)
    }

    /// See [`Form::late_norms`](super::Form::late_norms).
    fn norms_late(&self, layer: u32) -> bool {
        self.form.late_norms && self.has_keys(layer)
    }

    /// Norms that differ by layer, with what they are not implemented with.
    pub(super) fn bad_norms(&self) -> Option<BadField> {
        let form = &self.form;
        let alone = form.pre_norm && !form.post_norm && !form.parallel.is_parallel();
        let streams = form.streams.is_some() || form.hyper.is_some();
        if form.late_norms && (!alone || streams || self.mixture.is_some()) {
            let expected = "false, with experts, several streams or other norms";
            return BadField::some("late norms", &true, expected);
        }
        None
    }
}
