//! The rotary parameters of `config.json`.

use serde_json::Value;

use crate::config::{Rope, RopeScaling, yarn_attention};
use crate::error::Error;
use crate::families::{Family, Quirk};
use crate::json::Keys;

/// Key of the context length before scaling.
const ORIGINAL: &str = "original_max_position_embeddings";

/// The rotary parameters, and those of layers with a window if different, given the rotated elements
/// of a head of each.
pub(super) fn ropes(
    keys: &Keys,
    family: &Family,
    [global, local]: [u32; 2],
) -> Result<(Rope, Option<Rope>), Error> {
    if !family.two_ropes {
        return Ok((rope(keys, family, global)?, None));
    }
    let modern = keys.object("rope_parameters", "rope_parameters.")?;
    let old = keys.object("rope_scaling", "rope_scaling.")?;
    if modern.is_some() && old.is_some() {
        return Err(keys.bad("rope_scaling", "absent, as rope_parameters is given"));
    }
    let kinds = [
        ("full_attention", "rope_parameters.full_attention."),
        ("sliding_attention", "rope_parameters.sliding_attention."),
    ];
    let mut objects = [old, None];
    if let Some(modern) = modern {
        let known = |key: &String| kinds.iter().any(|kind| kind.0 == key);
        if let Some(key) = modern.map().keys().find(|key| !known(key)) {
            let why = "the rotary parameters of this family are those of two kinds of layers";
            return Err(modern.unsupported(key, why));
        }
        for ((key, prefix), object) in kinds.into_iter().zip(&mut objects) {
            *object = modern.object(key, prefix)?;
            if object.is_none() && family.has(Quirk::GlobalHeads) {
                return Err(modern.missing(key, "an object"));
            }
        }
    }
    let one = |object: Option<Keys>, theta: Option<f32>, usual: f32, dims| -> Result<Rope, Error> {
        let mut rope = Rope {
            theta: theta.unwrap_or(usual),
            dims,
            scaling: RopeScaling::None,
        };
        if let Some(object) = object {
            let pairs = proportional(&object, family, dims)?;
            rope.scaling = match pairs {
                Some(pairs) => RopeScaling::Proportional { pairs },
                None => {
                    refuse_partial(&object)?;
                    rope_scaling(keys, &object, family)?
                }
            };
            rope.theta = object.f32("rope_theta")?.unwrap_or(rope.theta);
        }
        Ok(rope)
    };
    refuse_partial(keys)?;
    let [full, windowed] = objects;
    let (local_base, usual) = if family.has(Quirk::OneBase) {
        expect_usual_base(keys, family)?;
        (None, family.theta)
    } else {
        (keys.f32("rope_local_base_freq")?, LOCAL_THETA)
    };
    Ok((
        one(full, keys.f32("rope_theta")?, family.theta, global)?,
        Some(one(windowed, local_base, usual, local)?),
    ))
}

/// Refuses a base next to the rotary parameters, unless it is the usual one: releases of transformers
/// disagree on whether it is that of layers with a window, too.
fn expect_usual_base(keys: &Keys, family: &Family) -> Result<(), Error> {
    match keys.f32("rope_theta")? {
        Some(theta) if theta != family.theta => Err(keys.unsupported(
            "rope_theta",
            "give it for each kind of layers in rope_parameters",
        )),
        _ => Ok(()),
    }
}

/// Base of the rotary frequencies in layers with a window.
const LOCAL_THETA: f32 = 10_000.0;

/// The rotated pairs of a head of `dims` elements, if the scaling is proportional (Gemma 4).
fn proportional(object: &Keys, family: &Family, dims: u32) -> Result<Option<u32>, Error> {
    if !family.has(Quirk::GlobalHeads) || object.str("rope_type")? != Some("proportional") {
        return Ok(None);
    }
    if object.f32("factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(object.unsupported("factor", "only 1 is implemented for this family"));
    }
    let share = object.f32("partial_rotary_factor")?.unwrap_or(1.0);
    if !(0.0..=1.0).contains(&share) {
        return Err(object.bad("partial_rotary_factor", "a number from 0 to 1"));
    }
    Ok(Some((share * dims as f32 / 2.0).floor() as u32))
}

fn refuse_partial(keys: &Keys) -> Result<(), Error> {
    match keys.f32("partial_rotary_factor")? {
        Some(share) if share != 1.0 => {
            let why = "only 1 is implemented for this family";
            Err(keys.unsupported("partial_rotary_factor", why))
        }
        _ => Ok(()),
    }
}

/// Rotary parameters from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta`
/// (earlier). Values inside the object override those next to it.
fn rope(keys: &Keys, family: &Family, head_dim: u32) -> Result<Rope, Error> {
    let modern = keys.object("rope_parameters", "rope_parameters.")?;
    let old = keys.object("rope_scaling", "rope_scaling.")?;
    if family.always_scaled && modern.is_none() && old.is_none() {
        return Err(keys.missing("rope_parameters", "the scaling of the rotary positions"));
    }
    let mut theta = keys.f32("rope_theta")?;
    let mut scaling = None;
    let mut rotated = None;
    for object in [keys].into_iter().chain(&old).chain(&modern) {
        let share = object.f32("partial_rotary_factor")?;
        match (share, family.rotated) {
            (Some(share), None) if share != 1.0 => {
                return Err(object.unsupported(
                    "partial_rotary_factor",
                    "only 1 is implemented for this family",
                ));
            }
            (Some(share), Some(_)) if !(share > 0.0 && share <= 1.0) => {
                return Err(object.bad("partial_rotary_factor", "above 0, at most 1"));
            }
            (share, _) => rotated = share.or(rotated),
        }
    }
    for object in old.iter().chain(&modern) {
        let parsed = rope_scaling(keys, object, family)?;
        if scaling.as_ref().is_some_and(|earlier| *earlier != parsed) {
            return Err(keys.bad(
                "rope_scaling",
                "the same as rope_parameters where both are given",
            ));
        }
        scaling = Some(parsed);
        theta = object.f32("rope_theta")?.or(theta);
    }
    let mut theta = theta.unwrap_or(family.theta);
    if let Some(alpha) = alpha(family, old.iter().chain(&modern))? {
        let power = f64::from(head_dim) / (f64::from(head_dim) - 2.0);
        theta = (f64::from(theta) * f64::from(alpha).powf(power)) as f32;
    }
    let named = family.rotated_dims.filter(|_| rotated.is_none());
    let named = named.map_or(Ok(None), |key| keys.u32(key))?;
    let share = rotated.or(family.rotated).unwrap_or(1.0);
    Ok(Rope {
        theta,
        dims: named.unwrap_or((f64::from(head_dim) * f64::from(share)) as u32),
        scaling: scaling.unwrap_or(RopeScaling::None),
    })
}

/// Factor of the base of the frequencies, independent of the length of a text.
fn alpha<'a>(
    family: &Family,
    objects: impl Iterator<Item = &'a Keys<'a>>,
) -> Result<Option<f32>, Error> {
    if !family.has(Quirk::NtkAlpha) {
        return Ok(None);
    }
    let mut found = None;
    for object in objects {
        let kind = object.str("rope_type")?.or(object.str("type")?);
        if kind == Some("dynamic") {
            found = object.f32("alpha")?.filter(|alpha| *alpha != 0.0).or(found);
        }
    }
    Ok(found)
}

/// The scaling named in an object of rotary parameters.
pub(super) fn rope_scaling(
    top: &Keys,
    object: &Keys,
    family: &Family,
) -> Result<RopeScaling, Error> {
    if let Some((key, _)) = object.map().iter().find(|(_, value)| value.is_object()) {
        return Err(object.unsupported(key, "rotary parameters per layer type are not implemented"));
    }
    let key = if object.get("rope_type").is_some() {
        "rope_type"
    } else {
        "type"
    };
    match object.str(key)? {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear {
            factor: object.need_f32("factor")?,
        }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: object.need_f32("factor")?,
            low_freq_factor: object.need_f32("low_freq_factor")?,
            high_freq_factor: object.need_f32("high_freq_factor")?,
            original_context: original_context(top, object)?,
        }),
        Some("yarn") => yarn(top, object),
        // longer contexts are not supported, and up to this length nothing is scaled
        Some("dynamic") if object.get("alpha").is_none() || family.has(Quirk::NtkAlpha) => {
            Ok(RopeScaling::None)
        }
        // the name in Phi-3's first releases
        Some("longrope" | "su") => long_rope(top, object, family),
        Some(_) => Err(object.unsupported(
            key,
            "implemented: default, linear, dynamic, llama3, longrope, yarn",
        )),
    }
}

/// The context length before scaling, given inside the object or next to it.
fn original_context(top: &Keys, object: &Keys) -> Result<u32, Error> {
    match (object.u32(ORIGINAL)?, top.u32(ORIGINAL)?) {
        (Some(inner), Some(outer)) if inner != outer => {
            Err(top.bad(ORIGINAL, &format!("{inner}, as in the rotary parameters")))
        }
        (inner, outer) => inner
            .or(outer)
            .ok_or_else(|| object.missing(ORIGINAL, "an integer")),
    }
}

/// The parameters of YaRN, with the defaults of transformers.
fn yarn(top: &Keys, object: &Keys) -> Result<RopeScaling, Error> {
    let factor = object.need_f32("factor")?;
    let given = |key: &str| Ok(object.f32(key)?.filter(|value| *value != 0.0));
    let scales = [given("mscale")?, given("mscale_all_dim")?];
    let attention_factor = match (object.f32("attention_factor")?, scales) {
        (Some(attention_factor), _) => attention_factor,
        (None, [Some(one), Some(all)]) => yarn_attention(factor, one) / yarn_attention(factor, all),
        (None, _) => yarn_attention(factor, 1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: given("beta_fast")?.unwrap_or(32.0),
        beta_slow: given("beta_slow")?.unwrap_or(1.0),
        original_context: original_context(top, object)?,
        attention_factor,
        truncate: object.bool("truncate")?.unwrap_or(true),
    })
}

/// `_compute_longrope_parameters` in transformers' `modeling_rope_utils.py`. PhiMoE has separate
/// query and key factors for each list of divisors. (transformers 5 also uses its short divisors in
/// long contexts; the model's own code uses the long ones.)
fn long_rope(top: &Keys, object: &Keys, family: &Family) -> Result<RopeScaling, Error> {
    let divisors = |key: &str| {
        let list = object.read(key, "a list of numbers", |value| {
            let number = |value: &Value| value.as_f64().map(|number| number as f32);
            value.as_array()?.iter().map(number).collect()
        })?;
        list.ok_or_else(|| object.missing(key, "a list of numbers"))
    };
    if family.named_factors {
        object.need_u32(ORIGINAL)?; // required next to its factors
    }
    let original_context = original_context(top, object)?;
    let most = top.need_u32("max_position_embeddings")?;
    let given = object.f32("factor")?.map(f64::from);
    let factor = given.unwrap_or(f64::from(most) / f64::from(original_context.max(1)));
    let named = |key: &str| {
        if family.named_factors {
            object.need_f32(key).map(Some)
        } else {
            Ok(None)
        }
    };
    let (short_factor, long_attention_factor) = (named("short_mscale")?, named("long_mscale")?);
    let attention_factor = match short_factor.or(object.f32("attention_factor")?) {
        Some(factor) => factor,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / f64::from(original_context).ln()).sqrt() as f32,
    };
    Ok(RopeScaling::Long {
        short: divisors("short_factor")?,
        long: divisors("long_factor")?,
        attention_factor,
        long_attention_factor,
        original_context,
    })
}
