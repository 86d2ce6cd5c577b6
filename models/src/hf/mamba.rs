//! The Mamba-2 layers of Granite 4 H.

use serde_json::Value;

use super::json::Keys;
use super::short_conv::layers_of;
use super::values::Sizes;
use crate::config::{MambaLayers, MambaShape};
use crate::error::Error;

/// Names of layers with Mamba-2: in releases, and as transformers 5 writes them.
const MAMBA: &[&str] = &["mamba", "linear_attention"];
/// The same of layers with attention.
const ATTENTION: &[&str] = &["attention", "full_attention"];

/// The layers with Mamba-2, and its sizes; absent keys have the values of the configuration class.
pub(super) fn mamba_layers(keys: &Keys, sizes: Sizes) -> Result<Option<MambaLayers>, Error> {
    refuse_limits(keys)?;
    let with = match layers_of(keys, [MAMBA, ATTENTION], sizes.layers)? {
        Some(with) => with,
        None => (0..sizes.layers).collect(),
    };
    if with.is_empty() {
        return Ok(None);
    }
    let size = |key, usual| Ok::<_, Error>(keys.u32(key)?.unwrap_or(usual));
    let heads = size("mamba_n_heads", 128)?;
    Ok(Some(MambaLayers {
        layers: with,
        shape: MambaShape {
            taps: size("mamba_d_conv", 4)?,
            heads,
            head_dim: head_dim(keys, sizes.d_model, heads)?,
            groups: size("mamba_n_groups", 1)?,
            state_dim: size("mamba_d_state", 256)?,
        },
    }))
}

/// The width of a head: all heads together are `mamba_expand` times as wide as the residual stream.
fn head_dim(keys: &Keys, d_model: u32, heads: u32) -> Result<u32, Error> {
    const KEY: &str = "mamba_d_head";
    let expand = keys.u32("mamba_expand")?.unwrap_or(2);
    let width = d_model.saturating_mul(expand);
    let fits = |dim: &u32| dim.checked_mul(heads) == Some(width);
    let given = match keys.get(KEY).and_then(Value::as_str) {
        Some("auto") => None,
        _ => keys.u32(KEY)?,
    };
    let dim = given.or_else(|| width.checked_div(heads));
    let expected = format!("hidden_size * mamba_expand = {width} by mamba_n_heads = {heads}");
    dim.filter(fits).ok_or_else(|| keys.bad(KEY, &expected))
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

    fn read(value: Value) -> Result<Option<MambaLayers>, Error> {
        let sizes = Sizes {
            d_model: 36,
            layers: 3,
            heads: 6,
        };
        mamba_layers(&Keys::new(Path::new("config.json"), &value)?, sizes)
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
