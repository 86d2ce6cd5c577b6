//! Layers of Kimi Delta Attention: Kimi Linear, Ling 3.

use serde_json::Value;

use super::json::Keys;
use super::short_conv::layers_of;
use super::values::Sizes;
use crate::config::{KdaLayers, KdaShape};
use crate::error::Error;

/// The object in releases, with its dot in errors.
const OBJECT: &str = "linear_attn_config";
const PREFIX: &str = "linear_attn_config.";
/// Names of these and the other layers in `layer_types`.
const KINDS: [&[&str]; 2] = [&["linear_attention"], &["full_attention"]];

/// The layers with KDA, and its sizes; absent keys have the values of the configuration class.
pub(super) fn kda_layers(keys: &Keys, layers: u32) -> Result<Option<KdaLayers>, Error> {
    for key in ["rope_scaling", "rope_parameters"] {
        let object = keys.object(key, "")?;
        let kind = object.map_or(Ok(None), |object| object.str("rope_type"))?;
        if keys.get(key).is_some() && kind != Some("default") {
            return Err(keys.unsupported(key, "this family has no rotary positions to scale"));
        }
    }
    let release = keys.object(OBJECT, PREFIX)?;
    let size = |key, own, usual| {
        let given = match &release {
            Some(release) => release.u32(own)?,
            None => None,
        };
        Ok::<_, Error>(given.or(keys.u32(key)?).unwrap_or(usual))
    };
    let shape = KdaShape {
        taps: size("linear_conv_kernel_dim", "short_conv_kernel_size", 4)?,
        heads: size("linear_num_heads", "num_heads", 32)?,
        dim: size("linear_head_dim", "head_dim", 128)?,
        direct: false,
        bound: None,
    };
    let named = match layers_of(keys, KINDS, layers)? {
        None => release.map_or(Ok(None), |release| listed(&release, layers))?,
        named => named,
    };
    let usual = || (0..layers).filter(|&layer| layer == 0 || layer % 4 != 0);
    let with = named.unwrap_or_else(|| usual().collect());
    let some = !with.is_empty();
    Ok(some.then_some(KdaLayers {
        layers: with,
        shape,
    }))
}

/// The layers of Ling 3: all but the last of each group, with as many heads as attention.
pub(super) fn bounded_kda(keys: &Keys, sizes: Sizes) -> Result<Option<KdaLayers>, Error> {
    const GROUP: &str = "layer_group_size";
    for key in ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"] {
        let is_off = |limit: &Value| limit.is_null() || limit.as_f64() == Some(0.0);
        let list = keys.get(key).and_then(Value::as_array);
        if keys.get(key).is_some() && !list.is_some_and(|list| list.iter().all(is_off)) {
            return Err(keys.unsupported(key, "limits of SwiGLU are not implemented here"));
        }
    }
    let size = |key, own, usual| Ok::<_, Error>(keys.u32(key)?.or(keys.u32(own)?).unwrap_or(usual));
    let bound = if keys.bool("kda_safe_gate")?.unwrap_or(true) {
        Some(keys.f32("kda_lower_bound")?.unwrap_or(-5.0))
    } else {
        None
    };
    let shape = KdaShape {
        taps: size("linear_conv_kernel_dim", "short_conv_kernel_size", 4)?,
        heads: size("linear_num_heads", "num_attention_heads", sizes.heads)?,
        dim: size("linear_head_dim", "head_dim", 128)?,
        direct: true,
        bound,
    };
    let group = keys.u32(GROUP)?.unwrap_or(6);
    if group == 0 {
        return Err(keys.bad(GROUP, "1 or more"));
    }
    let usual = || (0..sizes.layers).filter(|layer| !(layer + 1).is_multiple_of(group));
    let layers = layers_of(keys, KINDS, sizes.layers)?.unwrap_or_else(|| usual().collect());
    let some = !layers.is_empty();
    Ok(some.then_some(KdaLayers { layers, shape }))
}

/// The layers of the list, if both lists are given; they count from 1 and name every layer once.
fn listed(release: &Keys, layers: u32) -> Result<Option<Vec<u32>>, Error> {
    const FULL: &str = "full_attn_layers";
    const LINEAR: &str = "kda_layers";
    let number = |value: &Value| {
        let number = value.as_u64().and_then(|n| u32::try_from(n).ok());
        Some(number.filter(|n| (1..=layers).contains(n))? - 1)
    };
    let list = |key| {
        let expected = format!("numbers from 1 to {layers}");
        release.read(key, &expected, |value| {
            let list = value.as_array()?.iter().map(number);
            list.collect::<Option<Vec<u32>>>()
        })
    };
    let (Some(full), Some(mut linear)) = (list(FULL)?, list(LINEAR)?) else {
        return Ok(None);
    };
    linear.sort_unstable();
    let mut all = [&full[..], &linear].concat();
    all.sort_unstable();
    if !all.into_iter().eq(0..layers) {
        let expected = format!("with {FULL}, each of {layers} layers once");
        return Err(release.bad(LINEAR, &expected));
    }
    Ok(Some(linear))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_key_has_one_value_under_two_names() {
        let with = |value: Value| {
            let keys = Keys::new(Path::new("config.json"), &value)?;
            let keys = keys.called(&[("n_group", "num_expert_group")]);
            keys.expect_one_name()?;
            keys.u32("n_group")
        };
        assert_eq!(with(json!({"num_expert_group": 3})).unwrap(), Some(3));
        assert_eq!(
            with(json!({"n_group": 3, "num_expert_group": 3})).unwrap(),
            Some(3)
        );
        assert_eq!(with(json!({})).unwrap(), None);
        for wrong in [
            json!({"num_expert_group": "x"}),
            json!({"n_group": 1, "num_expert_group": 3}),
        ] {
            let refused = with(wrong).unwrap_err().to_string();
            assert!(refused.contains("num_expert_group"), "{refused}");
        }
    }

    #[test]
    fn layers_are_told_by_kind_or_by_two_lists() {
        let found = |value: Value| {
            let keys = Keys::new(Path::new("config.json"), &value)?;
            kda_layers(&keys, 6)
        };
        let layers = |value: Value| found(value).unwrap().map(|of| of.layers);
        let lists = |full: &[u32], linear: &[u32]| {
            json!({OBJECT: {"full_attn_layers": full, "kda_layers": linear, "num_heads": 3,
                "head_dim": 5, "short_conv_kernel_size": 2}})
        };
        assert_eq!(layers(json!({})), Some(vec![0, 1, 2, 3, 5]));
        let both = lists(&[4, 6], &[1, 2, 5, 3]);
        assert_eq!(layers(both.clone()), Some(vec![0, 1, 2, 4]));
        let shape = found(both).unwrap().unwrap().shape;
        assert_eq!((shape.heads, shape.dim, shape.taps), (3, 5, 2));
        assert_eq!(layers(lists(&[1, 2, 3, 4, 5, 6], &[])), None);
        for (full, linear) in [
            (vec![4], vec![1, 2, 3, 5]),
            (vec![4, 6], vec![1, 2, 3, 4, 5]),
            (vec![0, 4], vec![1, 2, 3, 5]),
            (vec![4, 7], vec![1, 2, 3, 5]),
        ] {
            assert!(found(lists(&full, &linear)).is_err());
        }
        let mut kinds = lists(&[4, 6], &[1, 2, 3, 5]);
        let [l, f] = ["linear_attention", "full_attention"];
        kinds["layer_types"] = json!([f, l, l, f, f, f]);
        assert_eq!(layers(kinds), Some(vec![1, 2]));
        assert!(found(json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})).is_err());
    }

    #[test]
    fn decays_have_a_bound_unless_they_have_none() {
        let sizes = Sizes {
            d_model: 36,
            layers: 7,
            heads: 6,
        };
        let found =
            |value: Value| bounded_kda(&Keys::new(Path::new("config.json"), &value)?, sizes);
        let usual = found(json!({"layer_group_size": 3, "head_dim": 5}));
        let usual = usual.unwrap().unwrap();
        assert_eq!(usual.layers, [0, 1, 3, 4, 6]);
        let shape = usual.shape;
        assert_eq!((shape.heads, shape.dim, shape.taps), (6, 5, 4));
        assert_eq!((shape.direct, shape.bound), (true, Some(-5.0)));
        let other = json!({"kda_safe_gate": false, "kda_lower_bound": -2.0, "head_dim": 5,
            "linear_head_dim": 9, "expert_swiglu_limit_list": [null, 0.0]});
        let shape = found(other).unwrap().unwrap().shape;
        assert_eq!((shape.dim, shape.bound), (9, None));
        for (key, bad) in [
            ("layer_group_size", json!(0)),
            ("kda_safe_gate", json!(1)),
            ("expert_swiglu_limit_list", json!([null, 7.0])),
            ("share_expert_swiglu_limit_list", json!(7.0)),
        ] {
            let refused = found(json!({key: bad})).unwrap_err().to_string();
            assert!(refused.contains(key), "{refused}");
        }
    }
}
