//! Mamba-1 layers.

use serde::{Deserialize, Serialize};

use super::{BadField, MAX_HEAD_DIM, MAX_TAPS, MAX_WIDTH, ModelConfig};

/// Mamba-1 layers instead of attention.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mamba1Layers {
    /// The layers that have one, ascending.
    pub layers: Vec<u32>,
    /// Its sizes.
    pub shape: Mamba1Shape,
}

/// Sizes of a Mamba-1 layer, whose step and input and output factors are normed (Jamba).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mamba1Shape {
    /// Taps of its convolution, including the current token.
    pub taps: u32,
    /// Channels, each with a state of its own.
    pub channels: u32,
    /// State elements of a channel.
    pub state_dim: u32,
    /// Elements from which the channels' steps are projected.
    pub rank: u32,
}

impl Mamba1Shape {
    /// Numbers projected from a token's channels: the input of the steps, and `B` and `C`.
    pub fn mixed(self) -> usize {
        self.rank as usize + 2 * self.state_dim as usize
    }
}

impl Mamba1Layers {
    /// An invalid size, or something that they are not implemented with.
    pub(super) fn bad(&self, config: &ModelConfig) -> Option<BadField> {
        let mamba = self.shape;
        for (key, value, least, most) in [
            ("taps of Mamba", mamba.taps, 2, MAX_TAPS),
            ("channels of Mamba", mamba.channels, 1, MAX_WIDTH / 2),
            ("state of Mamba", mamba.state_dim, 1, MAX_HEAD_DIM),
            ("rank of Mamba's steps", mamba.rank, 1, MAX_WIDTH),
        ] {
            if !(least..=most).contains(&value) {
                return BadField::some(key, &value, format!("{least} to {most}"));
            }
        }
        if self.layers.is_empty() || !config.are_layers(&self.layers) {
            let expected = format!("layers below {}, ascending", config.layers);
            return BadField::some("layers with Mamba", &self.layers, expected);
        }
        let form = &config.form;
        let recurrent = form.short_conv.is_some() || form.delta_net.is_some();
        let others = recurrent || form.kda.is_some() || form.mamba.is_some();
        if form.shared_kv > 0 || others || form.stores_one_vector() {
            let expected = "absent, with shared keys or mixers of other kinds";
            return BadField::some("mamba1", self, expected);
        }
        None
    }
}
