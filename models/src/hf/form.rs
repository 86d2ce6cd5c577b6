//! Keys of `config.json` for deviations from the plain decoder.

use serde_json::Value;

use super::deepseek4::hyper_connections;
use super::experts::switches;
use super::ngrams;
use super::olmo_hybrid::olmo_hybrid;
use super::streams::streams;
use super::sublayers;
use super::values::{factor, must_be};
use crate::config::{Form, Parallel, QueryScale};
use crate::error::Error;
use crate::families::{self, Absent, Check, Family, Key, QkNorm, Quirk, Unrotated, Windows};
use crate::json::Keys;
use crate::mixers::Sizes;
use crate::names::Role;

/// Whether checkpoints of the family store this tensor minus one.
pub(super) fn is_less_one(family: &str, role: Role) -> bool {
    use Role::*;
    let norm = matches!(
        role,
        AttnNorm
            | AttnPostNorm
            | FfnNorm
            | FfnPostNorm
            | FinalNorm
            | MtpEmbedNorm
            | MtpHiddenNorm
            | QNorm
            | KNorm
            | HyperMixerNorm
            | HyperFfnNorm
            | HyperHeadNorm
            | NGramKeyNorm
            | NGramQueryNorm
            | NGramConvNorm
    );
    norm && families::of(family).plus_one
}

/// Reads the family's keys.
pub(super) fn form(keys: &Keys, family: &Family, sizes: Sizes) -> Result<Form, Error> {
    for check in family.checks {
        passes(keys, *check, sizes)?;
    }
    let mut form = Form {
        layer_norm: family.layer_norm,
        norm_bias: family.layer_norm && family.norm_bias,
        parallel: family.parallel,
        pre_norm: family.pre_norm,
        post_norm: family.post_norm,
        learned_positions: family.learned_positions,
        ffn_bias: family.ffn_bias,
        sinks: family.sinks,
        value_norm: family.value_norm,
        rotated_qk_norm: family.qk_norm == QkNorm::HeadRotated,
        plain_qk_norm: match family.qk_norm {
            QkNorm::PlainUnless(key) => keys.bool(key)?.unwrap_or(true),
            _ => false,
        },
        qk_layer_norms: match family.qk_norm {
            QkNorm::LayersBy(key) => keys.bool(key)?.unwrap_or(false),
            _ => false,
        },
        chunked: matches!(family.windows, Windows::Chunks(_)),
        attention_scale: family.attention_scale,
        embedding_scale: if family.width_scale {
            (sizes.d_model as f32).sqrt()
        } else {
            1.0
        },
        nope_layers: match family.unrotated {
            Some(of) => nope_layers(keys, of, sizes.layers)?,
            None => Vec::new(),
        },
        ..Form::default()
    };
    for key in family.keys.iter().filter(|key| !key.hf.name.is_empty()) {
        read(keys, key, sizes, &mut form)?;
    }
    for of in family.mixers {
        of.read(keys, sizes, &mut form)?;
    }
    of_quirks(keys, family, sizes, &mut form)?;
    Ok(form)
}

/// Properties that have no field in the family.
fn of_quirks(keys: &Keys, family: &Family, sizes: Sizes, form: &mut Form) -> Result<(), Error> {
    for quirk in family.quirks {
        match quirk {
            Quirk::Falcon => form.parallel = falcon(keys)?,
            Quirk::ParallelIf(key, absent) if !keys.bool(key)?.unwrap_or(*absent) => {
                form.parallel = Parallel::No;
            }
            Quirk::Streams => streams(keys, sizes, form)?,
            Quirk::QueryScale => form.query_scale = Some(query_scale(keys)?),
            Quirk::Temperature => form.query_scale = temperature(keys)?,
            Quirk::DeepSeek4 => form.hyper = Some(hyper_connections(keys)?),
            Quirk::LateNorms => olmo_hybrid(keys, sizes.layers, form)?,
            Quirk::Hyper => ngrams::form(keys, sizes, form)?,
            Quirk::Unrotated => form.nope_layers = (0..sizes.layers).collect(),
            Quirk::OutputGate => form.output_gate = true,
            Quirk::WidthScaleBy(key) if !keys.bool(key)?.unwrap_or(false) => {
                form.embedding_scale = 1.0;
            }
            Quirk::Sublayers => sublayers::read(keys, form)?,
            Quirk::RotatedByName if !is_rotated(keys)? => {
                form.nope_layers = (0..sizes.layers).collect();
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether queries and keys are rotated.
fn is_rotated(keys: &Keys) -> Result<bool, Error> {
    const KEY: &str = "position_embedding_type";
    match keys.str(KEY)? {
        Some("rope") => Ok(true),
        None | Some("nope") => Ok(false),
        Some(_) => Err(keys.unsupported(KEY, "implemented for this family: rope, nope")),
    }
}

/// Scaling of queries by position, from the rotary parameters.
fn query_scale(keys: &Keys) -> Result<QueryScale, Error> {
    const KEY: &str = "rope_parameters";
    let rope = keys.object(KEY, "rope_parameters.")?;
    let rope = rope.ok_or_else(|| keys.missing(KEY, "an object"))?;
    Ok(QueryScale {
        beta: rope.need_f32("llama_4_scaling_beta")?,
        original_context: rope.need_u32("original_max_position_embeddings")?,
        unrotated: false,
    })
}

/// Scaling of queries without rotary positions. The switch was a number in the first releases.
fn temperature(keys: &Keys) -> Result<Option<QueryScale>, Error> {
    const SWITCH: &str = "attn_temperature_tuning";
    let is_on = |value: &Value| {
        value
            .as_bool()
            .or(value.as_f64().map(|number| number != 0.0))
    };
    let on = keys.read(SWITCH, "true, false or a number", is_on)?;
    if on == Some(false) {
        return Ok(None);
    }
    let usual = QueryScale::LLAMA4;
    let original_context = keys.u32("floor_scale")?.unwrap_or(usual.original_context);
    if original_context == 0 {
        return Err(keys.bad("floor_scale", "1 or more"));
    }
    Ok(Some(QueryScale {
        beta: factor(keys, "attn_scale")?.unwrap_or(usual.beta),
        original_context,
        unrotated: true,
    }))
}

/// Sets the value of a key in the form.
fn read(keys: &Keys, key: &Key, sizes: Sizes, form: &mut Form) -> Result<(), Error> {
    let side = key.hf;
    if let Absent::Flag(absent) = side.absent {
        let value = keys.bool(side.name)?.unwrap_or(absent);
        key.sets.put_flag(form, value);
        return Ok(());
    }
    let given = factor(keys, side.name)?;
    let is_null = keys.map().contains_key(side.name);
    let value = match side.absent {
        Absent::Needed if given.is_none() => {
            return Err(keys.missing(side.name, "a number above 0"));
        }
        Absent::Keeps if given.is_none() => return Ok(()),
        Absent::IsUnlessNull(absent) if !is_null => Some(absent),
        Absent::Is(absent) => Some(given.unwrap_or(absent)),
        _ => given,
    };
    let part = value.map(|value| side.by.apply(value, sizes.d_model, sizes.layers));
    key.sets.put(form, part);
    Ok(())
}

/// Refuses any other value.
fn passes(keys: &Keys, check: Check, sizes: Sizes) -> Result<(), Error> {
    let number = |key, only: u32, what: &str| match keys.u32(key)? {
        Some(found) if found != only => {
            Err(keys.unsupported(key, &format!("only {what}{only} is implemented")))
        }
        _ => Ok(()),
    };
    match check {
        Check::Flag(key, value) => must_be(keys, key, value),
        Check::Zero(key) => number(key, 0, ""),
        Check::One(key) => number(key, 1, ""),
        Check::Width(key) => number(key, sizes.d_model, "hidden_size = "),
        Check::Number(key, only) => match keys.f32(key)? {
            Some(found) if found != only => {
                Err(keys.unsupported(key, &format!("only {only} is implemented")))
            }
            _ => Ok(()),
        },
        Check::AtMost(key, most) => match keys.f32(key)? {
            Some(found) if found > most => {
                Err(keys.unsupported(key, &format!("at most {most:e} is implemented")))
            }
            _ => Ok(()),
        },
        Check::NotNull(key) if keys.map().get(key).is_some_and(Value::is_null) => {
            Err(keys.bad(key, "a value, or absent"))
        }
        Check::NotNull(_) => Ok(()),
        Check::Words(key, words) => match keys.str(key)? {
            Some(found) if !words.contains(&found) => {
                let why = format!("implemented for this family: {}", words.join(", "));
                Err(keys.unsupported(key, &why))
            }
            _ => Ok(()),
        },
        Check::Word(key, word) => match keys.str(key)? {
            Some(found) if found != word => {
                Err(keys.unsupported(key, &format!("this family has {word}")))
            }
            _ => Ok(()),
        },
    }
}

/// Heads of keys and values, if their number does not follow from the key.
pub(super) fn fixed_kv_heads(
    keys: &Keys,
    family: &Family,
    sizes: Sizes,
) -> Result<Option<u32>, Error> {
    let heads = sizes.heads;
    if family.has(Quirk::OneKvHeadEach) {
        return Ok(Some(heads));
    }
    if let Some(fixed) = family.fixed_kv_heads(heads) {
        return match keys.u32(family.kv_heads)? {
            Some(given) if given != fixed => Err(keys.bad(family.kv_heads, &fixed.to_string())),
            _ => Ok(Some(fixed)),
        };
    }
    if !family.has(Quirk::Falcon) || new_falcon(keys)? {
        return Ok(None);
    }
    if keys.bool("multi_query")?.unwrap_or(true) {
        return Ok(Some(1));
    }
    match keys.u32(family.kv_heads)? {
        Some(given) if given != heads => Err(keys.bad(
            family.kv_heads,
            &format!("{heads}, as multi_query and new_decoder_architecture are false"),
        )),
        _ => Ok(Some(heads)),
    }
}

/// The layers without rotary positions: those with 0 in a list of switches, or every n-th.
fn nope_layers(keys: &Keys, of: Unrotated, layers: u32) -> Result<Vec<u32>, Error> {
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let list = if keys.get(of.list).is_some_and(is_empty) {
        None // as in releases of Llama 4
    } else {
        switches(keys, of.list, layers)?
    };
    if let Some(list) = list {
        let layers = (0..).zip(list).filter(|(_, rotated)| !rotated);
        return Ok(layers.map(|(layer, _)| layer).collect());
    }
    let Some((key, usual)) = of.interval else {
        return Ok(Vec::new());
    };
    let interval = keys.u32(key)?.unwrap_or(usual);
    if interval == 0 {
        return Err(keys.bad(key, "1 or more"));
    }
    let is_nope = |layer: &u32| (layer + 1).is_multiple_of(interval);
    Ok((0..layers).filter(is_nope).collect())
}

/// Whether a Falcon has the architecture of the 40B.
fn new_falcon(keys: &Keys) -> Result<bool, Error> {
    Ok(keys.bool("new_decoder_architecture")?.unwrap_or(false))
}

/// `modeling_falcon.py`: attention and FFN read the same input, after a shared norm or, in newer
/// models, one each.
fn falcon(keys: &Keys) -> Result<Parallel, Error> {
    let new = new_falcon(keys)?;
    let parallel = keys.bool("parallel_attn")?.unwrap_or(true);
    let norms = keys.u32("num_ln_in_parallel_attn")?;
    if new && !parallel {
        return Err(keys.bad("parallel_attn", "true, as new_decoder_architecture is"));
    }
    match (new, norms) {
        (true, None | Some(2)) => Ok(Parallel::TwoNorms),
        (true, Some(1)) => Ok(Parallel::OneNorm),
        (false, None | Some(0 | 1)) if parallel => Ok(Parallel::OneNorm),
        (false, None | Some(0 | 1)) => Ok(Parallel::No),
        _ => {
            let expected = "1, or 2 with new_decoder_architecture";
            Err(keys.bad("num_ln_in_parallel_attn", expected))
        }
    }
}
