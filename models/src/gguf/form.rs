//! Metadata for deviations from the plain decoder.

use super::facts::Facts;
use super::xielu::activations;
use super::{ngrams, streams};
use crate::config::{Form, Parallel, QueryScale};
use crate::error::Error;
use crate::families::{Absent, Arch, Family, QkNorm, Quirk, Windows};
use crate::metadata::ArchKeys;
use crate::mixers::Sizes;

/// Number of experts of Llama 4 Maverick, whose queries and keys have no norms; no key tells.
const MAVERICK: u32 = 128;

/// Scaling of queries by position.
fn query_scale(keys: ArchKeys<'_>) -> Result<Option<QueryScale>, Error> {
    let beta = keys.f32("attention.temperature_scale")?;
    let Some(beta) = beta.filter(|beta| *beta != 0.0) else {
        return Ok(None);
    };
    let original_context = match keys.u32("attention.temperature_length")? {
        Some(length) if length != 0 => length,
        _ => keys.need("rope.scaling.original_context_length")?,
    };
    Ok(Some(QueryScale {
        beta,
        original_context,
        unrotated: false,
    }))
}

/// The layers without rotary positions.
fn nope_layers(
    keys: ArchKeys<'_>,
    arch: &Arch,
    layers: u32,
    windowed: bool,
) -> Result<Vec<u32>, Error> {
    if arch.rotated_by_key && keys.bool("rope.scaling.finetuned")? == Some(false) {
        return Ok((0..layers).collect());
    }
    let unrotated = (arch.unrotated).filter(|of| windowed || !of.windowed);
    Ok(unrotated.map_or_else(Vec::new, |of| of.of(layers)))
}

/// The form of a file.
pub(super) fn form(
    keys: ArchKeys<'_>,
    family: &Family,
    arch: &Arch,
    facts: &Facts,
    sizes: Sizes,
    windowed: bool,
) -> Result<Form, Error> {
    let scores = |widest| {
        let width = match sizes.layers == widest {
            true => sizes.d_model / sizes.heads.max(1),
            false => sizes.head_dim,
        };
        1.0 / (width as f32).sqrt()
    };
    let mut form = Form {
        layer_norm: family.layer_norm,
        norm_bias: family.layer_norm && family.norm_bias,
        parallel: family.parallel,
        pre_norm: family.pre_norm,
        post_norm: family.post_norm,
        learned_positions: family.learned_positions,
        ffn_bias: family.ffn_bias || facts.has_ffn_bias,
        sinks: family.sinks,
        value_norm: family.value_norm,
        rotated_qk_norm: family.qk_norm == QkNorm::HeadRotated,
        plain_qk_norm: matches!(family.qk_norm, QkNorm::PlainUnless(_))
            && keys.u32("expert_count")? != Some(MAVERICK),
        qk_layer_norms: matches!(family.qk_norm, QkNorm::LayersBy(_)) && facts.has_qk_norm,
        chunked: matches!(arch.windows, Windows::Chunks(_)),
        attention_scale: family.attention_scale.or(arch.widest.map(scores)),
        embedding_scale: if family.width_scale {
            (sizes.d_model as f32).sqrt()
        } else {
            1.0
        },
        nope_layers: nope_layers(keys, arch, sizes.layers, windowed)?,
        ..Form::default()
    };
    for known in family.keys.iter().filter(|key| !key.gguf.name.is_empty()) {
        let side = known.gguf;
        let given = match keys.f32(side.name)? {
            Some(factor) if factor < 0.0 => return Err(keys.bad(side.name, "a number above 0")),
            factor => factor.filter(|factor| *factor != 0.0),
        };
        let value = match (given, side.absent) {
            (Some(given), _) => given,
            (None, Absent::Is(absent)) => absent,
            (None, Absent::Needed) => return Err(keys.missing(side.name, "a number above 0")),
            (None, _) => continue,
        };
        let part = side.by.apply(value, sizes.d_model, sizes.layers);
        known.sets.put(&mut form, Some(part));
    }
    of_quirks(keys, family, facts, sizes.layers, &mut form)?;
    Ok(form)
}

/// Properties that have no field in the family.
fn of_quirks(
    keys: ArchKeys<'_>,
    family: &Family,
    facts: &Facts,
    layers: u32,
    form: &mut Form,
) -> Result<(), Error> {
    if family.has(Quirk::Falcon) {
        form.parallel = if facts.two_norms {
            Parallel::TwoNorms
        } else {
            Parallel::OneNorm
        };
    }
    for quirk in family.quirks {
        let table = facts.streams;
        match *quirk {
            Quirk::ParallelIf(key, absent) => {
                let parallel = match family.parallel {
                    Parallel::OneNorm => !facts.has_ffn_norm,
                    _ => keys.bool(key)?.unwrap_or(absent),
                };
                form.parallel = if parallel {
                    family.parallel
                } else {
                    Parallel::No
                };
            }
            Quirk::Xielu => form.activations = activations(keys.metadata, layers)?,
            Quirk::Unrotated => form.nope_layers = (0..layers).collect(),
            Quirk::OutputGate => form.output_gate = true,
            Quirk::Temperature => form.query_scale = Some(QueryScale::LLAMA4),
            Quirk::QueryScale => form.query_scale = query_scale(keys)?,
            Quirk::Hyper => ngrams::form(keys, table, form)?,
            Quirk::Streams => streams::form(keys, layers, table, form)?,
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::families;
    use crate::metadata::{Metadata, Value};
    use crate::testing::sizes_of;

    #[test]
    fn maverick_has_no_norms_of_queries_and_keys() {
        let (family, arch) = families::find_arch("llama4").unwrap();
        for (experts, norms) in [(16, true), (128, false)] {
            let mut metadata = Metadata::new(Path::new("model.gguf"));
            let key = "llama4.expert_count".to_owned();
            metadata.insert(key, Value::Uint(experts)).unwrap();
            let form = form(
                arch.keys(&metadata),
                family,
                arch,
                &Facts::default(),
                sizes_of(36, 8),
                true,
            );
            let form = form.unwrap();
            assert_eq!(form.plain_qk_norm, norms);
            assert!(form.chunked && form.nope_layers == [3, 7]);
        }
    }
}
