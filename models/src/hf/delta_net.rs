//! The gated DeltaNets of Qwen3-Next, Qwen3.5 and OLMo Hybrid.

use super::json::Keys;
use super::short_conv::layers_of;
use super::values::Sizes;
use crate::config::{DeltaNetShape, DeltaNets, Form};
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
            signed: false,
            norm_eps: None,
        },
    }))
}

/// Epsilon of the norms of DeltaNets' outputs in OLMo Hybrid, for which there is no key.
const OLMO_EPS: f32 = 1e-5;

/// The DeltaNets of OLMo Hybrid, between layers of attention that norm outputs and may have no rotary positions.
pub(super) fn olmo_hybrid(keys: &Keys, sizes: Sizes, form: &mut Form) -> Result<(), Error> {
    let named = layers_of(
        keys,
        [&["linear_attention"], &["full_attention"]],
        sizes.layers,
    )?;
    let with = named.unwrap_or_else(|| {
        let every_fourth = (0..sizes.layers).filter(|layer| layer % 4 != 3);
        // the last one has attention, if no other does
        every_fourth
            .filter(|layer| sizes.layers > 3 || layer + 1 < sizes.layers)
            .collect()
    });
    let size = |key| keys.u32(key);
    let key_heads = size("linear_num_key_heads")?.unwrap_or(sizes.heads);
    let usual = (0.75 * f64::from(sizes.d_model) / f64::from(key_heads.max(1))) as u32;
    let key_dim = size("linear_key_head_dim")?.unwrap_or(usual);
    let shape = DeltaNetShape {
        taps: size("linear_conv_kernel_dim")?.unwrap_or(4),
        key_heads,
        value_heads: size("linear_num_value_heads")?.unwrap_or(sizes.heads),
        key_dim,
        value_dim: size("linear_value_head_dim")?.unwrap_or(key_dim.saturating_mul(2)),
        tiled: false,
        sigmoid_gate: false,
        signed: keys.bool("linear_allow_neg_eigval")?.unwrap_or(true),
        norm_eps: Some(OLMO_EPS),
    };
    form.late_norms = true;
    form.delta_net = (!with.is_empty()).then_some(DeltaNets {
        layers: with,
        shape,
    });
    if !is_rotated(keys)? {
        form.nope_layers = (0..sizes.layers).collect();
    }
    Ok(())
}

/// Whether queries and keys are rotated: a base of null means no. Without a base, releases of transformers disagree.
fn is_rotated(keys: &Keys) -> Result<bool, Error> {
    const BASE: &str = "rope_theta";
    let object = keys.object("rope_parameters", "rope_parameters.")?;
    let inside = object.filter(|object| object.map().contains_key(BASE));
    match (inside, keys.get(BASE)) {
        (Some(object), _) => Ok(object.get(BASE).is_some()),
        (None, Some(_)) => Ok(true),
        (None, None) => Err(keys.missing(
            "rope_parameters.rope_theta",
            "a number, or null if there are no rotary positions",
        )),
    }
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

    #[test]
    fn olmo_hybrid_takes_sizes_from_attention_and_needs_a_base() {
        let form = |mut value: Value, layers| {
            value["rope_parameters"] = json!({"rope_theta": null});
            let (mut form, heads) = (Form::default(), 4);
            let sizes = Sizes {
                d_model: 32,
                layers,
                heads,
            };
            let keys = Keys::new(Path::new("config.json"), &value)?;
            olmo_hybrid(&keys, sizes, &mut form)?;
            Ok::<_, Error>(form)
        };
        let found = form(json!({}), 5).unwrap();
        assert!(found.late_norms && found.nope_layers.len() == 5);
        let nets = found.delta_net.unwrap();
        assert_eq!(nets.layers, [0, 1, 2, 4]);
        let shape = nets.shape;
        assert_eq!((shape.key_heads, shape.value_heads), (4, 4));
        assert_eq!((shape.key_dim, shape.value_dim), (6, 12));
        assert!(shape.signed && shape.norm_eps == Some(1e-5));
        let few = form(json!({"linear_allow_neg_eigval": false}), 2).unwrap();
        let nets = few.delta_net.unwrap();
        assert_eq!((nets.layers, nets.shape.signed), (vec![0], false));
        let rotated = |value: Value| is_rotated(&Keys::new(Path::new("config.json"), &value)?);
        assert!(rotated(json!({"rope_theta": 1e4})).unwrap());
        assert!(rotated(json!({"rope_parameters": {"rope_theta": 1e4}})).unwrap());
        for unsaid in [json!({}), json!({"rope_parameters": null})] {
            let refused = rotated(unsaid).unwrap_err().to_string();
            assert!(refused.contains("rope_theta"), "{refused}");
        }
    }
}
