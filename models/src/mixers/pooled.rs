//! Attention over pools of positions (DeepSeek-V4).

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::MixerKind;
use super::keys::{GgufLayers, MixerKeys, MixerLayers, RoleShape, Sizes};
use crate::error::Error;
use crate::json::Keys;
use crate::limits::{BadField, MAX_HEAD_DIM, MAX_WIDTH};
use crate::metadata::ArchKeys;
use crate::role::{Role, Spellings};

/// Most tokens of a pool.
const MAX_POOL: u32 = 256;

/// Attention that stores one vector for each position, key and value of all heads, and one for each pool
/// of positions (DeepSeek-V4). [`ModelConfig::head_dim`](crate::config::ModelConfig::head_dim) is the width of these vectors,
/// whose last [`Rope::dims`](crate::config::Rope::dims) elements are rotated, in adjacent pairs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PooledAttention {
    /// Elements of the latent vector from which queries are projected.
    pub query_rank: u32,
    /// Groups of heads; each has its own output projection.
    pub groups: u32,
    /// Elements of a group's projected output.
    pub group_rank: u32,
    /// Positions of a pool, by layer; 0 for layers without pools.
    pub pools: Vec<u32>,
    /// Pools of this size overlap: each also covers the positions of the previous one. 0 if none
    /// overlap.
    pub overlapping: u32,
}

/// The same for one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PooledShape {
    /// Elements of the latent vector from which queries are projected.
    pub query_rank: u32,
    /// Groups of heads.
    pub groups: u32,
    /// Elements of a group's projected output.
    pub group_rank: u32,
    /// Positions of a pool; 0 without pools.
    pub pool: u32,
    /// Pools overlap.
    pub overlaps: bool,
}

impl PooledShape {
    /// Pool vectors per position: for its own pool, and for the next if pools overlap.
    pub fn series(self) -> usize {
        match self.pool {
            0 => 0,
            _ => 1 + usize::from(self.overlaps),
        }
    }

    pub(super) fn tensors(self, of: Sizes) -> Vec<RoleShape> {
        let [d, hd, heads] = [of.d_model, of.head_dim, of.heads].map(|n| n as usize);
        let [rank, groups, low, pool] =
            [self.query_rank, self.groups, self.group_rank, self.pool].map(|n| n as usize);
        let mut all = vec![
            (Role::LatentQ, rank, d),
            (Role::LatentQNorm, 1, rank),
            (Role::Q, heads * hd, rank),
            (Role::LatentKv, hd, d),
            (Role::LatentKvNorm, 1, hd),
            (Role::Sinks, 1, heads),
            (Role::PooledOut, groups * low, heads * hd / groups),
            (Role::O, d, groups * low),
        ];
        if pool > 0 {
            let width = self.series() * hd;
            all.extend([
                (Role::PoolKv, width, d),
                (Role::PoolGate, width, d),
                (Role::PoolBias, pool, width),
                (Role::PoolNorm, 1, hd),
            ]);
        }
        all
    }
}

impl PooledAttention {
    /// The sizes for layer `layer`.
    pub(crate) fn of(&self, layer: u32) -> PooledShape {
        let pool = self.pool(layer);
        PooledShape {
            query_rank: self.query_rank,
            groups: self.groups,
            group_rank: self.group_rank,
            pool,
            overlaps: pool != 0 && pool == self.overlapping,
        }
    }

    /// The positions within which an indexer that chooses this many pools chooses all of them; `None` if
    /// there are no pools to choose from.
    pub(crate) fn most_positions(&self, chosen: u32) -> Option<u32> {
        let pool = self.overlapping;
        let most = chosen
            .saturating_mul(pool)
            .saturating_add(pool.saturating_sub(1));
        (pool > 0).then_some(most)
    }

    fn pool(&self, layer: u32) -> u32 {
        self.pools.get(layer as usize).copied().unwrap_or(0)
    }

    /// The pool sizes of the layers, ascending, and the number of layers of each; 0 if there are fewer
    /// than two sizes.
    pub fn sizes(&self) -> [(u32, usize); 2] {
        let mut found = [(0, 0); 2];
        let least = self.pools.iter().copied().filter(|&pool| pool != 0).min();
        let most = self.pools.iter().copied().max();
        let count = |size| self.pools.iter().filter(|&&pool| pool == size).count();
        if let Some(least) = least {
            found[0] = (least, count(least));
        }
        if let (Some(least), Some(most)) = (least, most)
            && most != least
        {
            found[1] = (most, count(most));
        }
        found
    }

    /// Indices of layer `layer`'s pools: of their size among the sizes, and of the layer among those
    /// with this size. `None` without pools.
    pub fn place(&self, layer: u32) -> Option<(usize, usize)> {
        let pool = self.pool(layer);
        let size = (self.sizes().iter()).position(|&(size, _)| pool != 0 && size == pool)?;
        let before = &self.pools[..layer as usize];
        Some((size, before.iter().filter(|&&other| other == pool).count()))
    }
}

impl MixerLayers for PooledAttention {
    fn names(&self) -> [&'static str; 2] {
        ["pooled", "layers with pools"]
    }

    fn layers(&self) -> Option<&Vec<u32>> {
        None
    }

    fn kind(&self, layer: u32) -> MixerKind {
        MixerKind::Pooled(self.of(layer))
    }

    fn bad(&self, of: Sizes) -> Option<BadField> {
        let sizes = [
            ("rank of queries", self.query_rank, 1, MAX_WIDTH),
            ("groups of heads", self.groups, 1, of.heads),
            ("rank of a group's output", self.group_rank, 1, MAX_HEAD_DIM),
        ];
        if let Some(bad) = BadField::outside(&sizes) {
            return Some(bad);
        }
        if !of.heads.is_multiple_of(self.groups) {
            let expected = format!("a divisor of heads = {}", of.heads);
            return BadField::some("groups of heads", &self.groups, expected);
        }
        if of.heads > MAX_WIDTH / of.head_dim {
            let expected = format!("at most {MAX_WIDTH} for all heads");
            return BadField::some("head_dim", &of.head_dim, expected);
        }
        let known = self.sizes().map(|(size, _)| size);
        let sound = |&pool: &u32| pool <= MAX_POOL && (pool == 0 || known.contains(&pool));
        if self.pools.len() != of.layers as usize || !self.pools.iter().all(sound) {
            let expected = format!(
                "one for each of {} layers, of two sizes at most, up to {MAX_POOL}",
                of.layers
            );
            return BadField::some("positions of pools", &self.pools, expected);
        }
        None
    }

    fn alone(self, layer: u32) -> Option<Self> {
        let pool = self.pool(layer);
        Some(Self {
            pools: vec![pool],
            overlapping: if pool == self.overlapping { pool } else { 0 },
            ..self
        })
    }
}

/// Names in releases.
pub(crate) const HF_NAMES: Spellings = &[
    (Role::Sinks, "attn.attn_sink"),
    (Role::LatentQ, "attn.wq_a.weight"),
    (Role::LatentQNorm, "attn.q_norm.weight"),
    (Role::Q, "attn.wq_b.weight"),
    (Role::LatentKv, "attn.wkv.weight"),
    (Role::LatentKvNorm, "attn.kv_norm.weight"),
    (Role::LatentKvNorm, "attn.norm.weight"),
    (Role::PooledOut, "attn.wo_a.weight"),
    (Role::O, "attn.wo_b.weight"),
    (Role::PoolKv, "attn.compressor.wkv.weight"),
    (Role::PoolGate, "attn.compressor.wgate.weight"),
    (Role::PoolBias, "attn.compressor.ape"),
    (Role::PoolNorm, "attn.compressor.norm.weight"),
];

/// Names in transformers.
pub(crate) const CLASS_NAMES: Spellings = &[
    (Role::Sinks, "self_attn.sinks"),
    (Role::LatentQ, "self_attn.q_a_proj.weight"),
    (Role::LatentQNorm, "self_attn.q_a_norm.weight"),
    (Role::Q, "self_attn.q_b_proj.weight"),
    (Role::LatentKv, "self_attn.kv_proj.weight"),
    (Role::LatentKvNorm, "self_attn.kv_norm.weight"),
    (Role::PooledOut, "self_attn.o_a_proj.weight"),
    (Role::O, "self_attn.o_b_proj.weight"),
    (Role::PoolKv, "self_attn.compressor.kv_proj.weight"),
    (Role::PoolGate, "self_attn.compressor.gate_proj.weight"),
    (Role::PoolBias, "self_attn.compressor.position_bias"),
    (Role::PoolNorm, "self_attn.compressor.kv_norm.weight"),
];

/// Names in GGUF.
pub(crate) const GGUF_NAMES: Spellings = &[
    (Role::Sinks, "attn_sinks.weight"),
    (Role::LatentQ, "attn_q_a.weight"),
    (Role::LatentQNorm, "attn_q_a_norm.weight"),
    (Role::Q, "attn_q_b.weight"),
    (Role::LatentKv, "attn_kv.weight"),
    (Role::LatentKvNorm, "attn_kv_a_norm.weight"),
    (Role::PooledOut, "attn_output_a.weight"),
    (Role::O, "attn_output_b.weight"),
    (Role::PoolKv, "attn_compressor_kv.weight"),
    (Role::PoolGate, "attn_compressor_gate.weight"),
    (Role::PoolBias, "attn_compressor_ape.weight"),
    (Role::PoolNorm, "attn_compressor_norm.weight"),
];

/// `modeling_deepseek_v4.py`; in GGUF as read by llama.cpp's `src/models/deepseek4.cpp`.
pub(crate) const DEEPSEEK4: MixerKeys<PooledAttention> = MixerKeys::new(read, write)
    .gguf(read_gguf, GGUF_KEYS)
    .heads(None, |_| 1);

/// Keys that are read in GGUF.
const GGUF_KEYS: &[&str] = &[
    QUERY_RANK,
    GROUPS,
    GROUP_RANK,
    GGUF_RATIOS,
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    GGUF_CHOSEN,
];
const QUERY_RANK: &str = "attention.q_lora_rank";
const GROUPS: &str = "attention.output_group_count";
const GROUP_RANK: &str = "attention.output_lora_rank";
const GGUF_RATIOS: &str = "attention.compress_ratios";
const GGUF_CHOSEN: &str = "attention.indexer.top_k";

/// Kinds of layers, and the positions of their pools in releases.
const KINDS: [(&str, u32); 3] = [
    ("sliding_attention", 0),
    ("compressed_sparse_attention", 4),
    ("heavily_compressed_attention", 128),
];
/// Indices of the kinds with pools.
const OVERLAPPING: usize = 1;
const LARGE: usize = 2;
const LIST: &str = "layer_types";
const RATES: &str = "compress_rates";
/// Default number of entries that an indexer chooses.
const CHOSEN: u32 = 512;

fn read(keys: &Keys, of: Sizes) -> Result<Option<PooledAttention>, Error> {
    let kinds = kinds(keys, of.layers)?;
    let sizes = sizes(keys)?;
    let has = |kind| kinds.contains(&kind);
    if has(OVERLAPPING) && has(LARGE) && sizes[OVERLAPPING] == sizes[LARGE] {
        let expected = "two sizes of pools, one for each kind of layers";
        return Err(keys.bad(RATES, expected));
    }
    Ok(Some(PooledAttention {
        query_rank: keys.u32("q_lora_rank")?.unwrap_or(1024),
        groups: keys.u32("o_groups")?.unwrap_or(8),
        group_rank: keys.u32("o_lora_rank")?.unwrap_or(1024),
        pools: kinds.iter().map(|&kind| sizes[kind]).collect(),
        overlapping: if has(OVERLAPPING) {
            sizes[OVERLAPPING]
        } else {
            0
        },
    }))
}

/// The kind of each layer.
fn kinds(keys: &Keys, layers: u32) -> Result<Vec<usize>, Error> {
    const RATIOS: &str = "compress_ratios";
    let layers = layers as usize;
    let named = |key, expected: &str, of: &dyn Fn(&Value) -> Option<usize>| {
        keys.read(key, expected, |value| {
            let list = value.as_array()?;
            // releases also list those that predict further tokens
            let list = (list.len() >= layers).then(|| &list[..layers])?;
            list.iter().map(of).collect::<Option<Vec<usize>>>()
        })
    };
    let by_name = |value: &Value| KINDS.iter().position(|kind| value.as_str() == Some(kind.0));
    let by_ratio = |value: &Value| {
        let ratio = value.as_u64()?;
        KINDS.iter().position(|kind| u64::from(kind.1) == ratio)
    };
    let expected = format!(
        "sliding_attention, compressed_sparse_attention or heavily_compressed_attention for each of {layers} layers"
    );
    if let Some(kinds) = named(LIST, &expected, &by_name)? {
        return Ok(kinds);
    }
    let expected = format!("0, 4 or 128 for each of {layers} layers");
    if let Some(kinds) = named(RATIOS, &expected, &by_ratio)? {
        return Ok(kinds);
    }
    let usual = |layer: usize| match layer {
        0 | 1 => LARGE,
        _ if layer.is_multiple_of(2) => LARGE,
        _ => OVERLAPPING,
    };
    Ok((0..layers).map(usual).collect())
}

/// Positions of a pool by kind.
fn sizes(keys: &Keys) -> Result<[u32; 3], Error> {
    let object = keys.object(RATES, "compress_rates.")?;
    let mut sizes = KINDS.map(|kind| kind.1);
    for (kind, key) in [
        (OVERLAPPING, "compress_rate_csa"),
        (LARGE, "compress_rate_hca"),
    ] {
        let name = KINDS[kind].0;
        let inner = object
            .as_ref()
            .map_or(Ok(None), |object| object.u32(name))?;
        sizes[kind] = keys.u32(key)?.or(inner).unwrap_or(sizes[kind]);
        if sizes[kind] == 0 {
            return Err(keys.bad(key, "1 or more"));
        }
    }
    Ok(sizes)
}

/// The context in which an indexer would choose every pool; `None` if no layer has an indexer.
pub(crate) fn most_positions(keys: &Keys, pooled: &PooledAttention) -> Result<Option<u32>, Error> {
    let chosen = keys.u32("index_topk")?.unwrap_or(CHOSEN);
    Ok(pooled.most_positions(chosen))
}

/// The key and the number of the entries that an indexer chooses in GGUF.
pub(crate) fn gguf_chosen(keys: ArchKeys<'_>) -> Result<(String, u32), Error> {
    Ok((keys.key(GGUF_CHOSEN), keys.need(GGUF_CHOSEN)?))
}

fn write(of: Option<&PooledAttention>, _sizes: Sizes, config: &mut Value) {
    let Some(pooled) = of else { return };
    config["q_lora_rank"] = json!(pooled.query_rank);
    config["o_groups"] = json!(pooled.groups);
    config["o_lora_rank"] = json!(pooled.group_rank);
    let kind = |pool: u32| match pool {
        0 => KINDS[0].0,
        pool if pool == pooled.overlapping => KINDS[OVERLAPPING].0,
        _ => KINDS[LARGE].0,
    };
    let mut rates = serde_json::Map::new();
    for &pool in pooled.pools.iter().filter(|&&pool| pool > 0) {
        rates.insert(kind(pool).into(), json!(pool));
    }
    config[LIST] = pooled.pools.iter().map(|&pool| kind(pool)).collect();
    config[RATES] = Value::Object(rates);
}

fn read_gguf(file: &GgufLayers) -> Result<Option<PooledAttention>, Error> {
    let (keys, layers) = (file.keys, file.sizes.layers as usize);
    let mut pools = keys.u32s(GGUF_RATIOS)?;
    if pools.len() < layers {
        let expected = format!("a number for each of {layers} layers");
        return Err(keys.bad(GGUF_RATIOS, &expected));
    }
    pools.truncate(layers);
    file.expect("attention.head_count_kv", 1)?;
    let overlapping = KINDS[OVERLAPPING].1;
    Ok(Some(PooledAttention {
        query_rank: keys.need(QUERY_RANK)?,
        groups: keys.need(GROUPS)?,
        group_rank: keys.need(GROUP_RANK)?,
        overlapping: overlapping * u32::from(pools.contains(&overlapping)),
        pools,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{keys_of, sizes_of};

    fn read_of(config: &Value) -> Result<Option<PooledAttention>, Error> {
        keys_of(config, |keys| read(keys, sizes_of(36, 5)))
    }

    #[test]
    fn layers_have_places_among_those_with_pools_of_their_size() {
        let pooled = PooledAttention {
            query_rank: 1,
            groups: 1,
            group_rank: 1,
            pools: vec![128, 4, 0, 128, 4, 4],
            overlapping: 4,
        };
        assert_eq!(pooled.sizes(), [(4, 3), (128, 2)]);
        let places: Vec<_> = (0..6).map(|layer| pooled.place(layer)).collect();
        let expected = [
            Some((1, 0)),
            Some((0, 0)),
            None,
            Some((1, 1)),
            Some((0, 1)),
            Some((0, 2)),
        ];
        assert_eq!(places, expected);
        assert_eq!([0, 1, 2].map(|layer| pooled.of(layer).series()), [1, 2, 0]);
        assert_eq!(pooled.most_positions(512), Some(2051));
        let apart = PooledAttention {
            overlapping: 0,
            ..pooled
        };
        assert_eq!(apart.most_positions(512), None);
    }

    #[test]
    fn layers_are_named_by_kind_or_by_ratio() {
        let pools = |config: Value| read_of(&config).unwrap().unwrap().pools;
        assert_eq!(pools(json!({})), [128, 128, 128, 4, 128]);
        let ratios = json!({"compress_ratios": [0, 128, 4, 0, 4, 0]});
        assert_eq!(pools(ratios), [0, 128, 4, 0, 4]);
        let [sliding, sparse, heavy] = KINDS.map(|kind| kind.0);
        let kinds = json!({
            "layer_types": [sliding, sparse, heavy, heavy, sparse],
            "compress_rates": {sparse: 3, heavy: 7},
            "compress_rate_hca": 9,
        });
        assert_eq!(pools(kinds), [0, 3, 9, 9, 3]);
        for bad in [
            json!({"compress_ratios": [0, 128, 4, 0]}),
            json!({"compress_ratios": [0, 128, 5, 0, 4]}),
            json!({"layer_types": ["full_attention", sparse, sparse, sparse, sparse]}),
            json!({"compress_rates": {sparse: 3, heavy: 3}}),
            json!({"compress_rate_csa": 0}),
        ] {
            assert!(read_of(&bad).is_err(), "{bad}");
        }
    }
}
