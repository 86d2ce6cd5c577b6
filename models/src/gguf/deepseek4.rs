//! DeepSeek-V4, as read by llama.cpp's `src/models/deepseek4.cpp`.

use crate::config::{Activation, Form, HyperConnections, Mixing, Rope, RopeScaling};
use crate::error::Error;
use crate::metadata::ArchKeys;
use crate::mixers::Sizes;

/// The keys that are read besides those of pools, after the architecture.
pub(super) const KEYS: [&str; 12] = [
    "attention.compress_rope_freq_base",
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
const LIMITS: [&str; 2] = ["swiglu_clamp_exp", "swiglu_clamp_shexp"];
const FACTOR: &str = "rope.scaling.yarn_attn_factor";

/// Puts its hyper-connections into the form.
pub(super) fn form(of: ArchKeys<'_>, sizes: Sizes, form: &mut Form) -> Result<(), Error> {
    if (of.u32(GROUPS)?).is_some_and(|groups| groups > 1) {
        return Err(of.unsupported(GROUPS, "experts in groups are not implemented here"));
    }
    let count = of.need("hyper_connection.count")?;
    let width = count.checked_mul(sizes.d_model);
    if (of.u32(WIDTH)?).is_some_and(|found| Some(found) != width) {
        return Err(of.bad(WIDTH, &format!("{count} times embedding_length")));
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
pub(super) fn ropes(of: ArchKeys<'_>, rope: Rope) -> Result<[Rope; 2], Error> {
    if (of.f32(FACTOR)?).is_some_and(|factor| factor != 1.0) {
        return Err(of
            .metadata
            .unsupported(&of.key(FACTOR), "only 1 is implemented"));
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
pub(super) fn activation(of: ArchKeys<'_>) -> Result<Activation, Error> {
    let mut limit = None;
    for key in LIMITS.map(|rest| of.key(rest)) {
        for value in of.metadata.numbers(&key)? {
            if *limit.get_or_insert(value) != value {
                let why = "only one limit for all layers is implemented";
                return Err(of.metadata.unsupported(&key, why));
            }
        }
    }
    let missing = || of.missing(LIMITS[0], "a number for each layer");
    Ok(Activation::ClampedSilu {
        limit: limit.ok_or_else(missing)?,
    })
}

/// The first layers, whose experts follow from the token.
pub(super) fn by_token(of: ArchKeys<'_>, layers: u32) -> Result<Vec<u32>, Error> {
    Ok((0..of.need("hash_layer_count")?.min(layers)).collect())
}
