//! The Mamba-2 layers of Granite 4 H and of Bamba, which lists the layers with attention.

use serde_json::Value;

use super::json::Keys;
use super::short_conv::{attention, layers_of};
use super::values::Sizes;
use crate::config::{MambaLayers, MambaShape};
use crate::error::Error;

/// Names of layers with Mamba-2: in releases, and as transformers 5 writes them.
const MAMBA: &[&str] = &["mamba", "linear_attention"];
/// The same of layers with attention.
const ATTENTION: &[&str] = &["attention", "full_attention"];

/// The layers with Mamba-2, and its sizes; absent keys have the values of the configuration class. `but` is
/// the key of a list of all others, without which they are told by kind.
pub(super) fn mamba_layers(
    keys: &Keys,
    sizes: Sizes,
    but: Option<&str>,
) -> Result<Option<MambaLayers>, Error> {
    refuse_limits(keys)?;
    let with = match but {
        Some(list) => attention(keys, list, sizes.layers)?
            .map(|others| (0..sizes.layers).filter(|l| !others.contains(l)).collect()),
        None => layers_of(keys, [MAMBA, ATTENTION], sizes.layers)?,
    };
    let with: Vec<u32> = with.unwrap_or_else(|| (0..sizes.layers).collect());
    if with.is_empty() {
        return Ok(None);
    }
    Ok(Some(MambaLayers {
        layers: with,
        shape: shape(keys, expanded(keys, sizes.d_model)?)?,
        beside: false,
    }))
}

/// The width of a head, of which there are `heads` of `width` elements together.
fn head_dim(keys: &Keys, width: u32, heads: u32) -> Result<u32, Error> {
    const KEY: &str = "mamba_d_head";
    let fits = |dim: &u32| dim.checked_mul(heads) == Some(width);
    let given = match keys.get(KEY).and_then(Value::as_str) {
        Some("auto") => None,
        _ => keys.u32(KEY)?,
    };
    let dim = given.or_else(|| width.checked_div(heads));
    let expected = format!("the width of Mamba, {width}, by mamba_n_heads = {heads}");
    dim.filter(fits).ok_or_else(|| keys.bad(KEY, &expected))
}

/// The width of all heads: a multiple of that of the residual stream.
fn expanded(keys: &Keys, d_model: u32) -> Result<u32, Error> {
    let expand = keys.u32("mamba_expand")?.unwrap_or(2);
    Ok(d_model.saturating_mul(expand))
}

/// The Mamba-2 beside the attention of every layer (Falcon-H1).
pub(super) fn beside(keys: &Keys, sizes: Sizes) -> Result<MambaLayers, Error> {
    const WIDTH: &str = "mamba_d_ssm";
    refuse_limits(keys)?;
    let width = match keys.u32(WIDTH)? {
        Some(width) => width,
        None if keys.map().contains_key(WIDTH) => expanded(keys, sizes.d_model)?,
        // that of the configuration class
        None => 1024,
    };
    let normed = keys.bool("mamba_rms_norm")?.unwrap_or(false);
    const ORDER: &str = "mamba_norm_before_gate";
    if normed && keys.bool(ORDER)?.unwrap_or(true) {
        return Err(keys.unsupported(ORDER, "only false is implemented with mamba_rms_norm"));
    }
    Ok(MambaLayers {
        layers: (0..sizes.layers).collect(),
        shape: MambaShape {
            unnormed: !normed,
            ..shape(keys, width)?
        },
        beside: true,
    })
}

/// The sizes of a Mamba-2 whose heads have this width together.
fn shape(keys: &Keys, width: u32) -> Result<MambaShape, Error> {
    let size = |key, usual| Ok::<_, Error>(keys.u32(key)?.unwrap_or(usual));
    let heads = size("mamba_n_heads", 128)?;
    Ok(MambaShape {
        taps: size("mamba_d_conv", 4)?,
        heads,
        head_dim: head_dim(keys, width, heads)?,
        groups: size("mamba_n_groups", 1)?,
        state_dim: size("mamba_d_state", 256)?,
        unnormed: false,
    })
}

/// Refuses limits of the steps, which transformers applies only to prompts. Every step is above 0 and
/// below infinity, which transformers writes as an object.
pub(super) fn refuse_limits(keys: &Keys) -> Result<(), Error> {
    const KEY: &str = "time_step_limit";
    let is_infinite = |value: &Value| value["__float__"] == "Infinity";
    let is_harmless = |limits: &Vec<Value>| match &limits[..] {
        [least, most] => least.as_f64().is_some_and(|least| least <= 0.0) && is_infinite(most),
        _ => false,
    };
    match keys.get(KEY) {
        Some(value) if !value.as_array().is_some_and(is_harmless) => {
            Err(keys.unsupported(KEY, "only 0 and infinity are implemented"))
        }
        _ => Ok(()),
    }
}

/// Whether queries and keys are rotated.
pub(super) fn is_rotated(keys: &Keys) -> Result<bool, Error> {
    const KEY: &str = "position_embedding_type";
    match keys.str(KEY)? {
        Some("rope") => Ok(true),
        None | Some("nope") => Ok(false),
        Some(_) => Err(keys.unsupported(KEY, "implemented for this family: rope, nope")),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    const LIST: &str = "attn_layer_indices";

    fn read(value: Value) -> Result<Option<MambaLayers>, Error> {
        let sizes = Sizes {
            d_model: 36,
            layers: 3,
            heads: 6,
        };
        let but = value.get(LIST).map(|_| LIST);
        mamba_layers(&Keys::new(Path::new("config.json"), &value)?, sizes, but)
    }

    #[test]
    fn layers_have_the_names_of_releases_or_of_transformers_5() {
        let layers = |kinds: [&str; 3]| {
            let found = read(json!({"layer_types": kinds, "mamba_n_heads": 9}))?;
            Ok::<_, Error>(found.map(|mambas| mambas.layers))
        };
        let old = layers(["mamba", "attention", "mamba"]).unwrap();
        assert_eq!(old, Some(vec![0, 2]));
        let new = layers(["full_attention", "linear_attention", "linear_attention"]).unwrap();
        assert_eq!(new, Some(vec![1, 2]));
        assert_eq!(layers(["attention"; 3]).unwrap(), None);
        assert!(layers(["mamba", "conv", "mamba"]).is_err());
        let absent = read(json!({"mamba_n_heads": 9})).unwrap().unwrap();
        assert_eq!(absent.layers, [0, 1, 2]);
        let listed = json!({"mamba_n_heads": 9, LIST: [1]});
        assert_eq!(read(listed).unwrap().unwrap().layers, [0, 2]);
        assert!(read(json!({"mamba_n_heads": 9, LIST: [3]})).is_err());
    }

    #[test]
    fn heads_divide_the_expanded_width() {
        let shape = |value| Ok::<_, Error>(read(value)?.unwrap().shape);
        let usual = shape(json!({"mamba_n_heads": 9})).unwrap();
        let expected = MambaShape {
            taps: 4,
            heads: 9,
            head_dim: 8,
            groups: 1,
            state_dim: 256,
            unnormed: false,
        };
        assert_eq!(usual, expected);
        assert_eq!((usual.values(), usual.channels()), (72, 72 + 2 * 256));
        assert_eq!(usual.inputs(), 2 * 72 + 2 * 256 + 9);
        let wide = json!({"mamba_n_heads": 6, "mamba_d_head": 18, "mamba_expand": 3});
        assert_eq!(shape(wide).unwrap().head_dim, 18);
        let auto = json!({"mamba_n_heads": 6, "mamba_d_head": "auto"});
        assert_eq!(shape(auto).unwrap().head_dim, 12);
        for bad in [
            json!({"mamba_n_heads": 7}),
            json!({"mamba_n_heads": 0}),
            json!({"mamba_n_heads": 9, "mamba_d_head": 9}),
            json!({"mamba_n_heads": 9, "mamba_d_head": "wide"}),
            json!({"mamba_n_heads": 9, "mamba_expand": 4294967295u32}),
            json!({}),
        ] {
            assert!(shape(bad.clone()).is_err(), "{bad}");
        }
    }

    #[test]
    fn beside_attention_the_width_has_a_key_and_a_norm_comes_last() {
        let sizes = Sizes {
            d_model: 36,
            layers: 2,
            heads: 6,
        };
        let read = |value: Value| beside(&Keys::new(Path::new("config.json"), &value)?, sizes);
        let found = read(json!({"mamba_n_heads": 4, "mamba_d_ssm": 20})).unwrap();
        assert_eq!((found.layers, found.beside), (vec![0, 1], true));
        assert_eq!((found.shape.head_dim, found.shape.unnormed), (5, true));
        let by_expansion = json!({"mamba_n_heads": 4, "mamba_d_ssm": null});
        assert_eq!(read(by_expansion).unwrap().shape.head_dim, 18);
        assert_eq!(
            read(json!({"mamba_n_heads": 4})).unwrap().shape.head_dim,
            256
        );
        let normed = |first: Value| {
            let key = "mamba_norm_before_gate";
            read(json!({"mamba_n_heads": 4, "mamba_rms_norm": true, key: first}))
        };
        assert!(!normed(json!(false)).unwrap().shape.unnormed);
        for first in [json!(true), Value::Null] {
            let refused = normed(first).unwrap_err().to_string();
            assert!(refused.contains("mamba_norm_before_gate"), "{refused}");
        }
    }

    #[test]
    fn limits_of_steps_are_refused_unless_they_limit_nothing() {
        let limits = |value: Value| read(json!({"mamba_n_heads": 9, "time_step_limit": value}));
        assert!(limits(json!([0.0, {"__float__": "Infinity"}])).is_ok());
        for bad in [
            json!([0.0, 0.1]),
            json!([0.1, {"__float__": "Infinity"}]),
            json!([0.0]),
            json!(3),
        ] {
            let refused = limits(bad).unwrap_err().to_string();
            assert!(refused.contains("time_step_limit"), "{refused}");
        }
    }
}
