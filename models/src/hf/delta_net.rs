//! The gated DeltaNets of Qwen3-Next and Qwen3.5.

use super::json::Keys;
use super::short_conv::layers_of;
use crate::config::{DeltaNetShape, DeltaNets};
use crate::error::Error;

/// The layers with a gated DeltaNet, and its sizes; absent keys have the values of the
/// configuration class. Attention that is `indexed` may have a separate name.
pub(super) fn delta_nets(
    keys: &Keys,
    layers: u32,
    indexed: bool,
) -> Result<Option<DeltaNets>, Error> {
    let others: &[&str] = if indexed {
        &["full_attention", "indexed_attention"]
    } else {
        &["full_attention"]
    };
    let kinds = [&["linear_attention"][..], others];
    let with = match layers_of(keys, kinds, layers)? {
        Some(with) => with,
        None => {
            const KEY: &str = "full_attention_interval";
            let interval = keys.u32(KEY)?.unwrap_or(4);
            if interval == 0 {
                return Err(keys.bad(KEY, "1 or more"));
            }
            let linear = |layer: &u32| !(layer + 1).is_multiple_of(interval);
            (0..layers).filter(linear).collect()
        }
    };
    if with.is_empty() {
        return Ok(None);
    }
    let size = |key, usual| Ok::<_, Error>(keys.u32(key)?.unwrap_or(usual));
    Ok(Some(DeltaNets {
        layers: with,
        shape: DeltaNetShape {
            taps: size("linear_conv_kernel_dim", 4)?,
            key_heads: size("linear_num_key_heads", 16)?,
            value_heads: size("linear_num_value_heads", 32)?,
            key_dim: size("linear_key_head_dim", 128)?,
            value_dim: size("linear_value_head_dim", 128)?,
            tiled: false,
            sigmoid_gate: keys.str("output_gate_type")? == Some("sigmoid"),
        },
    }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn layers_are_told_by_kind_or_by_an_interval() {
        let layers = |value: Value| {
            let keys = Keys::new(Path::new("config.json"), &value)?;
            let nets = delta_nets(&keys, 5, false)?;
            Ok::<_, Error>(nets.map(|nets| nets.layers))
        };
        assert_eq!(layers(json!({})).unwrap(), Some(vec![0, 1, 2, 4]));
        let every_second = json!({"full_attention_interval": 2});
        assert_eq!(layers(every_second).unwrap(), Some(vec![0, 2, 4]));
        let [l, f] = ["linear_attention", "full_attention"];
        let kinds = json!({"layer_types": [f, l, f, f, l], "full_attention_interval": 2});
        assert_eq!(layers(kinds).unwrap(), Some(vec![1, 4]));
        assert_eq!(
            layers(json!({"layer_types": [f, f, f, f, f]})).unwrap(),
            None
        );
        assert!(layers(json!({"full_attention_interval": 0})).is_err());
        assert!(layers(json!({"layer_types": [f, "conv", f, f, f]})).is_err());
        assert!(layers(json!({"layer_types": [f, l]})).is_err());
    }
}
