//! Heads for multi-token prediction (MTP): a layer after the last one, which predicts one token more (DeepSeek-V3, arXiv
//! 2412.19437 §2.2).

use super::ModelConfig;

impl ModelConfig {
    /// The configuration of this model's first head, a decoder of one layer whose input is [`Form::mtp`](super::Form::mtp); `None`
    /// if its layers have a form that heads are not implemented with. `routed`: whether its FFN is a mixture.
    pub(crate) fn mtp_head(&self, routed: bool) -> Option<Self> {
        let form = &self.form;
        let streams = form.streams.is_some() || form.hyper.is_some() || form.ngrams.is_some();
        let inputs = form.layer_inputs.is_some() || form.learned_positions.is_some();
        let layers = form.shared_kv > 0 || form.global_heads.is_some() || form.pooled.is_some();
        if streams || inputs || layers || form.has_gate_top() || form.mtp {
            return None;
        }
        let mut head = self.clone();
        head.layers = 1;
        head.window = vec![0];
        let form = &mut head.form;
        form.mtp = true;
        form.delta_net = None;
        form.kda = None;
        form.mamba = None;
        form.mamba1 = None;
        form.short_conv = None;
        form.without_mixer.clear();
        form.without_ffn.clear();
        let everywhere = form.nope_layers.len() == self.layers as usize;
        form.nope_layers = if everywhere { vec![0] } else { Vec::new() };
        let last = form.activations.pop();
        form.activations = last.into_iter().collect();
        if let Some(mixture) = &mut head.mixture {
            mixture.by_token.clear();
            mixture.dense_layers = if routed { Vec::new() } else { vec![0] };
            if routed {
                mixture.dense_ffn = 0;
            }
        }
        Some(head)
    }
}
