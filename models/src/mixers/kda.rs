//! Kimi Delta Attention (Kimi Linear, Ling 3).

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::MixerKind;
use super::keys::{
    GgufLayers, MixerKeys, MixerLayers, RoleShape, SizeKey, Sizes, listed, need_sizes, read_sizes,
    write_sizes,
};
use super::layers::{self, LINEAR};
use crate::error::Error;
use crate::json::Keys;
use crate::limits::{BadField, MAX_COUNT, MAX_HEAD_DIM, MAX_TAPS, MAX_WIDTH};
use crate::role::{Role, Spellings};

/// Kimi Delta Attention instead of attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KdaLayers {
    /// The layers that have it, ascending.
    pub layers: Vec<u32>,
    /// Its sizes.
    pub shape: KdaShape,
}

/// Sizes of Kimi Delta Attention.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KdaShape {
    /// Taps of its convolutions, including the current token.
    pub taps: u32,
    /// Heads of queries, of keys and of values.
    pub heads: u32,
    /// Width of a query, a key, a value, and of the low-rank inputs of decays and gates.
    pub dim: u32,
    /// Decays and gates are projected directly from the layer's input, without low rank `dim` (Ling
    /// 3).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub direct: bool,
    /// Least logarithm of a decay, below 0 (Ling 3): decays are `exp(bound · σ(−rate · x))` of a
    /// projection `x`, not `exp(rate · softplus(x))`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<f32>,
}

impl KdaShape {
    /// Width of all values, of all keys, and of all queries.
    pub fn values(self) -> usize {
        self.heads as usize * self.dim as usize
    }

    pub(super) fn tensors(self, of: Sizes) -> Vec<RoleShape> {
        let [d, heads, dim, taps] =
            [of.d_model, self.heads, self.dim, self.taps].map(|n| n as usize);
        let values = self.values();
        let mut all = vec![
            (Role::Q, values, d),
            (Role::K, values, d),
            (Role::V, values, d),
            (Role::DeltaConvQ, values, taps),
            (Role::DeltaConvK, values, taps),
            (Role::DeltaConvV, values, taps),
            (Role::DeltaBeta, heads, d),
        ];
        if self.direct {
            all.push((Role::DeltaDecays, values, d));
        } else {
            all.extend([
                (Role::DeltaDecayIn, dim, d),
                (Role::DeltaDecay, values, dim),
            ]);
        }
        all.extend([(Role::DeltaStep, 1, values), (Role::DeltaRate, 1, heads)]);
        if self.direct {
            all.push((Role::QGate, values, d));
        } else {
            all.extend([(Role::DeltaGateIn, dim, d), (Role::DeltaGate, values, dim)]);
        }
        all.extend([(Role::DeltaNorm, 1, dim), (Role::O, d, values)]);
        all
    }
}

impl MixerLayers for KdaLayers {
    listed!("kda", "layers with delta attention");

    fn kind(&self, _layer: u32) -> MixerKind {
        MixerKind::Kda(self.shape)
    }

    fn bad(&self, _of: Sizes) -> Option<BadField> {
        let kda = self.shape;
        let sizes = [
            ("taps of delta attention", kda.taps, 2, MAX_TAPS),
            ("heads of delta attention", kda.heads, 1, MAX_COUNT),
            ("head width of delta attention", kda.dim, 1, MAX_HEAD_DIM),
        ];
        BadField::outside(&sizes)
            .or_else(|| {
                let channels = 3 * kda.values();
                BadField::above("channels of delta attention", channels, MAX_WIDTH)
            })
            .or_else(|| {
                let bound = kda.bound?;
                let holds = bound.is_finite() && bound < 0.0;
                BadField::unless(holds, "bound of decays", &bound, "below 0")
            })
    }

    fn companion(&self) -> Option<&'static str> {
        Some("latent")
    }
}

/// Names in safetensors in addition to those of latent attention.
pub(crate) const HF_NAMES: Spellings = &[
    (Role::K, "self_attn.k_proj.weight"),
    (Role::V, "self_attn.v_proj.weight"),
    (Role::DeltaConvQ, "self_attn.q_conv1d.weight"),
    (Role::DeltaConvK, "self_attn.k_conv1d.weight"),
    (Role::DeltaConvV, "self_attn.v_conv1d.weight"),
    (Role::DeltaBeta, "self_attn.b_proj.weight"),
    (Role::DeltaDecayIn, "self_attn.f_a_proj.weight"),
    (Role::DeltaDecay, "self_attn.f_b_proj.weight"),
    (Role::DeltaStep, "self_attn.dt_bias"),
    (Role::DeltaRate, "self_attn.A_log"),
    (Role::DeltaGateIn, "self_attn.g_a_proj.weight"),
    (Role::DeltaGate, "self_attn.g_b_proj.weight"),
    (Role::DeltaNorm, "self_attn.o_norm.weight"),
];

/// The same of Ling 3.
pub(crate) const LING_NAMES: Spellings = &[
    (Role::QGate, "attention.g_proj.weight"),
    (Role::K, "attention.k_proj.weight"),
    (Role::V, "attention.v_proj.weight"),
    (Role::O, "attention.o_proj.weight"),
    (Role::DeltaConvQ, "attention.q_conv1d.weight"),
    (Role::DeltaConvK, "attention.k_conv1d.weight"),
    (Role::DeltaConvV, "attention.v_conv1d.weight"),
    (Role::DeltaBeta, "attention.b_proj.weight"),
    (Role::DeltaDecays, "attention.f_proj.weight"),
    (Role::DeltaStep, "attention.dt_bias"),
    (Role::DeltaRate, "attention.A_log"),
    (Role::DeltaNorm, "attention.o_norm.weight"),
];

/// Names in GGUF in addition to those of latent attention.
pub(crate) const GGUF_NAMES: Spellings = &[
    (Role::K, "attn_k.weight"),
    (Role::V, "attn_v.weight"),
    (Role::DeltaConvQ, "ssm_conv1d_q.weight"),
    (Role::DeltaConvK, "ssm_conv1d_k.weight"),
    (Role::DeltaConvV, "ssm_conv1d_v.weight"),
    (Role::DeltaBeta, "ssm_beta.weight"),
    (Role::DeltaDecayIn, "ssm_f_a.weight"),
    (Role::DeltaDecay, "ssm_f_b.weight"),
    (Role::DeltaStep, "ssm_dt.bias"),
    (Role::DeltaRate, "ssm_a"),
    (Role::DeltaGateIn, "ssm_g_a.weight"),
    (Role::DeltaGate, "ssm_g_b.weight"),
    (Role::DeltaNorm, "ssm_norm.weight"),
];

/// Full-rank projections, which precede the others.
pub(crate) const GGUF_DIRECT: Spellings = &[
    (Role::QGate, "attn_gate.weight"),
    (Role::QGate, "ssm_g_a.weight"),
    (Role::DeltaDecays, "ssm_f_a.weight"),
];

/// `modeling_kimi_linear.py`.
pub(crate) const KIMI: MixerKeys<KdaLayers> =
    MixerKeys::new(read_kimi, write_kimi).headless(|file| read_gguf(file, false), GGUF_KEYS);

/// `modeling_bailing_hybrid.py` (Ling 3): full-rank projections, and decays with a bound unless a key says otherwise.
pub(crate) const LING: MixerKeys<KdaLayers> =
    MixerKeys::new(read_ling, write_ling).headless(|file| read_gguf(file, true), LING_KEYS);

/// Keys that are read in GGUF.
const GGUF_KEYS: &[&str] = &["kda.head_dim", "ssm.conv_kernel"];
const LING_KEYS: &[&str] = &["kda.head_dim", "ssm.conv_kernel", GGUF_SAFE, GGUF_BOUND];
const GGUF_SIZES: &[SizeKey<KdaShape>] = &[
    ("ssm.conv_kernel", |kda| &mut kda.taps),
    ("attention.head_count", |kda| &mut kda.heads),
    ("kda.head_dim", |kda| &mut kda.dim),
];
const GGUF_SAFE: &str = "kda.safe_gate";
const GGUF_BOUND: &str = "kda.gate_lower_bound";

/// Keys as transformers 5 writes them.
const HF_SIZES: &[SizeKey<KdaShape>] = &[
    ("linear_conv_kernel_dim", |kda| &mut kda.taps),
    ("linear_num_heads", |kda| &mut kda.heads),
    ("linear_head_dim", |kda| &mut kda.dim),
];
/// Those of Kimi Linear's releases, inside an object.
const KIMI_SIZES: &[SizeKey<KdaShape>] = &[
    ("short_conv_kernel_size", |kda| &mut kda.taps),
    ("num_heads", |kda| &mut kda.heads),
    ("head_dim", |kda| &mut kda.dim),
];
/// The object, with its dot in errors.
const OBJECT: &str = "linear_attn_config";
const PREFIX: &str = "linear_attn_config.";
/// Numbers of layers there, from 1.
const FULL: &str = "full_attn_layers";
const OWN: &str = "kda_layers";
/// Those of Ling 3's releases, which has as many heads as attention.
const LING_SIZES: &[SizeKey<KdaShape>] = &[
    ("short_conv_kernel_size", |kda| &mut kda.taps),
    ("num_attention_heads", |kda| &mut kda.heads),
    ("head_dim", |kda| &mut kda.dim),
];
const LING_SAFE: &str = "kda_safe_gate";
const LING_BOUND: &str = "kda_lower_bound";
/// Sizes without keys.
const USUAL: KdaShape = KdaShape {
    taps: 4,
    heads: 32,
    dim: 128,
    direct: false,
    bound: None,
};

fn some(layers: Vec<u32>, shape: KdaShape) -> Option<KdaLayers> {
    (!layers.is_empty()).then_some(KdaLayers { layers, shape })
}

fn named(keys: &Keys, sizes: Sizes) -> Result<Option<Vec<u32>>, Error> {
    layers::named(keys, [&[LINEAR[0]], &[LINEAR[1]]], sizes.layers)
}

fn read_kimi(keys: &Keys, sizes: Sizes) -> Result<Option<KdaLayers>, Error> {
    for key in ["rope_scaling", "rope_parameters"] {
        let object = keys.object(key, "")?;
        let kind = object.map_or(Ok(None), |object| object.str("rope_type"))?;
        if keys.get(key).is_some() && kind != Some("default") {
            return Err(keys.unsupported(key, "this family has no rotary positions to scale"));
        }
    }
    let release = keys.object(OBJECT, PREFIX)?;
    let mut shape = read_sizes(keys, HF_SIZES, USUAL)?;
    if let Some(release) = &release {
        shape = read_sizes(release, KIMI_SIZES, shape)?;
    }
    let with = match named(keys, sizes)? {
        None => release.map_or(Ok(None), |release| numbered(&release, sizes.layers))?,
        named => named,
    };
    let usual = || (0..sizes.layers).filter(|&layer| layer == 0 || layer % 4 != 0);
    Ok(some(with.unwrap_or_else(|| usual().collect()), shape))
}

fn write_kimi(of: Option<&KdaLayers>, sizes: Sizes, config: &mut Value) {
    let with = of.map(|of| &of.layers);
    layers::write_names(with, LINEAR, sizes.layers, config);
    let Some(of) = of else { return };
    let from_1 = |list: &[u32]| list.iter().map(|layer| layer + 1).collect::<Value>();
    let mut object = json!({
        OWN: from_1(&of.layers),
        FULL: from_1(&layers::others(with, sizes.layers)),
    });
    write_sizes(KIMI_SIZES, of.shape, &mut object);
    config[OBJECT] = object;
}

/// The layers of the list, if both lists are given; they count from 1 and name every layer once.
fn numbered(release: &Keys, layers: u32) -> Result<Option<Vec<u32>>, Error> {
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
    let (Some(full), Some(mut linear)) = (list(FULL)?, list(OWN)?) else {
        return Ok(None);
    };
    linear.sort_unstable();
    let mut all = [&full[..], &linear].concat();
    all.sort_unstable();
    if !all.into_iter().eq(0..layers) {
        let expected = format!("with {FULL}, each of {layers} layers once");
        return Err(release.bad(OWN, &expected));
    }
    Ok(Some(linear))
}

/// Without names, the layers are all but the last of each group.
fn read_ling(keys: &Keys, sizes: Sizes) -> Result<Option<KdaLayers>, Error> {
    const GROUP: &str = "layer_group_size";
    for key in ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"] {
        let is_off = |limit: &Value| limit.is_null() || limit.as_f64() == Some(0.0);
        let list = keys.get(key).and_then(Value::as_array);
        if keys.get(key).is_some() && !list.is_some_and(|list| list.iter().all(is_off)) {
            return Err(keys.unsupported(key, "limits of SwiGLU are not implemented here"));
        }
    }
    let bound = if keys.bool(LING_SAFE)?.unwrap_or(true) {
        Some(keys.f32(LING_BOUND)?.unwrap_or(-5.0))
    } else {
        None
    };
    let usual = KdaShape {
        heads: sizes.heads,
        direct: true,
        bound,
        ..USUAL
    };
    let shape = read_sizes(keys, LING_SIZES, usual)?;
    let shape = read_sizes(keys, HF_SIZES, shape)?;
    let group = match keys.u32(GROUP)?.unwrap_or(6) {
        0 => return Err(keys.bad(GROUP, "1 or more")),
        group => group,
    };
    let usual = || layers::all_but_nth(group, sizes.layers);
    Ok(some(named(keys, sizes)?.unwrap_or_else(usual), shape))
}

/// Heads have the width of attention's key.
fn write_ling(of: Option<&KdaLayers>, sizes: Sizes, config: &mut Value) {
    layers::write_names(of.map(|of| &of.layers), LINEAR, sizes.layers, config);
    let Some(shape) = of.map(|of| of.shape) else {
        return;
    };
    config["head_dim"] = json!(shape.dim);
    config["linear_num_heads"] = json!(shape.heads);
    config["short_conv_kernel_size"] = json!(shape.taps);
    config[LING_SAFE] = json!(shape.bound.is_some());
    if let Some(bound) = shape.bound {
        config[LING_BOUND] = json!(bound);
    }
}

/// Decays of full-rank projections have a bound.
fn read_gguf(file: &GgufLayers, direct: bool) -> Result<Option<KdaLayers>, Error> {
    let (keys, layers) = (file.keys, file.headless.to_vec());
    let is_bounded = keys.bool(GGUF_SAFE)?;
    let bound = if direct && is_bounded.unwrap_or(true) {
        Some(keys.need_f32(GGUF_BOUND)?)
    } else {
        None
    };
    let usual = KdaShape {
        direct,
        bound,
        ..USUAL
    };
    Ok(some(layers, need_sizes(keys, GGUF_SIZES, usual)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata;
    use crate::testing::{keys_of, layers_of, sizes_of};

    #[test]
    fn layers_are_named_numbered_or_usual() {
        let found = |value: Value| keys_of(&value, |keys| read_kimi(keys, sizes_of(36, 6)));
        let layers = |value: Value| found(value).unwrap().map(|of| of.layers);
        let lists = |full: &[u32], linear: &[u32]| {
            json!({"linear_attn_config": {"full_attn_layers": full, "kda_layers": linear, "num_heads": 3,
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
        let [l, f] = LINEAR;
        kinds["layer_types"] = json!([f, l, l, f, f, f]);
        assert_eq!(layers(kinds), Some(vec![1, 2]));
        assert!(found(json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})).is_err());
    }

    #[test]
    fn decays_have_a_bound_unless_they_have_none() {
        let found = |value: Value| keys_of(&value, |keys| read_ling(keys, sizes_of(36, 7)));
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

    #[test]
    fn gguf_needs_all_sizes() {
        use metadata::Value;

        let sizes = [
            ("ssm.conv_kernel", 3),
            ("attention.head_count", 6),
            ("kda.head_dim", 5),
        ];
        let read = |sizes: &[(&'static str, u64)], layers: &[u32]| {
            let sizes = sizes.iter().map(|&(key, size)| (key, Value::Uint(size)));
            layers_of(sizes, sizes_of(36, 3), layers, KIMI.gguf.unwrap())
        };
        let shape = read(&sizes, &[0, 2]).unwrap().unwrap().shape;
        assert_eq!((shape.taps, shape.heads, shape.values()), (3, 6, 30));
        assert_eq!(read(&sizes, &[]).unwrap(), None);
        for left_out in 0..sizes.len() {
            let mut some = sizes.to_vec();
            let (key, _) = some.remove(left_out);
            let refused = read(&some, &[0]).unwrap_err().to_string();
            assert!(refused.contains(key), "{refused}");
        }
        let read = |more: &[(&'static str, Value)]| {
            let sizes = sizes.map(|(key, _)| (key, Value::Uint(4)));
            let all = sizes.into_iter().chain(more.iter().cloned());
            layers_of(all, sizes_of(36, 3), &[0], LING.gguf.unwrap())
        };
        let bound = ("kda.gate_lower_bound", Value::Float(-5.0));
        let shape = read(std::slice::from_ref(&bound)).unwrap().unwrap().shape;
        assert_eq!((shape.direct, shape.bound), (true, Some(-5.0)));
        let off = ("kda.safe_gate", Value::Bool(false));
        let shape = read(&[bound, off]).unwrap().unwrap().shape;
        assert_eq!((shape.direct, shape.bound), (true, None));
        let refused = read(&[]).unwrap_err().to_string();
        assert!(refused.contains("gate_lower_bound"), "{refused}");
    }
}
