//! Latent attention (MLA) of DeepSeek-V2 and its successors.

use serde_json::Value;

use super::json::Keys;
use crate::config::{Form, LatentShape, Rope, RopeScaling, yarn_attention};
use crate::error::Error;

/// The classes' fixed epsilon of the norms of latent vectors.
pub(crate) const NORM_EPS: f32 = 1e-6;

const ROTATED: &str = "qk_rope_head_dim";
const PLAIN: &str = "qk_nope_head_dim";

/// Sets latent attention in the form. If heads are `gated`, the query rank may be absent.
pub(super) fn latent(keys: &Keys, form: &mut Form, gated: bool) -> Result<(), Error> {
    const QUERY_RANK: &str = "q_lora_rank";
    let query_rank = match keys.map().get(QUERY_RANK) {
        Some(Value::Null) => None,
        Some(_) => Some(keys.need_u32(QUERY_RANK)?),
        None if gated => None,
        None => return Err(keys.missing(QUERY_RANK, "an integer or null")),
    };
    form.latent = Some(LatentShape {
        query_rank,
        rank: keys.need_u32("kv_lora_rank")?,
        value_dim: keys.need_u32("v_head_dim")?,
        norm_eps: NORM_EPS,
        gated,
    });
    Ok(())
}

/// Width of a query. `head_dim` may be equal to it, or to the number of rotated elements; or `any`, if
/// classes ignore it.
pub(super) fn head_dim(keys: &Keys, any: bool) -> Result<u32, Error> {
    let (rotated, plain) = (keys.need_u32(ROTATED)?, keys.need_u32(PLAIN)?);
    let width = rotated.saturating_add(plain);
    let known = [("qk_head_dim", [width; 2]), ("head_dim", [rotated, width])];
    for (key, known) in known.into_iter().take(2 - usize::from(any)) {
        if keys.u32(key)?.is_some_and(|given| !known.contains(&given)) {
            let expected = format!("{}, as {ROTATED} and {PLAIN} say", known[1]);
            return Err(keys.bad(key, &expected));
        }
    }
    Ok(width)
}

/// Base of the rotated share: a query if given, as in Mistral 4.
pub(super) fn share_of(keys: &Keys, head_dim: u32) -> Result<u32, Error> {
    let rope = keys.object("rope_parameters", "rope_parameters.")?;
    let share = rope.is_some_and(|rope| rope.get("partial_rotary_factor").is_some());
    if share {
        Ok(head_dim)
    } else {
        keys.need_u32(ROTATED)
    }
}

/// Refuses a number of rotated elements that contradicts the keys of a query.
pub(super) fn expect_rotated(keys: &Keys, rope: &Rope) -> Result<(), Error> {
    let rotated = keys.need_u32(ROTATED)?;
    if rope.dims == rotated {
        Ok(())
    } else {
        Err(keys.bad(
            "partial_rotary_factor",
            &format!("the share that is {ROTATED}"),
        ))
    }
}

/// The factor of the scores under YaRN, if it is not `1 / sqrt(head_dim)`.
pub(super) fn attention_scale(
    keys: &Keys,
    scaling: &RopeScaling,
    head_dim: u32,
) -> Result<Option<f32>, Error> {
    const ALL: &str = "mscale_all_dim";
    let mut all = None;
    for (key, prefix) in [
        ("rope_scaling", "rope_scaling."),
        ("rope_parameters", "rope_parameters."),
    ] {
        let Some(object) = keys.object(key, prefix)? else {
            continue;
        };
        let given = object.f32(ALL)?.filter(|all| *all != 0.0);
        let kind = object.str("rope_type")?.or(object.str("type")?);
        if given.is_some() && !matches!(kind, None | Some("default" | "yarn")) {
            return Err(object.unsupported(ALL, "it is implemented for yarn alone"));
        }
        all = given.or(all);
    }
    let RopeScaling::Yarn { factor, .. } = scaling else {
        return Ok(None);
    };
    Ok(all.map(|all| {
        let scale = yarn_attention(*factor, all);
        scale * scale / (head_dim as f32).sqrt()
    }))
}
