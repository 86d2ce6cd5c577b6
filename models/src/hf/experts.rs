//! The keys of mixtures of experts in `config.json`.

use serde_json::Value;

use super::json::Keys;
use crate::config::{Mixture, Scoring};
use crate::error::Error;

/// A family's keys of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpertKeys {
    /// Mixtral: experts of `intermediate_size` in every layer, weights renormalised.
    Mixtral,
    /// Qwen2-MoE and Qwen3-MoE: experts of `moe_intermediate_size`, some layers dense with
    /// `intermediate_size`.
    Qwen {
        /// With a shared expert of `shared_expert_intermediate_size`.
        shared: bool,
    },
    /// OLMoE: experts of `intermediate_size` in every layer.
    Olmoe,
    /// SmallThinker: experts of `moe_ffn_hidden_size` in every layer, chosen before attention,
    /// weights renormalised.
    SmallThinker,
    /// PhiMoE: two experts of `intermediate_size` in every layer, weighed by sparsemixer.
    PhiMoe,
    /// gpt-oss: experts of `intermediate_size` in every layer, with biases, weights renormalised.
    GptOss,
}

/// `router_jitter_noise` of PhiMoE where the key is absent.
const JITTER: f32 = 0.01;

/// What they say.
pub(super) struct Experts {
    /// Experts per layer.
    pub(super) count: u32,
    /// Neurons per expert.
    pub(super) ffn: u32,
    pub(super) mixture: Mixture,
}

/// Reads the keys of a model of so many layers.
pub(super) fn read(keys: &Keys, of: ExpertKeys, layers: u32) -> Result<Experts, Error> {
    let dense_layers = match of {
        ExpertKeys::Qwen { .. } => dense_layers(keys, layers)?,
        ExpertKeys::SmallThinker => return small_thinker(keys, layers),
        ExpertKeys::Mixtral | ExpertKeys::Olmoe | ExpertKeys::PhiMoe | ExpertKeys::GptOss => {
            Vec::new()
        }
    };
    let dense_ffn = match dense_layers.is_empty() {
        true => 0,
        false => keys.need_u32("intermediate_size")?,
    };
    let chosen = keys.need_u32("num_experts_per_tok")?;
    if of == ExpertKeys::PhiMoe && chosen != 2 {
        let why = "this family's router chooses 2";
        return Err(keys.unsupported("num_experts_per_tok", why));
    }
    let ffn = match of {
        ExpertKeys::Qwen { .. } => "moe_intermediate_size",
        _ => "intermediate_size",
    };
    Ok(Experts {
        count: count(keys)?,
        ffn: keys.need_u32(ffn)?,
        mixture: Mixture {
            chosen,
            renormalise: match of {
                ExpertKeys::Mixtral | ExpertKeys::GptOss => true,
                _ => keys.bool("norm_topk_prob")?.unwrap_or(false),
            },
            shared: match of {
                ExpertKeys::Qwen { shared: true } => {
                    keys.need_u32("shared_expert_intermediate_size")?
                }
                _ => 0,
            },
            dense_ffn,
            dense_layers,
            scoring: match of {
                ExpertKeys::PhiMoe => Scoring::SparseMixer,
                _ => Scoring::Softmax,
            },
            early_router: false,
            router_bias: of == ExpertKeys::GptOss,
            jitter: match of {
                ExpertKeys::PhiMoe => keys.f32("router_jitter_noise")?.unwrap_or(JITTER),
                _ => 0.0,
            },
        },
    })
}

/// The experts of SmallThinker.
fn small_thinker(keys: &Keys, layers: u32) -> Result<Experts, Error> {
    if keys.bool("moe_enable_early_router")? == Some(false) {
        let why = "only a router that reads the layer's input is implemented";
        return Err(keys.unsupported("moe_enable_early_router", why));
    }
    let layout = switches(keys, "moe_layer_layout", layers)?;
    if layout.is_some_and(|layout| layout.contains(&false)) {
        let why = "layers without experts are not implemented for this family";
        return Err(keys.unsupported("moe_layer_layout", why));
    }
    // A softmax of the chosen scores is the share among all, renormalised.
    let softmax = keys.bool("moe_primary_router_apply_softmax")?;
    let scoring = match softmax.unwrap_or(false) {
        true => Scoring::Softmax,
        false => Scoring::Sigmoid,
    };
    Ok(Experts {
        count: keys.need_u32("moe_num_primary_experts")?,
        ffn: keys.need_u32("moe_ffn_hidden_size")?,
        mixture: Mixture {
            chosen: keys.need_u32("moe_num_active_primary_experts")?,
            renormalise: true,
            shared: 0,
            dense_layers: Vec::new(),
            dense_ffn: 0,
            scoring,
            early_router: true,
            router_bias: false,
            jitter: 0.0,
        },
    })
}

/// A list with 0 or 1 for each layer.
pub(super) fn switches(
    keys: &Keys,
    key: &'static str,
    layers: u32,
) -> Result<Option<Vec<bool>>, Error> {
    let one = |value: &Value| match value.as_u64() {
        Some(0) => Some(false),
        Some(1) => Some(true),
        _ => None,
    };
    let expected = format!("0 or 1 for each of {layers} layers");
    keys.read(key, &expected, |value| {
        let list = value.as_array()?.iter().map(one);
        let list = list.collect::<Option<Vec<bool>>>()?;
        (list.len() == layers as usize).then_some(list)
    })
}

/// The number of experts, under either of its names.
fn count(keys: &Keys) -> Result<u32, Error> {
    let (first, second) = (keys.u32("num_experts")?, keys.u32("num_local_experts")?);
    match (first, second) {
        (Some(first), Some(second)) if first != second => {
            Err(keys.bad("num_local_experts", &format!("{first}, as num_experts")))
        }
        (Some(count), _) | (None, Some(count)) => Ok(count),
        (None, None) => Err(keys.missing("num_experts", "an integer")),
    }
}

/// Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th.
fn dense_layers(keys: &Keys, layers: u32) -> Result<Vec<u32>, Error> {
    let step = keys.u32("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(keys.bad("decoder_sparse_step", "1 or more"));
    }
    let number = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
    let named = keys
        .read("mlp_only_layers", "a list of layers", |value| {
            let list = value.as_array()?;
            list.iter().map(number).collect::<Option<Vec<u32>>>()
        })?
        .unwrap_or_default();
    let is_dense = |layer: &u32| !(layer + 1).is_multiple_of(step) || named.contains(layer);
    Ok((0..layers).filter(is_dense).collect())
}
