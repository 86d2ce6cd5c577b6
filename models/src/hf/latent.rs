//! Rotary positions of latent attention.

use crate::config::{Rope, RopeScaling, yarn_attention};
use crate::error::Error;
use crate::json::Keys;
use crate::mixers::latent::ROTATED;

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
