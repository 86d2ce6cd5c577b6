//! Gated short convolutions (LFM2).

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::MixerKind;
use super::keys::{GgufLayers, MixerKeys, MixerLayers, RoleShape, Sizes, listed};
use super::layers::{self, LINEAR};
use crate::error::Error;
use crate::json::Keys;
use crate::limits::{BadField, MAX_TAPS};
use crate::role::{Role, Spellings};

/// Short convolutions instead of attention.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShortConvs {
    /// The layers that have one, ascending.
    pub layers: Vec<u32>,
    /// Taps of a convolution, including the current token.
    pub taps: u32,
}

impl MixerLayers for ShortConvs {
    listed!("short_conv", "layers with short convolutions");

    fn kind(&self, _layer: u32) -> MixerKind {
        MixerKind::ShortConv { taps: self.taps }
    }

    fn bad(&self, _of: Sizes) -> Option<BadField> {
        BadField::outside(&[("taps", self.taps, 2, MAX_TAPS)])
    }

    fn gguf(&self, _of: Sizes) -> Vec<(&'static str, u32)> {
        vec![(GGUF_TAPS, self.taps)]
    }
}

pub(super) fn tensors(taps: u32, of: Sizes) -> Vec<RoleShape> {
    let d = of.d_model as usize;
    vec![
        (Role::ConvIn, 3 * d, d),
        (Role::Conv, d, taps as usize),
        (Role::ConvOut, d, d),
    ]
}

/// Names in safetensors.
pub(crate) const HF_NAMES: Spellings = &[
    (Role::ConvIn, "conv.in_proj.weight"),
    (Role::Conv, "conv.conv.weight"),
    (Role::ConvOut, "conv.out_proj.weight"),
];

/// Names in GGUF.
pub(crate) const GGUF_NAMES: Spellings = &[
    (Role::ConvIn, "shortconv.in_proj.weight"),
    (Role::Conv, "shortconv.conv.weight"),
    (Role::ConvOut, "shortconv.out_proj.weight"),
];

/// `modeling_lfm2.py`.
pub(crate) const LFM2: MixerKeys<ShortConvs> =
    MixerKeys::new(read, write).headless(read_gguf, &[GGUF_TAPS]);

const GGUF_TAPS: &str = "shortconv.l_cache";
const TAPS: &str = "conv_L_cache";
/// Name of the layers.
const NAME: &str = "conv";

/// The layers are told by kind or, in older files, are all but those of a list.
fn read(keys: &Keys, sizes: Sizes) -> Result<Option<ShortConvs>, Error> {
    let named = layers::named(keys, [&[NAME], &[LINEAR[1]]], sizes.layers)?;
    let unlisted = layers::all_but(keys, "full_attn_idxs", sizes.layers)?;
    let layers = named.or(unlisted).unwrap_or_default();
    let taps = keys.u32(TAPS)?.unwrap_or(3);
    Ok((!layers.is_empty()).then_some(ShortConvs { layers, taps }))
}

fn write(of: Option<&ShortConvs>, sizes: Sizes, config: &mut Value) {
    let names = [NAME, LINEAR[1]];
    layers::write_names(of.map(|of| &of.layers), names, sizes.layers, config);
    if let Some(of) = of {
        config[TAPS] = json!(of.taps);
    }
}

fn read_gguf(file: &GgufLayers) -> Result<Option<ShortConvs>, Error> {
    let layers = file.headless.to_vec();
    let taps = file.keys.need(GGUF_TAPS)?;
    Ok(Some(ShortConvs { layers, taps }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{keys_of, sizes_of};

    #[test]
    fn layers_are_told_by_kind_or_by_number() {
        let layers = |value: Value| {
            let convs = keys_of(&value, |keys| read(keys, sizes_of(36, 3)))?;
            Ok::<_, Error>(convs.map(|convs| (convs.layers, convs.taps)))
        };
        let kinds =
            json!({"layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": [0]});
        assert_eq!(layers(kinds).unwrap(), Some((vec![0, 2], 3)));
        let numbers = json!({"full_attn_idxs": [0], "conv_L_cache": 5});
        assert_eq!(layers(numbers).unwrap(), Some((vec![1, 2], 5)));
        assert_eq!(layers(json!({})).unwrap(), None);
        assert!(layers(json!({"layer_types": ["conv"]})).is_err());
        assert!(layers(json!({"full_attn_idxs": [3]})).is_err());
        assert!(layers(json!({"layer_types": ["conv", "sliding_attention", "conv"]})).is_err());
    }
}
