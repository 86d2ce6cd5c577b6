//! The keys of mixtures of experts in `config.json`.

use serde_json::Value;

use crate::config::{ExpertGroups, Mixture, Scoring};
use crate::error::Error;
use crate::families::{Dense, Experts, Renormalise, ScoringBy, Shared};
use crate::json::Keys;
use crate::mixers::layers::Periodic;
use crate::mixers::sublayers::{Sublayer, layers_of, sublayers};

/// `router_jitter_noise` of PhiMoE if the key is absent.
const JITTER: f32 = 0.01;

/// Values of these keys.
pub(super) struct OfExperts {
    /// Experts per layer.
    pub(super) count: u32,
    /// Neurons per expert.
    pub(super) ffn: u32,
    pub(super) mixture: Mixture,
}

/// Whether a model of a family with optional experts has none.
fn are_absent(keys: &Keys, of: &Experts) -> Result<bool, Error> {
    Ok(match (of.dense, of.parallel_dense) {
        (Dense::Periodic(_), _) => keys.u32(of.count)?.is_some_and(|count| count <= 1),
        (Dense::Sublayers, _) => !sublayers(keys)?.contains(&Sublayer::Experts),
        (_, Some(key)) => keys.bool(key)? != Some(true),
        (_, None) => of.optional && keys.u32(of.count)? == Some(0),
    })
}

/// Reads the keys of a model with this many layers; `None` if it has no experts.
pub(super) fn read(keys: &Keys, of: &Experts, layers: u32) -> Result<Option<OfExperts>, Error> {
    if are_absent(keys, of)? {
        return Ok(None);
    }
    if let Some(key) = of.early_router
        && keys.bool(key)? == Some(false)
    {
        let why = "only a router that reads the layer's input is implemented";
        return Err(keys.unsupported(key, why));
    }
    let dense_layers = dense(keys, of.dense, layers)?;
    let dense_ffn = if dense_layers.is_empty() {
        0
    } else {
        keys.need_u32(of.dense_ffn)?
    };
    let scoring = scoring(keys, of.scoring)?;
    let mixed = scoring == Scoring::SparseMixer;
    let chosen = uniform(keys, of.chosen)?.ok_or_else(|| keys.missing(of.chosen, "an integer"))?;
    if mixed && chosen != 2 {
        let why = "this family's router chooses 2";
        return Err(keys.unsupported(of.chosen, why));
    }
    let ffn = keys.need_u32(of.ffn)?;
    Ok(Some(OfExperts {
        count: count(keys, of.count)?,
        ffn,
        mixture: Mixture {
            chosen,
            renormalise: match of.renormalise {
                Renormalise::Always => true,
                Renormalise::Key(absent) => keys.bool("norm_topk_prob")?.unwrap_or(absent),
            },
            shared: match of.shared {
                None => 0,
                Some(Shared::Gated(key) | Shared::Plain(key)) => keys.need_u32(key)?,
                Some(Shared::Experts(key, absent)) => {
                    uniform(keys, key)?.unwrap_or(absent).saturating_mul(ffn)
                }
                Some(Shared::AsOthers) => ffn,
            },
            shared_is_plain: of.has_plain_shared(),
            parallel_dense: of.parallel_dense.is_some(),
            dense_ffn,
            dense_layers,
            scoring,
            early_router: of.early_router.is_some(),
            router_bias: of.router_bias,
            choice_bias: of.choice_bias,
            groups: if of.grouped { groups(keys, of)? } else { None },
            epsilon: of.epsilon,
            scale: match of.scale {
                Some((key, absent)) => keys.f32(key)?.unwrap_or(absent),
                None => 1.0,
            },
            jitter: if mixed {
                keys.f32("router_jitter_noise")?.unwrap_or(JITTER)
            } else {
                0.0
            },
            scales_input: of.scales_input,
            width: width(keys, of.width)?,
            by_token: by_token(keys, of, layers)?,
        },
    }))
}

/// The width of the experts' input and output; 0 without the key.
fn width(keys: &Keys, key: Option<&'static str>) -> Result<u32, Error> {
    let Some(key) = key else { return Ok(0) };
    match keys.u32(key)? {
        Some(0) => Err(keys.bad(key, "1 or more, or null")),
        width => Ok(width.unwrap_or(0)),
    }
}

/// The layers that look up a token's experts in a table.
fn by_token(keys: &Keys, of: &Experts, layers: u32) -> Result<Vec<u32>, Error> {
    let Some((list, key, absent)) = of.by_token else {
        return Ok(Vec::new());
    };
    let expected = format!("hash_moe or moe for each of {layers} layers");
    let is_by_token = |value: &Value| match value.as_str() {
        Some("hash_moe") => Some(true),
        Some("moe") => Some(false),
        _ => None,
    };
    let kinds = keys.read(list, &expected, |value| {
        let kinds = value.as_array()?;
        let kinds = kinds.iter().map(is_by_token).collect::<Option<Vec<_>>>()?;
        (kinds.len() == layers as usize).then_some(kinds)
    })?;
    match kinds {
        Some(kinds) => Ok(((0..).zip(kinds).filter(|(_, by_token)| *by_token))
            .map(|(layer, _)| layer)
            .collect()),
        None => first(keys, key, absent, layers),
    }
}

/// A number, or a list of the same number for each layer (Hunyuan).
fn uniform(keys: &Keys, key: &'static str) -> Result<Option<u32>, Error> {
    let Some(Value::Array(list)) = keys.get(key) else {
        return keys.u32(key);
    };
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
    let first = list.first().and_then(number);
    match first.filter(|_| list.iter().all(|value| number(value) == first)) {
        Some(number) => Ok(Some(number)),
        None => Err(keys.unsupported(key, "the numbers of the layers are not the same")),
    }
}

/// The layers with a dense FFN.
fn dense(keys: &Keys, of: Dense, layers: u32) -> Result<Vec<u32>, Error> {
    Ok(match of {
        Dense::Never => Vec::new(),
        Dense::NeverBy(key) => {
            if switches(keys, key, layers)?.is_some_and(|layout| layout.contains(&false)) {
                let why = "layers without experts are not implemented for this family";
                return Err(keys.unsupported(key, why));
            }
            Vec::new()
        }
        Dense::First(key, absent) => first(keys, key, absent, layers)?,
        Dense::Kinds(list, key, absent) => match (kinds(keys, list, layers)?, key) {
            (Some(dense), _) => dense,
            (None, Some(key)) => first(keys, key, absent, layers)?,
            (None, None) => (0..absent.min(layers)).collect(),
        },
        Dense::Outside(from, to) => outside(keys, from, to, layers)?,
        Dense::Steps => dense_layers(keys, layers)?,
        Dense::But(list, step) => without_experts(keys, list, step, layers)?,
        Dense::Periodic(of) => {
            let with = Periodic::read(keys, of)?;
            (0..layers).filter(|&layer| !with.has(layer)).collect()
        }
        Dense::Sublayers => layers_of(&sublayers(keys)?, Sublayer::Ffn),
    })
}

/// Conversion of the scores.
fn scoring(keys: &Keys, of: ScoringBy) -> Result<Scoring, Error> {
    Ok(match of {
        ScoringBy::Always(scoring) => scoring,
        ScoringBy::SoftmaxIf(key) => {
            if keys.bool(key)?.unwrap_or(false) {
                Scoring::Softmax
            } else {
                Scoring::Sigmoid
            }
        }
    })
}

/// The groups from which experts are chosen, if more than one.
fn groups(keys: &Keys, of: &Experts) -> Result<Option<ExpertGroups>, Error> {
    let by_best = of.best_of_groups;
    // DeepSeek-V2-Lite names a group and chooses from all experts
    if by_best
        && keys
            .str("topk_method")?
            .is_none_or(|method| method == "greedy")
    {
        return Ok(None);
    }
    let count = keys.u32("n_group")?.unwrap_or(of.groups[0]);
    let chosen = keys.u32("topk_group")?.unwrap_or(of.groups[1]);
    if count == 0 || chosen == 0 || chosen > count {
        let expected = format!("1 to {count}, that of all groups");
        return Err(keys.bad("topk_group", &expected));
    }
    Ok((count > 1).then_some(ExpertGroups {
        count,
        chosen,
        by_best,
    }))
}

/// The first layers.
fn first(keys: &Keys, key: &'static str, absent: u32, layers: u32) -> Result<Vec<u32>, Error> {
    let count = keys.u32(key)?.unwrap_or(absent);
    Ok((0..count.min(layers)).collect())
}

/// The layers marked dense in a list.
fn kinds(keys: &Keys, key: &'static str, layers: u32) -> Result<Option<Vec<u32>>, Error> {
    let expected = format!("dense or sparse for each of {layers} layers");
    let is_dense = |value: &Value| match value.as_str() {
        Some("dense") => Some(true),
        Some("sparse") => Some(false),
        _ => None,
    };
    let list = keys.read(key, &expected, |value| {
        let list = value.as_array()?.iter().map(is_dense);
        let list = list.collect::<Option<Vec<bool>>>()?;
        (list.len() == layers as usize).then_some(list)
    })?;
    let dense = |list: Vec<bool>| (0..).zip(list).filter(|(_, dense)| *dense);
    Ok(list.map(|list| dense(list).map(|(layer, _)| layer).collect()))
}

/// The layers before the first and after the last that have experts.
fn outside(keys: &Keys, from: &str, to: &str, layers: u32) -> Result<Vec<u32>, Error> {
    let first = keys.u32(from)?.unwrap_or(1);
    let last = keys
        .read(to, "a layer, or -1", Value::as_i64)?
        .unwrap_or(-1);
    let last = if last == -1 {
        i64::from(layers) - 1
    } else {
        last
    };
    let has = |layer: &u32| *layer >= first && i64::from(*layer) <= last;
    Ok((0..layers).filter(|layer| !has(layer)).collect())
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

/// Layers missing in a list; without it, all but every n-th, with n from `step`.
fn without_experts(
    keys: &Keys,
    list: &'static str,
    step: &'static str,
    layers: u32,
) -> Result<Vec<u32>, Error> {
    let every = keys.u32(step)?.unwrap_or(1);
    if every == 0 {
        return Err(keys.bad(step, "1 or more"));
    }
    let named = layer_list(keys, list)?;
    let has = |layer: &u32| match &named {
        Some(named) => named.contains(layer),
        None => (layer + 1).is_multiple_of(every),
    };
    Ok((0..layers).filter(|layer| !has(layer)).collect())
}

/// A list of layers.
fn layer_list(keys: &Keys, key: &'static str) -> Result<Option<Vec<u32>>, Error> {
    let number = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
    keys.read(key, "a list of layers", |value| {
        let list = value.as_array()?;
        list.iter().map(number).collect()
    })
}

/// Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th.
fn dense_layers(keys: &Keys, layers: u32) -> Result<Vec<u32>, Error> {
    let step = keys.u32("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(keys.bad("decoder_sparse_step", "1 or more"));
    }
    let named = layer_list(keys, "mlp_only_layers")?.unwrap_or_default();
    let is_dense = |layer: &u32| !(layer + 1).is_multiple_of(step) || named.contains(layer);
    Ok((0..layers).filter(is_dense).collect())
}
