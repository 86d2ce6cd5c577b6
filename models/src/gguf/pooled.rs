//! Attention over pools of positions (DeepSeek-V4), as read by llama.cpp's `src/models/deepseek4.cpp`.

use super::form::Shape;
use super::value::Metadata;
use crate::config::{
    Activation, Form, HyperConnections, Mixing, PooledAttention, Rope, RopeScaling,
};
use crate::error::Error;
use crate::families::Arch;

/// Pools of this size overlap.
const OVERLAPPING: u32 = 4;

/// The keys read for it, after the architecture.
pub(super) const KEYS: [&str; 19] = [
    "attention.q_lora_rank",
    "attention.output_group_count",
    "attention.output_lora_rank",
    RATIOS,
    "attention.compress_rope_freq_base",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    CHOSEN,
    "hyper_connection.count",
    "hyper_connection.sinkhorn_iterations",
    "hyper_connection.epsilon",
    "hash_layer_count",
    LIMITS[0],
    LIMITS[1],
    FACTOR,
    "expert_shared_count",
    WIDTH,
    "nextn_predict_layers",
    GROUPS,
];
const GROUPS: &str = "expert_group_count";
const WIDTH: &str = "embedding_length_out";
const RATIOS: &str = "attention.compress_ratios";
const CHOSEN: &str = "attention.indexer.top_k";
const LIMITS: [&str; 2] = ["swiglu_clamp_exp", "swiglu_clamp_shexp"];
const FACTOR: &str = "rope.scaling.yarn_attn_factor";

/// Reads the keys of an architecture.
struct Reader<'a> {
    metadata: &'a Metadata,
    arch: &'a Arch,
}

impl Reader<'_> {
    fn key(&self, rest: &str) -> String {
        format!("{}.{rest}", self.arch.name)
    }

    fn need(&self, rest: &str) -> Result<u32, Error> {
        let value = self.metadata.u32(&self.key(rest))?;
        value.ok_or_else(|| self.metadata.missing(&self.key(rest), "an integer"))
    }

    fn need_f32(&self, rest: &str) -> Result<f32, Error> {
        self.metadata.need_f32(&self.key(rest))
    }
}

/// Puts it and its hyper-connections into the form.
pub(super) fn form(
    metadata: &Metadata,
    arch: &Arch,
    shape: Shape,
    form: &mut Form,
) -> Result<(), Error> {
    let (of, layers) = (Reader { metadata, arch }, shape.layers);
    let groups = of.key(GROUPS);
    if (metadata.u32(&groups)?).is_some_and(|groups| groups > 1) {
        return Err(metadata.unsupported(&groups, "experts in groups are not implemented here"));
    }
    let mut pools = metadata.u32s(&of.key(RATIOS))?;
    if pools.len() < layers as usize {
        let expected = format!("a number for each of {layers} layers");
        return Err(metadata.bad(&of.key(RATIOS), &expected));
    }
    pools.truncate(layers as usize);
    form.pooled = Some(PooledAttention {
        query_rank: of.need("attention.q_lora_rank")?,
        groups: of.need("attention.output_group_count")?,
        group_rank: of.need("attention.output_lora_rank")?,
        overlapping: if pools.contains(&OVERLAPPING) {
            OVERLAPPING
        } else {
            0
        },
        pools,
    });
    let count = of.need("hyper_connection.count")?;
    let width = count.checked_mul(shape.d_model);
    if (metadata.u32(&of.key(WIDTH))?).is_some_and(|found| Some(found) != width) {
        let expected = format!("{count} times embedding_length");
        return Err(metadata.bad(&of.key(WIDTH), &expected));
    }
    form.hyper = Some(HyperConnections {
        count,
        mixing: Mixing::Sinkhorn {
            iterations: of.need("hyper_connection.sinkhorn_iterations")?,
            eps: of.need_f32("hyper_connection.epsilon")?,
        },
    });
    Ok(())
}

/// Rotary parameters of layers with pools, and of those without, from the common ones.
pub(super) fn ropes(metadata: &Metadata, arch: &Arch, rope: Rope) -> Result<[Rope; 2], Error> {
    let of = Reader { metadata, arch };
    if (metadata.f32(&of.key(FACTOR))?).is_some_and(|factor| factor != 1.0) {
        return Err(metadata.unsupported(&of.key(FACTOR), "only 1 is implemented"));
    }
    let local = Rope {
        scaling: RopeScaling::None,
        ..rope
    };
    let mut scaling = rope.scaling;
    if let RopeScaling::Yarn {
        attention_factor, ..
    } = &mut scaling
    {
        // llama.cpp divides it out again
        *attention_factor = 1.0;
    }
    let pooled = Rope {
        theta: of.need_f32("attention.compress_rope_freq_base")?,
        dims: rope.dims,
        scaling,
    };
    Ok([pooled, local])
}

/// The activation, whose limit is equal in all layers.
pub(super) fn activation(metadata: &Metadata, arch: &Arch) -> Result<Activation, Error> {
    let of = Reader { metadata, arch };
    let mut limit = None;
    for key in LIMITS.map(|rest| of.key(rest)) {
        for value in metadata.numbers(&key)? {
            if *limit.get_or_insert(value) != value {
                let why = "only one limit for all layers is implemented";
                return Err(metadata.unsupported(&key, why));
            }
        }
    }
    let missing = || metadata.missing(&of.key(LIMITS[0]), "a number for each layer");
    Ok(Activation::ClampedSilu {
        limit: limit.ok_or_else(missing)?,
    })
}

/// The first layers, whose experts follow from the token.
pub(super) fn by_token(metadata: &Metadata, arch: &Arch, layers: u32) -> Result<Vec<u32>, Error> {
    let of = Reader { metadata, arch };
    Ok((0..of.need("hash_layer_count")?.min(layers)).collect())
}

/// The key and the number of the entries that an indexer chooses.
pub(super) fn chosen(metadata: &Metadata, arch: &Arch) -> Result<(String, u32), Error> {
    let of = Reader { metadata, arch };
    Ok((of.key(CHOSEN), of.need(CHOSEN)?))
}
