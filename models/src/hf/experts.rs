//! The keys of mixtures of experts in `config.json`.

use serde_json::Value;

use super::json::Keys;
use crate::config::Mixture;
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
}

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
        ExpertKeys::Mixtral | ExpertKeys::Olmoe => Vec::new(),
    };
    let dense_ffn = match dense_layers.is_empty() {
        true => 0,
        false => keys.need_u32("intermediate_size")?,
    };
    let ffn = match of {
        ExpertKeys::Qwen { .. } => "moe_intermediate_size",
        ExpertKeys::Mixtral | ExpertKeys::Olmoe => "intermediate_size",
    };
    Ok(Experts {
        count: count(keys)?,
        ffn: keys.need_u32(ffn)?,
        mixture: Mixture {
            chosen: keys.need_u32("num_experts_per_tok")?,
            renormalise: match of {
                ExpertKeys::Mixtral => true,
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
        },
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
