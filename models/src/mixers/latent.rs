//! Latent attention (MLA) of DeepSeek-V2 and its successors.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::MixerKind;
use super::keys::{GgufLayers, HeadKeys, MixerKeys, MixerLayers, RoleShape, Sizes};
use crate::error::Error;
use crate::json::Keys;
use crate::limits::{BadField, MAX_HEAD_DIM, MAX_WIDTH};
use crate::metadata::ArchKeys;
use crate::role::{Role, Spellings};

/// Attention whose keys and values are products of one latent vector for each position (MLA,
/// DeepSeek-V2). [`ModelConfig::head_dim`](crate::config::ModelConfig::head_dim) is the width of a query, the last
/// [`Rope::dims`](crate::config::Rope::dims) elements of which are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LatentShape {
    /// Elements of the latent vector from which queries are projected; `None` if they are projected
    /// from the layer's input.
    pub query_rank: Option<u32>,
    /// Elements of the latent vector of keys and values.
    pub rank: u32,
    /// Elements of a head's value.
    pub value_dim: u32,
    /// Epsilon of the norms of latent vectors.
    pub norm_eps: f32,
    /// Each head's output is multiplied by the sigmoid of a gate, computed from the layer's input (Ling
    /// 3).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gated: bool,
}

/// Elements of the vectors of latent attention, and heads.
#[derive(Debug, Clone, Copy)]
pub struct LatentSizes {
    /// Heads.
    pub heads: usize,
    /// Elements of a query.
    pub query: usize,
    /// Rotated elements of a query.
    pub rotated: usize,
    /// Elements of the latent vector.
    pub rank: usize,
    /// Elements of the queries' latent vector; 0 without.
    pub query_rank: usize,
    /// Elements of a head's value.
    pub value: usize,
    /// Gates of a token: one for each head, or 0.
    pub gates: usize,
}

impl LatentSizes {
    pub(crate) fn of(sizes: Sizes, shape: LatentShape) -> Self {
        let n = |number: u32| number as usize;
        Self {
            heads: n(sizes.heads),
            query: n(sizes.head_dim),
            rotated: n(sizes.rotated),
            rank: n(shape.rank),
            query_rank: shape.query_rank.map_or(0, n),
            value: n(shape.value_dim),
            gates: n(sizes.heads) * usize::from(shape.gated),
        }
    }

    /// Elements of a query that are not rotated.
    pub fn plain(self) -> usize {
        self.query - self.rotated
    }

    /// Elements stored per position.
    pub fn stored(self) -> usize {
        self.rank + self.rotated
    }
}

impl LatentShape {
    pub(super) fn tensors(self, sizes: Sizes) -> Vec<RoleShape> {
        let d = sizes.d_model as usize;
        let of = LatentSizes::of(sizes, self);
        let (mut input, mut all) = (d, Vec::new());
        if of.query_rank > 0 {
            input = of.query_rank;
            all.extend([(Role::LatentQ, input, d), (Role::LatentQNorm, 1, input)]);
        }
        if self.gated {
            all.push((Role::QGate, of.gates, d));
        }
        all.extend([
            (Role::Q, of.heads * of.query, input),
            (Role::LatentKv, of.stored(), d),
            (Role::LatentKvNorm, 1, of.rank),
            (Role::LatentKeys, of.heads * of.rank, of.plain()),
            (Role::LatentValues, of.heads * of.value, of.rank),
            (Role::O, d, of.heads * of.value),
        ]);
        all
    }
}

impl MixerLayers for LatentShape {
    fn names(&self) -> [&'static str; 2] {
        ["latent", "layers with latent attention"]
    }

    fn layers(&self) -> Option<&Vec<u32>> {
        None
    }

    fn kind(&self, _layer: u32) -> MixerKind {
        MixerKind::Latent(*self)
    }

    fn bad(&self, of: Sizes) -> Option<BadField> {
        let query_rank = self.query_rank.unwrap_or(1);
        let sizes = [
            ("rank of keys and values", self.rank, 1, MAX_HEAD_DIM),
            ("width of values", self.value_dim, 1, MAX_HEAD_DIM),
            ("rank of queries", query_rank, 1, MAX_WIDTH),
        ];
        if let Some(bad) = BadField::outside(&sizes) {
            return Some(bad);
        }
        if of.rotated == 0 || of.rotated >= of.head_dim {
            let expected = format!("1 to less than head_dim = {}", of.head_dim);
            return BadField::some("rope.dims", &of.rotated, expected);
        }
        let stored = self.rank + of.rotated;
        let widest = stored.max(of.head_dim).max(self.value_dim);
        if stored > MAX_HEAD_DIM || of.heads > MAX_WIDTH / widest {
            let expected = format!("at most {MAX_HEAD_DIM}, and {MAX_WIDTH} for all heads");
            return BadField::some("elements of a key", &widest, expected);
        }
        BadField::unless_share("epsilon", self.norm_eps)
    }

    fn alone(self, _layer: u32) -> Option<Self> {
        Some(self)
    }

    /// The vectors are the keys and values of one head.
    fn gguf(&self, of: Sizes) -> Vec<(&'static str, u32)> {
        vec![
            ("attention.head_count_kv", 1),
            // required by llama.cpp unless it knows the model by its number of layers
            (GGUF_QUERY_RANK, self.query_rank.unwrap_or(0)),
            (GGUF_RANK, self.rank),
            ("attention.key_length", self.rank + of.rotated),
            ("attention.value_length", self.rank),
            (GGUF_HEAD_DIM, of.head_dim),
            (GGUF_VALUE_DIM, self.value_dim),
        ]
    }
}

/// Names in safetensors.
pub(crate) const HF_NAMES: Spellings = &[
    (Role::Q, "self_attn.q_proj.weight"),
    (Role::LatentQ, "self_attn.q_a_proj.weight"),
    (Role::LatentQNorm, "self_attn.q_a_layernorm.weight"),
    (Role::Q, "self_attn.q_b_proj.weight"),
    (Role::LatentKv, "self_attn.kv_a_proj_with_mqa.weight"),
    (Role::LatentKvNorm, "self_attn.kv_a_layernorm.weight"),
    (Role::O, "self_attn.o_proj.weight"),
];

/// The same of Ling 3.
pub(crate) const LING_NAMES: Spellings = &[
    (Role::Q, "attention.q_proj.weight"),
    (Role::LatentQ, "attention.q_a_proj.weight"),
    (Role::LatentQNorm, "attention.q_a_layernorm.weight"),
    (Role::Q, "attention.q_b_proj.weight"),
    (Role::LatentKv, "attention.kv_a_proj_with_mqa.weight"),
    (Role::LatentKvNorm, "attention.kv_a_layernorm.weight"),
    (Role::O, "attention.dense.weight"),
];

/// Names in GGUF.
pub(crate) const GGUF_NAMES: Spellings = &[
    (Role::Q, "attn_q.weight"),
    (Role::LatentQ, "attn_q_a.weight"),
    (Role::LatentQNorm, "attn_q_a_norm.weight"),
    (Role::Q, "attn_q_b.weight"),
    (Role::LatentKv, "attn_kv_a_mqa.weight"),
    (Role::LatentKvNorm, "attn_kv_a_norm.weight"),
    (Role::LatentKeys, "attn_k_b.weight"),
    (Role::LatentValues, "attn_v_b.weight"),
    (Role::O, "attn_output.weight"),
];

/// `modeling_deepseek_v3.py`: every layer has it.
pub(crate) const DEEPSEEK: MixerKeys<LatentShape> =
    MixerKeys::new(|keys, _| read(keys, false), write)
        .gguf(read_gguf_alone, GGUF_KEYS)
        .heads(HEADS, |heads| heads);

/// `modeling_kimi_linear.py`: beside layers with other mixers. The class ignores `head_dim`.
pub(crate) const KIMI: MixerKeys<LatentShape> = MixerKeys::new(|keys, _| read(keys, false), write)
    .gguf(|file| read_gguf(file, false), GGUF_KEYS)
    .heads(KIMI_HEADS, |heads| heads);

/// `modeling_bailing_hybrid.py` (Ling 3): the same with gates; the query rank may be absent.
pub(crate) const LING: MixerKeys<LatentShape> = MixerKeys::new(|keys, _| read(keys, true), write)
    .gguf(|file| read_gguf(file, true), GGUF_KEYS)
    .heads(KIMI_HEADS, |heads| heads);

/// The width of a query.
const HEADS: Option<HeadKeys> = Some(HeadKeys {
    hf: |keys| head_dim(keys, &["qk_head_dim", HEAD_DIM]),
    gguf: gguf_head_dim,
});
const KIMI_HEADS: Option<HeadKeys> = Some(HeadKeys {
    hf: |keys| head_dim(keys, &["qk_head_dim"]),
    gguf: gguf_head_dim,
});

/// Factor of the logarithm of YaRN's factor, in the root of the scores' factor: a tenth of the usual value of this key.
pub(crate) const YARN_ALL: &str = "rope.scaling.yarn_log_multiplier";
/// Keys that are read in GGUF.
const GGUF_KEYS: &[&str] = &[
    GGUF_QUERY_RANK,
    GGUF_RANK,
    GGUF_HEAD_DIM,
    GGUF_VALUE_DIM,
    YARN_ALL,
];
const GGUF_QUERY_RANK: &str = "attention.q_lora_rank";
const GGUF_RANK: &str = "attention.kv_lora_rank";
const GGUF_HEAD_DIM: &str = "attention.key_length_mla";
const GGUF_VALUE_DIM: &str = "attention.value_length_mla";

const QUERY_RANK: &str = "q_lora_rank";
const RANK: &str = "kv_lora_rank";
const VALUE_DIM: &str = "v_head_dim";
/// Rotated elements of a query, and the others.
pub(crate) const ROTATED: &str = "qk_rope_head_dim";
const PLAIN: &str = "qk_nope_head_dim";
/// Width of the rotated part in most classes.
const HEAD_DIM: &str = "head_dim";
/// The classes' fixed epsilon of the norms of latent vectors.
const NORM_EPS: f32 = 1e-6;

fn read(keys: &Keys, gated: bool) -> Result<Option<LatentShape>, Error> {
    let query_rank = match keys.map().get(QUERY_RANK) {
        Some(Value::Null) => None,
        Some(_) => Some(keys.need_u32(QUERY_RANK)?),
        None if gated => None,
        None => return Err(keys.missing(QUERY_RANK, "an integer or null")),
    };
    Ok(Some(LatentShape {
        query_rank,
        rank: keys.need_u32(RANK)?,
        value_dim: keys.need_u32(VALUE_DIM)?,
        norm_eps: NORM_EPS,
        gated,
    }))
}

fn write(of: Option<&LatentShape>, sizes: Sizes, config: &mut Value) {
    let Some(latent) = of else { return };
    config[QUERY_RANK] = json!(latent.query_rank);
    config[RANK] = json!(latent.rank);
    config[VALUE_DIM] = json!(latent.value_dim);
    config[ROTATED] = json!(sizes.rotated);
    config[PLAIN] = json!(sizes.head_dim - sizes.rotated);
    config[HEAD_DIM] = json!(sizes.rotated);
}

/// Width of a query. These keys may be equal to it, or `head_dim` to the number of rotated elements.
fn head_dim(keys: &Keys, others: &[&str]) -> Result<u32, Error> {
    let (rotated, plain) = (keys.need_u32(ROTATED)?, keys.need_u32(PLAIN)?);
    let width = rotated.saturating_add(plain);
    for &key in others {
        let fits = |given| given == width || key == HEAD_DIM && given == rotated;
        if keys.u32(key)?.is_some_and(|given| !fits(given)) {
            let expected = format!("{width}, as {ROTATED} and {PLAIN} say");
            return Err(keys.bad(key, &expected));
        }
    }
    Ok(width)
}

/// Width of a query in GGUF. Files older than its key store keys and values in one matrix.
fn gguf_head_dim(keys: &ArchKeys) -> Result<u32, Error> {
    let expected =
        "an integer; a file without it is from an old converter: convert the model again";
    (keys.u32(GGUF_HEAD_DIM)?).ok_or_else(|| keys.missing(GGUF_HEAD_DIM, expected))
}

/// Latent attention in every layer. The converter of models with other mixers does not write these widths of stored
/// vectors.
fn read_gguf_alone(file: &GgufLayers) -> Result<Option<LatentShape>, Error> {
    file.expect("attention.value_length", file.keys.need(GGUF_RANK)?)?;
    file.expect("attention.head_count_kv", 1)?;
    read_gguf(file, false)
}

fn read_gguf(file: &GgufLayers, gated: bool) -> Result<Option<LatentShape>, Error> {
    let keys = file.keys;
    let rank = keys.need(GGUF_RANK)?;
    let stored = rank.saturating_add(file.sizes.rotated);
    file.expect("attention.key_length", stored)?;
    Ok(Some(LatentShape {
        query_rank: keys.u32(GGUF_QUERY_RANK)?.filter(|rank| *rank != 0),
        rank,
        value_dim: keys.need(GGUF_VALUE_DIM)?,
        norm_eps: NORM_EPS,
        gated,
    }))
}
