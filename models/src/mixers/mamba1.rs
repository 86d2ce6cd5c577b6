//! Mamba-1 (Jamba).

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::MixerKind;
use super::keys::{
    GgufLayers, MixerKeys, MixerLayers, RoleShape, SizeKey, Sizes, listed, need_sizes, read_sizes,
    write_sizes,
};
use super::layers::{self, Periodic};
use crate::error::Error;
use crate::json::Keys;
use crate::limits::{BadField, MAX_HEAD_DIM, MAX_TAPS, MAX_WIDTH};
use crate::role::{Role, Spellings};

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

    pub(super) fn tensors(self, of: Sizes) -> Vec<RoleShape> {
        let [d, channels, taps, state, rank] = [
            of.d_model,
            self.channels,
            self.taps,
            self.state_dim,
            self.rank,
        ]
        .map(|n| n as usize);
        vec![
            (Role::MambaIn, 2 * channels, d),
            (Role::MambaConv, channels, taps),
            (Role::MambaConvBias, 1, channels),
            (Role::MambaMix, self.mixed(), channels),
            (Role::MambaStepNorm, 1, rank),
            (Role::MambaWriteNorm, 1, state),
            (Role::MambaReadNorm, 1, state),
            (Role::MambaSteps, channels, rank),
            (Role::MambaStep, 1, channels),
            (Role::MambaRates, channels, state),
            (Role::MambaSkip, 1, channels),
            (Role::MambaOut, d, channels),
        ]
    }
}

impl MixerLayers for Mamba1Layers {
    listed!("mamba1", "layers with Mamba");

    fn kind(&self, _layer: u32) -> MixerKind {
        MixerKind::Mamba1(self.shape)
    }

    fn bad(&self, _of: Sizes) -> Option<BadField> {
        let mamba = self.shape;
        BadField::outside(&[
            ("taps of Mamba", mamba.taps, 2, MAX_TAPS),
            ("channels of Mamba", mamba.channels, 1, MAX_WIDTH / 2),
            ("state of Mamba", mamba.state_dim, 1, MAX_HEAD_DIM),
            ("rank of Mamba's steps", mamba.rank, 1, MAX_WIDTH),
        ])
    }
}

/// Names in safetensors; the others are those of Mamba-2.
pub(crate) const HF_NAMES: Spellings = &[
    (Role::MambaMix, "mamba.x_proj.weight"),
    (Role::MambaSteps, "mamba.dt_proj.weight"),
    (Role::MambaStep, "mamba.dt_proj.bias"),
    (Role::MambaRates, "mamba.A_log"),
    (Role::MambaStepNorm, "mamba.dt_layernorm.weight"),
    (Role::MambaWriteNorm, "mamba.b_layernorm.weight"),
    (Role::MambaReadNorm, "mamba.c_layernorm.weight"),
];

/// The same in GGUF.
pub(crate) const GGUF_NAMES: Spellings = &[
    (Role::MambaMix, "ssm_x.weight"),
    (Role::MambaSteps, "ssm_dt.weight"),
    (Role::MambaRates, "ssm_a"),
    (Role::MambaStepNorm, "ssm_dt_norm.weight"),
    (Role::MambaWriteNorm, "ssm_b_norm.weight"),
    (Role::MambaReadNorm, "ssm_c_norm.weight"),
];

/// `modeling_jamba.py`: all layers but periodic ones with attention.
pub(crate) const JAMBA: MixerKeys<Mamba1Layers> =
    MixerKeys::new(read, write).headless(read_gguf, super::mamba::GGUF_KEYS);

const GGUF_SIZES: &[SizeKey<Mamba1Shape>] = &[
    ("ssm.conv_kernel", |mamba| &mut mamba.taps),
    ("ssm.inner_size", |mamba| &mut mamba.channels),
    ("ssm.state_size", |mamba| &mut mamba.state_dim),
    ("ssm.time_step_rank", |mamba| &mut mamba.rank),
];
const HF_SIZES: &[SizeKey<Mamba1Shape>] = &[
    ("mamba_d_conv", |mamba| &mut mamba.taps),
    ("mamba_d_state", |mamba| &mut mamba.state_dim),
];
/// May be `auto`.
const RANK: &str = "mamba_dt_rank";
/// Channels for each element of the residual stream.
const EXPAND: &str = "mamba_expand";
/// The keys of the layers with attention, and their values without them.
const ATTENTION: [(&str, u32); 2] = [("attn_layer_period", 8), ("attn_layer_offset", 4)];
/// Sizes without keys; the others depend on the width of the residual stream.
const USUAL: Mamba1Shape = Mamba1Shape {
    taps: 4,
    channels: 0,
    state_dim: 16,
    rank: 0,
};
/// Elements of the residual stream for each element from which steps are projected, if no key gives their number.
const PER_STEP: u32 = 16;

fn read(keys: &Keys, sizes: Sizes) -> Result<Option<Mamba1Layers>, Error> {
    let attention = Periodic::read(keys, ATTENTION)?;
    let layers: Vec<u32> = (0..sizes.layers)
        .filter(|&layer| !attention.has(layer))
        .collect();
    if layers.is_empty() {
        return Ok(None);
    }
    let rank = match keys.get(RANK).and_then(Value::as_str) {
        Some("auto") => None,
        _ => keys.u32(RANK)?,
    };
    let expand = keys.u32(EXPAND)?.unwrap_or(2);
    let usual = Mamba1Shape {
        channels: sizes.d_model.saturating_mul(expand),
        rank: rank.unwrap_or(sizes.d_model.div_ceil(PER_STEP)),
        ..USUAL
    };
    let shape = read_sizes(keys, HF_SIZES, usual)?;
    Ok(Some(Mamba1Layers { layers, shape }))
}

fn write(of: Option<&Mamba1Layers>, sizes: Sizes, config: &mut Value) {
    let attention = layers::others(of.map(|of| &of.layers), sizes.layers);
    Periodic::write(&attention, ATTENTION, sizes.layers, config);
    let Some(shape) = of.map(|of| of.shape) else {
        return;
    };
    write_sizes(HF_SIZES, shape, config);
    config[RANK] = json!(shape.rank);
    config[EXPAND] = json!(shape.channels / sizes.d_model);
}

fn read_gguf(file: &GgufLayers) -> Result<Option<Mamba1Layers>, Error> {
    let layers = file.headless.to_vec();
    let shape = need_sizes(file.keys, GGUF_SIZES, USUAL)?;
    Ok(Some(Mamba1Layers { layers, shape }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{keys_of, sizes_of};

    #[test]
    fn attention_is_periodic_and_sizes_have_defaults() {
        let read = |value: Value| keys_of(&value, |keys| read(keys, sizes_of(36, 7)));
        let found = read(json!({})).unwrap().unwrap();
        assert_eq!(found.layers, [0, 1, 2, 3, 5, 6]);
        let expected = Mamba1Shape {
            taps: 4,
            channels: 72,
            state_dim: 16,
            rank: 3,
        };
        assert_eq!(found.shape, expected);
        let often = json!({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 5});
        let found = read(often).unwrap().unwrap();
        assert_eq!((found.layers, found.shape.rank), (vec![0, 2, 4, 6], 5));
        let auto = json!({"mamba_dt_rank": "auto"});
        assert_eq!(read(auto).unwrap().unwrap().shape.rank, 3);
        for bad in [
            json!({"attn_layer_period": 4}),
            json!({"attn_layer_period": 0}),
            json!({"mamba_dt_rank": "wide"}),
        ] {
            assert!(read(bad.clone()).is_err(), "{bad}");
        }
    }
}
