//! GGUF keys of mixtures of experts.

use std::collections::BTreeSet;

use super::deepseek4::by_token;
use crate::config::{ExpertGroups, Mixture, Scoring};
use crate::error::Error;
use crate::families::{Dense, Experts, Family, ScoringBy, Shared};
use crate::metadata::ArchKeys;
use crate::mixers::layers::all_but_nth;

/// How scores are computed.
const FUNCTION: &str = "expert_gating_func";
/// [`FUNCTION`] of a softmax and of sigmoids; 0 means the architecture's default.
pub(super) const SOFTMAX: u32 = 1;
/// See [`SOFTMAX`].
pub(super) const SIGMOID: u32 = 2;

/// The same for the square roots of softplus.
const SQRT_SOFTPLUS: u32 = 4;

/// Interval of layers with experts.
pub(super) const EXPERT_STEP: &str = "interleave_moe_layer_step";

/// The experts of an architecture, and whether every file has them.
fn experts_of(family: &'static Family) -> (Option<&'static Experts>, bool) {
    let stored = || {
        family
            .with_experts()
            .find_map(|other| other.experts.as_ref())
    };
    let own = family.experts.as_ref();
    (own.or_else(stored), own.is_some())
}

/// The number of experts and their mixture; `layers`: those with a router. `None` without experts.
pub(super) fn read(
    keys: ArchKeys<'_>,
    family: &'static Family,
    layers: u32,
    routers: &BTreeSet<u32>,
) -> Result<Option<(u32, Mixture)>, Error> {
    let count = keys.u32("expert_count")?.filter(|&n| n > 0);
    let (of, count) = match (experts_of(family), count) {
        // files of Jamba with dense FFNs alone have 1 expert
        ((Some(of), _), Some(1)) if matches!(of.dense, Dense::Periodic(_)) => return Ok(None),
        ((_, false), None) => return Ok(None),
        ((Some(of), true), None) if of.optional || of.parallel_dense.is_some() => return Ok(None),
        ((None, _), Some(_)) => {
            let why = "experts are not known for this architecture";
            return Err(keys.unsupported("expert_count", why));
        }
        ((Some(of), _), Some(count)) => (of, count),
        ((_, true), None) => return Err(keys.missing("expert_count", "an integer")),
    };
    let dense = dense(keys, of, layers, routers)?;
    let mut mixture = mixture(keys, of, dense)?;
    if of.by_token.is_some() {
        mixture.by_token = by_token(keys, layers)?;
    }
    Ok(Some((count, mixture)))
}

/// The mixture of a model; `layers`: those without experts.
fn mixture(keys: ArchKeys<'_>, of: &Experts, dense_layers: Vec<u32>) -> Result<Mixture, Error> {
    let scoring = scoring(keys, of)?;
    let scale = scale(keys, of)?;
    let need = |rest: &str| match rest {
        "feed_forward_length" => keys.need_uniform(rest),
        _ => keys.need(rest),
    };
    Ok(Mixture {
        chosen: need("expert_used_count")?,
        renormalise: keys
            .bool("expert_weights_norm")?
            .unwrap_or(of.gguf_renormalise),
        shared: match of.shared {
            Some(Shared::Gated(_)) => need("expert_shared_feed_forward_length")?,
            Some(Shared::Experts(..)) => {
                let size = keys.u32("expert_shared_feed_forward_length")?;
                match keys.u32("expert_shared_count")? {
                    // the converter of Hunyuan 3 writes only their size
                    None => size.unwrap_or(0),
                    Some(0) => 0,
                    Some(count) => count.saturating_mul(need("expert_feed_forward_length")?),
                }
            }
            Some(Shared::Plain(_)) if of.parallel_dense.is_some() => need("feed_forward_length")?,
            Some(Shared::Plain(_)) => keys.u32("expert_shared_feed_forward_length")?.unwrap_or(0),
            Some(Shared::AsOthers) => need("expert_feed_forward_length")?,
            None => 0,
        },
        shared_is_plain: of.has_plain_shared(),
        parallel_dense: of.parallel_dense.is_some(),
        dense_ffn: if dense_layers.is_empty() {
            0
        } else {
            need("feed_forward_length")?
        },
        dense_layers,
        choice_bias: of.choice_bias,
        groups: if of.grouped {
            groups(keys, of.best_of_groups)?
        } else {
            None
        },
        epsilon: of.epsilon,
        scale,
        scoring,
        early_router: of.early_router.is_some(),
        router_bias: of.router_bias,
        scales_input: of.scales_input,
        width: match of.width {
            Some(rest) => keys.u32(rest)?.unwrap_or(0),
            None => 0,
        },
        ..Mixture::default()
    })
}

/// The layers without experts, given the layers with a router (`routers`).
fn dense(
    keys: ArchKeys<'_>,
    of: &Experts,
    layers: u32,
    routers: &BTreeSet<u32>,
) -> Result<Vec<u32>, Error> {
    let leading = keys.u32("leading_dense_block_count")?;
    Ok(match (of.dense, leading) {
        (Dense::But(..), _) => every_nth_has_experts(keys, layers)?,
        (Dense::First(..) | Dense::Kinds(..) | Dense::Outside(..), Some(count)) => {
            (0..count.min(layers)).collect()
        }
        // its converter writes no key for them
        (Dense::Kinds(..), None) | (Dense::Periodic(_), _) => (0..layers)
            .filter(|layer| !routers.contains(layer))
            .collect(),
        _ => Vec::new(),
    })
}

/// The layers without experts, if every n-th has experts.
fn every_nth_has_experts(keys: ArchKeys<'_>, layers: u32) -> Result<Vec<u32>, Error> {
    match keys.need(EXPERT_STEP)? {
        0 => Err(keys.bad(EXPERT_STEP, "1 or more")),
        step => Ok(all_but_nth(step, layers)),
    }
}

/// The factor of the weights; 0 means none.
fn scale(keys: ArchKeys<'_>, of: &Experts) -> Result<f32, Error> {
    const KEY: &str = "expert_weights_scale";
    match keys.f32(KEY)?.filter(|scale| *scale != 0.0) {
        Some(scale) if scale != 1.0 && of.scale.is_none() => {
            Err(keys.unsupported(KEY, "only 1 is implemented"))
        }
        scale => Ok(scale.unwrap_or(1.0)),
    }
}

/// Whether a file's experts are chosen by sigmoids; without a key, those with biases are.
pub(super) fn by_sigmoids(keys: ArchKeys<'_>, has_choice_bias: bool) -> Result<bool, Error> {
    let given = keys.u32(FUNCTION)?;
    let given = given.filter(|function| *function != 0);
    Ok(given.map_or(has_choice_bias, |function| function == SIGMOID))
}

/// Scoring of a file's experts.
fn scoring(keys: ArchKeys<'_>, of: &Experts) -> Result<Scoring, Error> {
    let given = keys.u32(FUNCTION)?.filter(|function| *function != 0);
    match (given, of.scoring) {
        (None | Some(SIGMOID), ScoringBy::Always(Scoring::Sigmoid)) => Ok(Scoring::Sigmoid),
        (Some(SQRT_SOFTPLUS), ScoringBy::Always(Scoring::SqrtSoftplus)) => {
            Ok(Scoring::SqrtSoftplus)
        }
        (_, ScoringBy::Always(Scoring::SqrtSoftplus)) => {
            let why = "implemented for this architecture: 4, roots of softplus";
            Err(keys.unsupported(FUNCTION, why))
        }
        (_, ScoringBy::Always(Scoring::Sigmoid)) => {
            Err(keys.unsupported(FUNCTION, "implemented for this architecture: 2, sigmoid"))
        }
        (None | Some(SOFTMAX), _) => Ok(Scoring::Softmax),
        (Some(SIGMOID), ScoringBy::SoftmaxIf(_)) => Ok(Scoring::Sigmoid),
        (Some(_), _) => {
            let why = "implemented: 1, softmax; for smallthinker 2 too, sigmoid";
            Err(keys.unsupported(FUNCTION, why))
        }
    }
}

/// The groups from which experts are chosen, if more than one.
fn groups(keys: ArchKeys<'_>, by_best: bool) -> Result<Option<ExpertGroups>, Error> {
    let count = keys.u32("expert_group_count")?.unwrap_or(0);
    if count <= 1 {
        return Ok(None);
    }
    Ok(Some(ExpertGroups {
        count,
        chosen: keys.need("expert_group_used_count")?,
        by_best,
    }))
}
