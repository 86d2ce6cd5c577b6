//! Mamba-2 layers.

use serde::{Deserialize, Serialize};

use super::{BadField, MAX_COUNT, MAX_HEAD_DIM, MAX_TAPS, MAX_WIDTH, ModelConfig};

/// Mamba-2 layers instead of attention.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MambaLayers {
    /// The layers that have one, ascending.
    pub layers: Vec<u32>,
    /// Its sizes.
    pub shape: MambaShape,
    /// These layers have attention too: both read the layer's input, and their outputs are added (Falcon-H1).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beside: bool,
}

/// Sizes of a Mamba-2 layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MambaShape {
    /// Taps of its convolution, including the current token.
    pub taps: u32,
    /// Heads.
    pub heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Groups of consecutive heads, which share `B` and `C`.
    pub groups: u32,
    /// State elements for each element of a head.
    pub state_dim: u32,
    /// Its gated output has no norm.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unnormed: bool,
}

impl MambaShape {
    /// Width of all heads.
    pub fn values(self) -> usize {
        self.heads as usize * self.head_dim as usize
    }

    /// Channels of the convolution: the heads' inputs, `B` and `C` of each group.
    pub fn channels(self) -> usize {
        self.values() + 2 * self.groups as usize * self.state_dim as usize
    }

    /// Rows of the input projection: gates of the output, channels, a step for each head.
    pub fn inputs(self) -> usize {
        self.values() + self.channels() + self.heads as usize
    }

    /// The group of a head.
    pub fn group_of(self, head: u32) -> u32 {
        head / (self.heads / self.groups)
    }
}

impl MambaLayers {
    /// An invalid size, or something that they are not implemented with.
    pub(super) fn bad(&self, config: &ModelConfig) -> Option<BadField> {
        let mamba = self.shape;
        for (key, value, least, most) in [
            ("taps of Mamba", mamba.taps, 2, MAX_TAPS),
            ("heads of Mamba", mamba.heads, 1, MAX_COUNT),
            ("head width of Mamba", mamba.head_dim, 1, MAX_HEAD_DIM),
            ("groups of Mamba", mamba.groups, 1, MAX_COUNT),
            ("state of Mamba", mamba.state_dim, 1, MAX_HEAD_DIM),
        ] {
            if !(least..=most).contains(&value) {
                return BadField::some(key, &value, format!("{least} to {most}"));
            }
        }
        if !mamba.heads.is_multiple_of(mamba.groups) {
            let expected = format!("a divisor of the {} heads", mamba.heads);
            return BadField::some("groups of Mamba", &mamba.groups, expected);
        }
        if mamba.inputs() > MAX_WIDTH as usize {
            let expected = format!("at most {MAX_WIDTH}");
            return BadField::some("inputs of Mamba", &mamba.inputs(), expected);
        }
        if self.layers.is_empty() || !config.are_layers(&self.layers) {
            let expected = format!("layers below {}, ascending", config.layers);
            return BadField::some("layers with Mamba", &self.layers, expected);
        }
        let form = &config.form;
        if self.beside && (form.parallel.is_parallel() || form.output_gate) {
            let expected = "absent, with attention and Mamba in one layer";
            return BadField::some("parallel layers or output gates", &true, expected);
        }
        let others = form.short_conv.is_some() || form.delta_net.is_some() || form.kda.is_some();
        if form.shared_kv > 0 || others || form.latent.is_some() {
            let expected = "absent, with shared keys or mixers of other kinds";
            return BadField::some("mamba", self, expected);
        }
        None
    }
}
