//! The keys of mixtures of experts in `config.json`.

use serde_json::Value;

use super::json::Keys;
use crate::config::{Mixture, Scoring};
use crate::error::Error;
use crate::families::{Dense, Experts, Renormalise, ScoringBy};

/// `router_jitter_noise` of PhiMoE where the key is absent.
const JITTER: f32 = 0.01;

/// What they say.
pub(super) struct Found {
    /// Experts per layer.
    pub(super) count: u32,
    /// Neurons per expert.
    pub(super) ffn: u32,
    pub(super) mixture: Mixture,
}

/// Reads the keys of a model of so many layers.
pub(super) fn read(keys: &Keys, of: &Experts, layers: u32) -> Result<Found, Error> {
    if let Some(key) = of.early_router
        && keys.bool(key)? == Some(false)
    {
        let why = "only a router that reads the layer's input is implemented";
        return Err(keys.unsupported(key, why));
    }
    let dense_layers = match of.dense {
        Dense::Never => Vec::new(),
        Dense::NeverBy(key) => {
            if switches(keys, key, layers)?.is_some_and(|layout| layout.contains(&false)) {
                let why = "layers without experts are not implemented for this family";
                return Err(keys.unsupported(key, why));
            }
            Vec::new()
        }
        Dense::Steps => dense_layers(keys, layers)?,
    };
    let dense_ffn = match dense_layers.is_empty() {
        true => 0,
        false => keys.need_u32("intermediate_size")?,
    };
    let scoring = match of.scoring {
        ScoringBy::Always(scoring) => scoring,
        ScoringBy::SoftmaxIf(key) => match keys.bool(key)?.unwrap_or(false) {
            true => Scoring::Softmax,
            false => Scoring::Sigmoid,
        },
    };
    let mixed = scoring == Scoring::SparseMixer;
    let chosen = keys.need_u32(of.chosen)?;
    if mixed && chosen != 2 {
        let why = "this family's router chooses 2";
        return Err(keys.unsupported(of.chosen, why));
    }
    Ok(Found {
        count: count(keys, of.count)?,
        ffn: keys.need_u32(of.ffn)?,
        mixture: Mixture {
            chosen,
            renormalise: match of.renormalise {
                Renormalise::Always => true,
                Renormalise::Key(absent) => keys.bool("norm_topk_prob")?.unwrap_or(absent),
            },
            shared: of.shared.map_or(Ok(0), |key| keys.need_u32(key))?,
            dense_ffn,
            dense_layers,
            scoring,
            early_router: of.early_router.is_some(),
            router_bias: of.router_bias,
            jitter: match mixed {
                true => keys.f32("router_jitter_noise")?.unwrap_or(JITTER),
                false => 0.0,
            },
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

/// The number of experts, under either of two names if it is one of these.
fn count(keys: &Keys, key: &'static str) -> Result<u32, Error> {
    const NAMES: [&str; 2] = ["num_experts", "num_local_experts"];
    if !NAMES.contains(&key) {
        return keys.need_u32(key);
    }
    match (keys.u32(NAMES[0])?, keys.u32(NAMES[1])?) {
        (Some(first), Some(second)) if first != second => {
            Err(keys.bad(NAMES[1], &format!("{first}, as {}", NAMES[0])))
        }
        (Some(count), _) | (None, Some(count)) => Ok(count),
        (None, None) => Err(keys.missing(NAMES[0], "an integer")),
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
