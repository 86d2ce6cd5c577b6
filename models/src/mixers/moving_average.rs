//! Gated moving averages (`ema_lm`).

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::MixerKind;
use super::keys::{GgufLayers, MixerKeys, MixerLayers, RoleShape, Sizes, listed};
use super::layers::{self, LINEAR};
use crate::error::Error;
use crate::json::Keys;
use crate::limits::BadField;
use crate::role::{Role, Spellings};

/// Gated moving averages instead of attention. Their width is that of the residual stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovingAverages {
    /// The layers that have one, ascending.
    pub layers: Vec<u32>,
}

impl MixerLayers for MovingAverages {
    listed!("moving_average", "layers with moving averages");

    fn kind(&self, _layer: u32) -> MixerKind {
        MixerKind::MovingAverage
    }

    fn bad(&self, _of: Sizes) -> Option<BadField> {
        None
    }
}

pub(super) fn tensors(of: Sizes) -> Vec<RoleShape> {
    let d = of.d_model as usize;
    [Role::AverageGate, Role::AverageIn, Role::AverageOut]
        .map(|role| (role, d, d))
        .into()
}

/// Names in safetensors.
pub(crate) const HF_NAMES: Spellings = &[
    (Role::AverageGate, "average.gate_proj.weight"),
    (Role::AverageIn, "average.in_proj.weight"),
    (Role::AverageOut, "average.out_proj.weight"),
];

/// Names in GGUF.
pub(crate) const GGUF_NAMES: Spellings = &[
    (Role::AverageGate, "average_gate.weight"),
    (Role::AverageIn, "average_in.weight"),
    (Role::AverageOut, "average_out.weight"),
];

/// Layers are told by kind, in GGUF by their heads.
pub(crate) const EMA_LM: MixerKeys<MovingAverages> =
    MixerKeys::new(read, write).headless(read_gguf, &[]);

/// Name of the layers.
const NAME: &str = "moving_average";

fn read(keys: &Keys, sizes: Sizes) -> Result<Option<MovingAverages>, Error> {
    let layers = layers::named(keys, [&[NAME], &[LINEAR[1]]], sizes.layers)?.unwrap_or_default();
    Ok((!layers.is_empty()).then_some(MovingAverages { layers }))
}

fn write(of: Option<&MovingAverages>, sizes: Sizes, config: &mut Value) {
    let names = [NAME, LINEAR[1]];
    layers::write_names(of.map(|of| &of.layers), names, sizes.layers, config);
}

fn read_gguf(file: &GgufLayers) -> Result<Option<MovingAverages>, Error> {
    let layers = file.headless.to_vec();
    Ok(Some(MovingAverages { layers }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{keys_of, sizes_of};

    #[test]
    fn layers_are_told_by_kind() {
        let layers = |value: Value| {
            let found = keys_of(&value, |keys| read(keys, sizes_of(36, 3)))?;
            Ok::<_, Error>(found.map(|found| found.layers))
        };
        let kinds = json!({"layer_types": [NAME, "full_attention", NAME]});
        assert_eq!(layers(kinds).unwrap(), Some(vec![0, 2]));
        assert_eq!(layers(json!({})).unwrap(), None);
        assert!(layers(json!({"layer_types": [NAME]})).is_err());
        assert!(layers(json!({"layer_types": [NAME, "conv", NAME]})).is_err());
    }
}
