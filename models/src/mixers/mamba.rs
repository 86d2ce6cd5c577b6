//! Mamba-2, instead of attention or beside it.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::MixerKind;
use super::keys::{
    GgufLayers, MixerKeys, MixerLayers, RoleShape, SizeKey, Sizes, gguf_sizes, listed, need_sizes,
    read_sizes, write_sizes,
};
use super::layers;
use super::sublayers::{self, Sublayer};
use crate::error::Error;
use crate::json::Keys;
use crate::limits::{BadField, MAX_COUNT, MAX_HEAD_DIM, MAX_TAPS, MAX_WIDTH};
use crate::metadata::ArchKeys;
use crate::role::{Role, Spellings};

/// Mamba-2 layers instead of attention.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MambaLayers {
    /// The layers that have one, ascending.
    pub layers: Vec<u32>,
    /// Its sizes.
    pub shape: MambaShape,
    /// These layers have attention too: both read the layer's input, and their outputs are added (Falcon-H1).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beside: bool,
}

/// Sizes of a Mamba-2 layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MambaShape {
    /// Taps of its convolution, including the current token.
    pub taps: u32,
    /// Heads.
    pub heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Groups of consecutive heads, which share `B` and `C`.
    pub groups: u32,
    /// State elements for each element of a head.
    pub state_dim: u32,
    /// Its gated output has no norm.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unnormed: bool,
}

impl MambaShape {
    /// Width of all heads.
    pub fn values(self) -> usize {
        self.heads as usize * self.head_dim as usize
    }

    /// Channels of the convolution: the heads' inputs, `B` and `C` of each group.
    pub fn channels(self) -> usize {
        self.values() + 2 * self.groups as usize * self.state_dim as usize
    }

    /// Rows of the input projection: gates of the output, channels, a step for each head.
    pub fn inputs(self) -> usize {
        self.values() + self.channels() + self.heads as usize
    }

    /// The group of a head.
    pub fn group_of(self, head: u32) -> u32 {
        head / (self.heads / self.groups)
    }

    pub(super) fn tensors(self, of: Sizes) -> Vec<RoleShape> {
        let [d, heads, taps] = [of.d_model, self.heads, self.taps].map(|n| n as usize);
        let mut all = vec![
            (Role::MambaIn, self.inputs(), d),
            (Role::MambaConv, self.channels(), taps),
            (Role::MambaConvBias, 1, self.channels()),
            (Role::MambaStep, 1, heads),
            (Role::MambaRate, 1, heads),
            (Role::MambaSkip, 1, heads),
        ];
        all.extend((!self.unnormed).then_some((Role::MambaNorm, 1, self.values())));
        all.push((Role::MambaOut, d, self.values()));
        all
    }
}

impl MixerLayers for MambaLayers {
    listed!("mamba", "layers with Mamba");

    fn kind(&self, _layer: u32) -> MixerKind {
        match self.beside {
            true => MixerKind::Beside(self.shape),
            false => MixerKind::Mamba(self.shape),
        }
    }

    fn bad(&self, _of: Sizes) -> Option<BadField> {
        let mamba = self.shape;
        let sizes = [
            ("taps of Mamba", mamba.taps, 2, MAX_TAPS),
            ("heads of Mamba", mamba.heads, 1, MAX_COUNT),
            ("head width of Mamba", mamba.head_dim, 1, MAX_HEAD_DIM),
            ("groups of Mamba", mamba.groups, 1, MAX_COUNT),
            ("state of Mamba", mamba.state_dim, 1, MAX_HEAD_DIM),
        ];
        BadField::outside(&sizes)
            .or_else(|| {
                let expected = format!("a divisor of the {} heads", mamba.heads);
                let divides = mamba.heads.is_multiple_of(mamba.groups);
                BadField::unless(divides, "groups of Mamba", &mamba.groups, expected)
            })
            .or_else(|| BadField::above("inputs of Mamba", mamba.inputs(), MAX_WIDTH))
    }

    fn gguf(&self, _of: Sizes) -> Vec<(&'static str, u32)> {
        let mut all = gguf_sizes(GGUF_SIZES, self.shape);
        all.push((WIDTH, self.shape.values() as u32));
        all
    }

    /// One number for each head, and the norm group by group.
    fn gguf_rows(&self, role: Role) -> Option<u32> {
        match role {
            Role::MambaRate | Role::MambaSkip => Some(self.shape.heads),
            Role::MambaNorm => Some(self.shape.groups),
            _ => None,
        }
    }
}

/// Names in safetensors.
pub(crate) const HF_NAMES: Spellings = &[
    (Role::MambaIn, "mamba.in_proj.weight"),
    (Role::MambaConv, "mamba.conv1d.weight"),
    (Role::MambaConvBias, "mamba.conv1d.bias"),
    (Role::MambaStep, "mamba.dt_bias"),
    (Role::MambaRate, "mamba.A_log"),
    (Role::MambaSkip, "mamba.D"),
    (Role::MambaNorm, "mamba.norm.weight"),
    (Role::MambaOut, "mamba.out_proj.weight"),
];

/// Names of Nemotron-H.
pub(crate) const NEMOTRON_NAMES: Spellings = &[
    (Role::MambaIn, "mixer.in_proj.weight"),
    (Role::MambaConv, "mixer.conv1d.weight"),
    (Role::MambaConvBias, "mixer.conv1d.bias"),
    (Role::MambaStep, "mixer.dt_bias"),
    (Role::MambaRate, "mixer.A_log"),
    (Role::MambaSkip, "mixer.D"),
    (Role::MambaNorm, "mixer.norm.weight"),
    (Role::MambaOut, "mixer.out_proj.weight"),
];

/// Names in GGUF.
pub(crate) const GGUF_NAMES: Spellings = &[
    (Role::MambaIn, "ssm_in.weight"),
    (Role::MambaConv, "ssm_conv1d.weight"),
    (Role::MambaConvBias, "ssm_conv1d.bias"),
    (Role::MambaStep, "ssm_dt.bias"),
    (Role::MambaRate, "ssm_a"),
    (Role::MambaSkip, "ssm_d"),
    (Role::MambaNorm, NORM),
    (Role::MambaOut, "ssm_out.weight"),
];

/// The norm of the output, which files may lack.
const NORM: &str = "ssm_norm.weight";

/// `modeling_granitemoehybrid.py` (Granite 4): layers are told by kind.
pub(crate) const GRANITE: MixerKeys<MambaLayers> = MixerKeys::new(
    |keys, sizes| {
        let layers = layers::named(keys, KINDS, sizes.layers)?;
        instead(keys, sizes, layers)
    },
    |of, sizes, config| {
        let own = [KINDS[0][0], KINDS[1][0]];
        layers::write_names(of.map(|of| &of.layers), own, sizes.layers, config);
        write_instead(of, sizes, config);
    },
)
.headless(read_headless, GGUF_KEYS);

/// `modeling_bamba.py`: a list has the layers with attention.
pub(crate) const BAMBA: MixerKeys<MambaLayers> = MixerKeys::new(
    |keys, sizes| {
        let layers = layers::all_but(keys, ATTENTION, sizes.layers)?;
        instead(keys, sizes, layers)
    },
    |of, sizes, config| {
        config[ATTENTION] = json!(layers::others(of.map(|of| &of.layers), sizes.layers));
        write_instead(of, sizes, config);
    },
);

/// `modeling_nemotron_h.py`: layers have one sublayer each, whose kinds are keys of the family.
pub(crate) const NEMOTRON_H: MixerKeys<MambaLayers> = MixerKeys::new(
    |keys, _| {
        refuse_limits(keys)?;
        let layers = sublayers::layers_of(&sublayers::sublayers(keys)?, Sublayer::Mamba);
        let usual = MambaShape {
            groups: 8,
            state_dim: 128,
            ..USUAL
        };
        Ok(some(layers, read_sizes(keys, NEMOTRON_SIZES, usual)?))
    },
    |of, _, config| {
        if let Some(of) = of {
            write_sizes(NEMOTRON_SIZES, of.shape, config);
        }
    },
)
.headless(read_headless, GGUF_KEYS);

/// `modeling_falcon_h1.py`: beside the attention of every layer. The factors of matrices are in the matrices.
pub(crate) const FALCON_H1: MixerKeys<MambaLayers> =
    MixerKeys::new(read_beside, write_beside).gguf(read_gguf_beside, GGUF_KEYS);

/// Keys that are read in GGUF.
pub(crate) const GGUF_KEYS: &[&str] = &[
    "ssm.conv_kernel",
    WIDTH,
    "ssm.state_size",
    HEADS,
    "ssm.group_count",
];
const GGUF_SIZES: &[SizeKey<MambaShape>] = &[
    ("ssm.conv_kernel", |mamba| &mut mamba.taps),
    ("ssm.state_size", |mamba| &mut mamba.state_dim),
    ("ssm.group_count", |mamba| &mut mamba.groups),
    (HEADS, |mamba| &mut mamba.heads),
];
const HEADS: &str = "ssm.time_step_rank";
/// Width of all heads.
const WIDTH: &str = "ssm.inner_size";

/// Keys of `config.json` of Granite 4, Bamba and Falcon-H1.
const HF_SIZES: &[SizeKey<MambaShape>] = &[
    ("mamba_d_conv", |mamba| &mut mamba.taps),
    ("mamba_n_heads", |mamba| &mut mamba.heads),
    ("mamba_n_groups", |mamba| &mut mamba.groups),
    ("mamba_d_state", |mamba| &mut mamba.state_dim),
];
/// May be `auto`.
const HEAD_DIM: &str = "mamba_d_head";
/// Width of all heads for each element of the residual stream.
const EXPAND: &str = "mamba_expand";
/// Width of all heads beside attention, and the norm of their output.
const BESIDE_WIDTH: &str = "mamba_d_ssm";
const NORMED: &str = "mamba_rms_norm";
const NORM_FIRST: &str = "mamba_norm_before_gate";
/// The layers with attention in Bamba.
const ATTENTION: &str = "attn_layer_indices";
/// Names of layers with Mamba-2 and with attention: in releases, and as transformers 5 writes them.
const KINDS: [&[&str]; 2] = [
    &["mamba", layers::LINEAR[0]],
    &["attention", layers::LINEAR[1]],
];
/// Sizes without keys.
const USUAL: MambaShape = MambaShape {
    taps: 4,
    heads: 128,
    head_dim: 64,
    groups: 1,
    state_dim: 256,
    unnormed: false,
};

/// Keys of `config.json` of Nemotron-H, whose layers have one sublayer each.
const NEMOTRON_SIZES: &[SizeKey<MambaShape>] = &[
    ("conv_kernel", |mamba| &mut mamba.taps),
    ("mamba_num_heads", |mamba| &mut mamba.heads),
    ("mamba_head_dim", |mamba| &mut mamba.head_dim),
    ("n_groups", |mamba| &mut mamba.groups),
    ("ssm_state_size", |mamba| &mut mamba.state_dim),
];

/// The layers, if there are any.
fn some(layers: Vec<u32>, shape: MambaShape) -> Option<MambaLayers> {
    (!layers.is_empty()).then_some(MambaLayers {
        layers,
        shape,
        beside: false,
    })
}

fn read_headless(file: &GgufLayers) -> Result<Option<MambaLayers>, Error> {
    Ok(some(file.headless.to_vec(), gguf_shape(file.keys)?))
}

fn gguf_shape(keys: ArchKeys<'_>) -> Result<MambaShape, Error> {
    let shape = need_sizes(keys, GGUF_SIZES, USUAL)?;
    Ok(MambaShape {
        head_dim: head_width(keys, shape.heads)?,
        ..shape
    })
}

/// The width of a head in GGUF, of which there are `heads`.
pub(super) fn head_width(keys: ArchKeys<'_>, heads: u32) -> Result<u32, Error> {
    let width = keys.need(WIDTH)?;
    if heads == 0 || !width.is_multiple_of(heads) {
        return Err(keys.bad(WIDTH, &format!("a multiple of {HEADS} = {heads}")));
    }
    Ok(width / heads)
}

/// Mamba-2 instead of attention in the given layers, or in all.
fn instead(
    keys: &Keys,
    sizes: Sizes,
    layers: Option<Vec<u32>>,
) -> Result<Option<MambaLayers>, Error> {
    refuse_limits(keys)?;
    let layers = layers.unwrap_or_else(|| (0..sizes.layers).collect());
    if layers.is_empty() {
        return Ok(None);
    }
    Ok(some(layers, shape(keys, expanded(keys, sizes.d_model)?)?))
}

/// Without layers with Mamba-2 the sizes are values that classes accept.
fn write_instead(of: Option<&MambaLayers>, sizes: Sizes, config: &mut Value) {
    let Some(shape) = of.map(|of| of.shape) else {
        config["mamba_n_heads"] = json!(1);
        return;
    };
    write_sizes(HF_SIZES, shape, config);
    config[HEAD_DIM] = json!(shape.head_dim);
    config[EXPAND] = json!(shape.values() / sizes.d_model as usize);
}

fn read_beside(keys: &Keys, sizes: Sizes) -> Result<Option<MambaLayers>, Error> {
    refuse_limits(keys)?;
    let width = match keys.u32(BESIDE_WIDTH)? {
        Some(width) => width,
        None if keys.map().contains_key(BESIDE_WIDTH) => expanded(keys, sizes.d_model)?,
        // that of the configuration class
        None => 1024,
    };
    let normed = keys.bool(NORMED)?.unwrap_or(false);
    if normed && keys.bool(NORM_FIRST)?.unwrap_or(true) {
        return Err(keys.unsupported(NORM_FIRST, "only false is implemented with mamba_rms_norm"));
    }
    Ok(Some(beside(sizes, shape(keys, width)?, normed)))
}

fn write_beside(of: Option<&MambaLayers>, _sizes: Sizes, config: &mut Value) {
    let Some(shape) = of.map(|of| of.shape) else {
        return;
    };
    write_sizes(HF_SIZES, shape, config);
    config[HEAD_DIM] = json!(shape.head_dim);
    config[BESIDE_WIDTH] = json!(shape.values());
    config[NORMED] = json!(!shape.unnormed);
    config[NORM_FIRST] = json!(false);
}

fn read_gguf_beside(file: &GgufLayers) -> Result<Option<MambaLayers>, Error> {
    let normed = file.tensors.contains(NORM);
    Ok(Some(beside(file.sizes, gguf_shape(file.keys)?, normed)))
}

/// Mamba-2 beside the attention of every layer.
fn beside(sizes: Sizes, shape: MambaShape, normed: bool) -> MambaLayers {
    MambaLayers {
        layers: (0..sizes.layers).collect(),
        shape: MambaShape {
            unnormed: !normed,
            ..shape
        },
        beside: true,
    }
}

/// The width of all heads: a multiple of that of the residual stream.
fn expanded(keys: &Keys, d_model: u32) -> Result<u32, Error> {
    let expand = keys.u32(EXPAND)?.unwrap_or(2);
    Ok(d_model.saturating_mul(expand))
}

/// The sizes of a Mamba-2 whose heads have this width together.
fn shape(keys: &Keys, width: u32) -> Result<MambaShape, Error> {
    let shape = read_sizes(keys, HF_SIZES, USUAL)?;
    let fits = |dim: &u32| dim.checked_mul(shape.heads) == Some(width);
    let given = match keys.get(HEAD_DIM).and_then(Value::as_str) {
        Some("auto") => None,
        _ => keys.u32(HEAD_DIM)?,
    };
    let dim = given
        .or_else(|| width.checked_div(shape.heads))
        .filter(fits);
    let expected = || {
        format!(
            "the width of Mamba, {width}, by mamba_n_heads = {}",
            shape.heads
        )
    };
    Ok(MambaShape {
        head_dim: dim.ok_or_else(|| keys.bad(HEAD_DIM, &expected()))?,
        ..shape
    })
}

/// Refuses limits of the steps, which transformers applies only to prompts. Every step is above 0 and
/// below infinity, which transformers writes as an object.
fn refuse_limits(keys: &Keys) -> Result<(), Error> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata;
    use crate::testing::{keys_of, layers_of, sizes_of};

    fn read(value: Value) -> Result<Option<MambaLayers>, Error> {
        let format = if value.get(ATTENTION).is_some() {
            BAMBA
        } else {
            GRANITE
        };
        keys_of(&value, |keys| (format.read)(keys, sizes_of(36, 3)))
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
        let listed = json!({"mamba_n_heads": 9, ATTENTION: [1]});
        assert_eq!(read(listed).unwrap().unwrap().layers, [0, 2]);
        assert!(read(json!({"mamba_n_heads": 9, ATTENTION: [3]})).is_err());
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
        let read = |value: Value| {
            keys_of(&value, |keys| read_beside(keys, sizes_of(36, 2))).map(Option::unwrap)
        };
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

    #[test]
    fn gguf_needs_all_sizes_and_heads_divide_the_width() {
        let read = |sizes: &[(&'static str, u64)]| {
            let sizes = sizes
                .iter()
                .map(|&(key, n)| (key, metadata::Value::Uint(n)));
            let read = GRANITE.gguf.unwrap();
            layers_of(sizes, sizes_of(36, 3), &[0, 2], read)
        };
        let sizes = [
            ("ssm.conv_kernel", 4),
            ("ssm.inner_size", 72),
            ("ssm.state_size", 6),
            ("ssm.time_step_rank", 9),
            ("ssm.group_count", 3),
        ];
        let found = read(&sizes).unwrap().unwrap();
        let expected = MambaShape {
            taps: 4,
            heads: 9,
            head_dim: 8,
            groups: 3,
            state_dim: 6,
            unnormed: false,
        };
        assert_eq!((&found.layers[..], found.shape), (&[0, 2][..], expected));
        let groups: Vec<u32> = (0..9).map(|head| expected.group_of(head)).collect();
        assert_eq!(groups, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
        let written = found.gguf(sizes_of(36, 3)).into_iter();
        let mut written: Vec<(&str, u64)> = written.map(|(key, n)| (key, n.into())).collect();
        let mut wanted = sizes.to_vec();
        written.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(written, wanted);
        for left_out in 0..sizes.len() {
            let mut sizes = sizes.to_vec();
            let (key, _) = sizes.remove(left_out);
            let refused = read(&sizes).unwrap_err().to_string();
            assert!(refused.contains(key), "{refused}");
        }
        for heads in [0, 7] {
            let mut sizes = sizes;
            sizes[3].1 = heads;
            assert!(read(&sizes).is_err());
        }
    }
}
