//! Gated DeltaNets (Qwen3-Next, Qwen3.5, OLMo Hybrid).

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::MixerKind;
use super::keys::{
    GgufLayers, MixerKeys, MixerLayers, RoleShape, SizeKey, Sizes, gguf_sizes, listed, need_sizes,
    read_sizes, write_sizes,
};
use super::layers::{self, LINEAR};
use super::mamba::head_width;
use crate::error::Error;
use crate::json::Keys;
use crate::limits::{BadField, MAX_COUNT, MAX_HEAD_DIM, MAX_TAPS, MAX_WIDTH};
use crate::role::{Role, Spellings};

/// Gated DeltaNets instead of attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeltaNets {
    /// The layers that have one, ascending.
    pub layers: Vec<u32>,
    /// Its sizes.
    pub shape: DeltaNetShape,
}

/// Sizes of a gated DeltaNet.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DeltaNetShape {
    /// Taps of its convolution, including the current token.
    pub taps: u32,
    /// Heads of queries and keys.
    pub key_heads: u32,
    /// Heads of values, a multiple of them.
    pub value_heads: u32,
    /// Width of a query or a key.
    pub key_dim: u32,
    /// Width of a value.
    pub value_dim: u32,
    /// Value head `j` belongs to key head `j mod key_heads`, as in GGUF; otherwise consecutive value
    /// heads share a key head.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tiled: bool,
    /// The output gates are sigmoids, not SiLU.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sigmoid_gate: bool,
    /// β is up to 2, not 1, so that the state's eigenvalues are from −1 to 1 (OLMo Hybrid).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub signed: bool,
    /// Epsilon of the norm of its output, if it differs from that of the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm_eps: Option<f32>,
}

impl DeltaNetShape {
    /// Width of all keys, and of all queries.
    pub fn keys(self) -> usize {
        self.key_heads as usize * self.key_dim as usize
    }

    /// Width of all values.
    pub fn values(self) -> usize {
        self.value_heads as usize * self.value_dim as usize
    }

    /// Channels of the convolution: queries, keys, values.
    pub fn channels(self) -> usize {
        2 * self.keys() + self.values()
    }

    /// The key head of a value head.
    pub fn key_head(self, value_head: u32) -> u32 {
        if self.tiled {
            value_head % self.key_heads
        } else {
            value_head / (self.value_heads / self.key_heads)
        }
    }

    pub(super) fn tensors(self, of: Sizes) -> Vec<RoleShape> {
        let [d, heads, dim, taps] =
            [of.d_model, self.value_heads, self.value_dim, self.taps].map(|n| n as usize);
        vec![
            (Role::DeltaIn, self.channels(), d),
            (Role::DeltaGate, self.values(), d),
            (Role::DeltaBeta, heads, d),
            (Role::DeltaDecay, heads, d),
            (Role::DeltaStep, 1, heads),
            (Role::DeltaRate, 1, heads),
            (Role::DeltaConv, self.channels(), taps),
            (Role::DeltaNorm, 1, dim),
            (Role::DeltaOut, d, self.values()),
        ]
    }
}

impl MixerLayers for DeltaNets {
    listed!("delta_net", "layers with DeltaNets");

    fn kind(&self, _layer: u32) -> MixerKind {
        MixerKind::DeltaNet(self.shape)
    }

    fn bad(&self, _of: Sizes) -> Option<BadField> {
        let net = self.shape;
        let sizes = [
            ("taps of DeltaNets", net.taps, 2, MAX_TAPS),
            ("key heads of DeltaNets", net.key_heads, 1, MAX_COUNT),
            ("value heads of DeltaNets", net.value_heads, 1, MAX_COUNT),
            ("key width of DeltaNets", net.key_dim, 1, MAX_HEAD_DIM),
            ("value width of DeltaNets", net.value_dim, 1, MAX_HEAD_DIM),
        ];
        BadField::outside(&sizes)
            .or_else(|| {
                let expected = format!("a multiple of the {} key heads", net.key_heads);
                let divides = net.value_heads.is_multiple_of(net.key_heads);
                BadField::unless(
                    divides,
                    "value heads of DeltaNets",
                    &net.value_heads,
                    expected,
                )
            })
            .or_else(|| BadField::above("channels of DeltaNets", net.channels(), MAX_WIDTH))
            .or_else(|| BadField::unless_share("epsilon of DeltaNets", net.norm_eps?))
    }

    fn gguf(&self, of: Sizes) -> Vec<(&'static str, u32)> {
        let mut all = gguf_sizes(GGUF_SIZES, self.shape);
        all.push(("ssm.inner_size", self.shape.values() as u32));
        let mut others = layers::others(Some(&self.layers), of.layers).into_iter();
        let interval = others.next().map_or(of.layers + 1, |first| first + 1);
        all.push((INTERVAL, interval));
        all
    }
}

/// Names in safetensors, without those of the projections of its input.
pub(crate) const HF_NAMES: Spellings = &[
    (Role::DeltaConv, "linear_attn.conv1d.weight"),
    (Role::DeltaStep, "linear_attn.dt_bias"),
    (Role::DeltaRate, "linear_attn.A_log"),
    (Role::DeltaNorm, "linear_attn.norm.weight"),
    (Role::DeltaOut, "linear_attn.out_proj.weight"),
];

/// Projections in separate tensors.
pub(crate) const HF_INPUTS: Spellings = &[
    (Role::DeltaIn, "linear_attn.in_proj_qkv.weight"),
    (Role::DeltaGate, "linear_attn.in_proj_z.weight"),
    (Role::DeltaBeta, "linear_attn.in_proj_b.weight"),
    (Role::DeltaDecay, "linear_attn.in_proj_a.weight"),
];

/// Names of OLMo Hybrid.
pub(crate) const OLMO_NAMES: Spellings = &[
    (Role::DeltaGate, "linear_attn.g_proj.weight"),
    (Role::DeltaBeta, "linear_attn.b_proj.weight"),
    (Role::DeltaDecay, "linear_attn.a_proj.weight"),
    (Role::DeltaStep, "linear_attn.dt_bias"),
    (Role::DeltaRate, "linear_attn.A_log"),
    (Role::DeltaConv, "linear_attn.conv1d.weight"),
    (Role::DeltaNorm, "linear_attn.o_norm.weight"),
    (Role::DeltaOut, "linear_attn.o_proj.weight"),
];

/// Its matrices in parts: of queries, of keys, of values.
pub(crate) const OLMO_PARTS: &[(Role, u32, &str)] = &[
    (Role::DeltaIn, 0, "linear_attn.q_proj.weight"),
    (Role::DeltaIn, 1, "linear_attn.k_proj.weight"),
    (Role::DeltaIn, 2, "linear_attn.v_proj.weight"),
    (Role::DeltaConv, 0, "linear_attn.q_conv1d.weight"),
    (Role::DeltaConv, 1, "linear_attn.k_conv1d.weight"),
    (Role::DeltaConv, 2, "linear_attn.v_conv1d.weight"),
];

/// Names in GGUF.
pub(crate) const GGUF_NAMES: Spellings = &[
    (Role::DeltaIn, "attn_qkv.weight"),
    (Role::DeltaGate, "attn_gate.weight"),
    (Role::DeltaConv, "ssm_conv1d.weight"),
    (Role::DeltaStep, "ssm_dt.bias"),
    (Role::DeltaRate, "ssm_a"),
    (Role::DeltaNorm, "ssm_norm.weight"),
    (Role::DeltaOut, "ssm_out.weight"),
];

/// Its projections to one number per head, in separate tensors.
pub(crate) const GGUF_SHARES: Spellings = &[
    (Role::DeltaBeta, "ssm_beta.weight"),
    (Role::DeltaDecay, "ssm_alpha.weight"),
];

/// `modeling_qwen3_next.py`. llama.cpp's converter keeps the order of value heads.
pub(crate) const QWEN3_NEXT: MixerKeys<DeltaNets> =
    MixerKeys::new(read_qwen, write).gguf(|file| read_gguf(file, false, false), GGUF_KEYS);

/// `modeling_qwen3_5.py`. The converter orders value heads so that those of a key head have a distance of `key_heads`.
pub(crate) const QWEN3_5: MixerKeys<DeltaNets> =
    MixerKeys::new(read_qwen, write).gguf(|file| read_gguf(file, true, false), GGUF_KEYS);

/// `modeling_qwen4_exp.py`: the same; attention, which is indexed, may have a separate name. Gates are sigmoids in every
/// GGUF file.
pub(crate) const QWEN4: MixerKeys<DeltaNets> = MixerKeys::new(
    |keys, sizes| read(keys, sizes, &[LINEAR[1], "indexed_attention"]),
    write,
)
.gguf(|file| read_gguf(file, true, true), GGUF_KEYS);

/// `modeling_olmo_hybrid.py`.
pub(crate) const OLMO: MixerKeys<DeltaNets> = MixerKeys::new(read_olmo, |of, sizes, config| {
    write(of, sizes, config);
    config[SIGNED] = json!(of.is_none_or(|of| of.shape.signed));
});

/// The keys that are read in GGUF, and those of M-RoPE (plain RoPE in texts) of models that have them.
const GGUF_KEYS: &[&str] = &[
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
    RECURRENT,
    INTERVAL,
    "rope.dimension_sections",
];
const GGUF_SIZES: &[SizeKey<DeltaNetShape>] = &[
    ("ssm.conv_kernel", |net| &mut net.taps),
    ("ssm.state_size", |net| &mut net.key_dim),
    ("ssm.group_count", |net| &mut net.key_heads),
    ("ssm.time_step_rank", |net| &mut net.value_heads),
];
const RECURRENT: &str = "attention.recurrent_layers";
/// Every layer with a multiple of this number has attention, in both formats.
const INTERVAL: &str = "full_attention_interval";
const HF_SIZES: &[SizeKey<DeltaNetShape>] = &[
    ("linear_conv_kernel_dim", |net| &mut net.taps),
    ("linear_num_key_heads", |net| &mut net.key_heads),
    ("linear_num_value_heads", |net| &mut net.value_heads),
    ("linear_key_head_dim", |net| &mut net.key_dim),
    ("linear_value_head_dim", |net| &mut net.value_dim),
];
const GATE: &str = "output_gate_type";
const SIGNED: &str = "linear_allow_neg_eigval";
/// Sizes without keys.
const USUAL: DeltaNetShape = DeltaNetShape {
    taps: 4,
    key_heads: 16,
    value_heads: 32,
    key_dim: 128,
    value_dim: 128,
    tiled: false,
    sigmoid_gate: false,
    signed: false,
    norm_eps: None,
};
/// Epsilon of the norms of outputs in OLMo Hybrid, for which there is no key.
const OLMO_EPS: f32 = 1e-5;

fn some(layers: Vec<u32>, shape: DeltaNetShape) -> Option<DeltaNets> {
    (!layers.is_empty()).then_some(DeltaNets { layers, shape })
}

fn read_qwen(keys: &Keys, sizes: Sizes) -> Result<Option<DeltaNets>, Error> {
    read(keys, sizes, &[LINEAR[1]])
}

/// `others` are the names of layers with attention.
fn read(keys: &Keys, sizes: Sizes, others: &[&str]) -> Result<Option<DeltaNets>, Error> {
    let with = match layers::named(keys, [&[LINEAR[0]], others], sizes.layers)? {
        Some(with) => with,
        None => match keys.u32(INTERVAL)?.unwrap_or(4) {
            0 => return Err(keys.bad(INTERVAL, "1 or more")),
            interval => layers::all_but_nth(interval, sizes.layers),
        },
    };
    let mut shape = read_sizes(keys, HF_SIZES, USUAL)?;
    shape.sigmoid_gate = keys.str(GATE)? == Some("sigmoid");
    Ok(some(with, shape))
}

/// Absent sizes follow from those of attention.
fn read_olmo(keys: &Keys, sizes: Sizes) -> Result<Option<DeltaNets>, Error> {
    let named = layers::named(keys, [&[LINEAR[0]], &[LINEAR[1]]], sizes.layers)?;
    let with = named.unwrap_or_else(|| {
        let mut with = layers::all_but_nth(4, sizes.layers);
        // the last one has attention, if no other does
        let last = usize::from(sizes.layers <= 3);
        with.truncate(with.len().saturating_sub(last));
        with
    });
    let key_heads = keys.u32("linear_num_key_heads")?.unwrap_or(sizes.heads);
    let usual = (0.75 * f64::from(sizes.d_model) / f64::from(key_heads.max(1))) as u32;
    let key_dim = keys.u32("linear_key_head_dim")?.unwrap_or(usual);
    let usual = DeltaNetShape {
        key_heads,
        value_heads: sizes.heads,
        key_dim,
        value_dim: key_dim.saturating_mul(2),
        signed: keys.bool(SIGNED)?.unwrap_or(true),
        norm_eps: Some(OLMO_EPS),
        ..USUAL
    };
    Ok(some(with, read_sizes(keys, HF_SIZES, usual)?))
}

fn write(of: Option<&DeltaNets>, sizes: Sizes, config: &mut Value) {
    layers::write_names(of.map(|of| &of.layers), LINEAR, sizes.layers, config);
    let Some(shape) = of.map(|of| of.shape) else {
        return;
    };
    write_sizes(HF_SIZES, shape, config);
    let gate = if shape.sigmoid_gate {
        "sigmoid"
    } else {
        "silu"
    };
    config[GATE] = json!(gate);
}

/// The layers are all but every [`INTERVAL`]-th, or those with flags.
fn read_gguf(
    file: &GgufLayers,
    tiled: bool,
    sigmoid_gate: bool,
) -> Result<Option<DeltaNets>, Error> {
    let (keys, layers) = (file.keys, file.sizes.layers);
    let list = keys.key(RECURRENT);
    let with: Vec<u32> = match keys.metadata.flags(&list)? {
        // including those for multi-token prediction
        Some(flags) if flags.len() >= layers as usize => {
            let all = (0..layers).zip(flags);
            all.filter(|(_, linear)| *linear).map(|all| all.0).collect()
        }
        Some(_) => return Err(keys.bad(RECURRENT, &format!("a flag for each of {layers} layers"))),
        None if keys.metadata.has(&list) => return Err(keys.bad(RECURRENT, "a list of flags")),
        None => match keys.u32(INTERVAL)?.unwrap_or(4) {
            0 => return Err(keys.bad(INTERVAL, "1 or more")),
            interval => layers::all_but_nth(interval, layers),
        },
    };
    if with.is_empty() {
        return Ok(None);
    }
    let shape = need_sizes(keys, GGUF_SIZES, USUAL)?;
    let shape = DeltaNetShape {
        value_dim: head_width(keys, shape.value_heads)?,
        tiled,
        sigmoid_gate,
        ..shape
    };
    Ok(some(with, shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata;
    use crate::testing::{keys_of, layers_of, sizes_of};

    #[test]
    fn layers_are_told_by_kind_or_by_an_interval() {
        let layers = |value: Value| {
            let read = |keys: &Keys| (QWEN3_NEXT.read)(keys, sizes_of(36, 5));
            let nets = keys_of(&value, read)?;
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
    fn olmo_hybrid_takes_sizes_from_attention() {
        let found = |value: Value, layers| {
            let sizes = Sizes {
                heads: 4,
                ..sizes_of(32, layers)
            };
            keys_of(&value, |keys| read_olmo(keys, sizes))
                .unwrap()
                .unwrap()
        };
        let nets = found(json!({}), 5);
        assert_eq!(nets.layers, [0, 1, 2, 4]);
        let shape = nets.shape;
        assert_eq!((shape.key_heads, shape.value_heads), (4, 4));
        assert_eq!((shape.key_dim, shape.value_dim), (6, 12));
        assert!(shape.signed && shape.norm_eps == Some(1e-5));
        let few = found(json!({"linear_allow_neg_eigval": false}), 2);
        assert_eq!((few.layers, few.shape.signed), (vec![0], false));
    }

    #[test]
    fn layers_of_gguf_are_told_by_flags_or_by_an_interval() {
        use metadata::Value;

        let found = |more: &[(&'static str, Value)]| {
            let sizes = [
                ("ssm.conv_kernel", 4),
                ("ssm.state_size", 6),
                ("ssm.group_count", 2),
                ("ssm.time_step_rank", 6),
                ("ssm.inner_size", 30),
            ];
            let sizes = sizes.map(|(key, size)| (key, Value::Uint(size)));
            let all = sizes.into_iter().chain(more.iter().cloned());
            layers_of(all, sizes_of(36, 5), &[], QWEN3_5.gguf.unwrap())
        };
        let layers = |more: &[(&'static str, Value)]| found(more).unwrap().map(|nets| nets.layers);
        let flags = |flags: &[bool]| {
            let flags = flags.iter().copied().map(Value::Bool).collect();
            [("attention.recurrent_layers", Value::List(flags))]
        };
        assert_eq!(layers(&[]), Some(vec![0, 1, 2, 4]));
        let second = [("full_attention_interval", Value::Uint(2))];
        assert_eq!(layers(&second), Some(vec![0, 2, 4]));
        // one more layer, for multi-token prediction
        let some = flags(&[true, false, false, true, false, false]);
        assert_eq!(layers(&some), Some(vec![0, 3]));
        assert_eq!(layers(&flags(&[false; 5])), None);
        let shape = found(&[]).unwrap().unwrap().shape;
        assert_eq!((shape.value_dim, shape.channels()), (5, 54));
        assert!(shape.tiled);
        assert!(found(&flags(&[true; 4])).is_err());
        assert!(found(&[("attention.recurrent_layers", Value::Bool(true))]).is_err());
        assert!(found(&[("full_attention_interval", Value::Uint(0))]).is_err());
    }
}
