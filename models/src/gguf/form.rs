//! Metadata for deviations from the plain decoder.

use super::xielu::activations;
use super::{ngrams, streams};
use crate::config::{Form, Parallel, QueryScale};
use crate::error::Error;
use crate::families::{Absent, Arch, Family, QkNorm, Quirk, Windows};
use crate::metadata::Metadata;

/// Sizes and tensors that determine some forms.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) d_model: u32,
    pub(super) layers: u32,
    pub(super) heads: u32,
    pub(super) head_dim: u32,
    /// The FFN's projections carry biases.
    pub(super) ffn_bias: bool,
    /// Queries and keys are normed.
    pub(super) qk_norm: bool,
    /// There is a second norm before attention (Falcon 40B).
    pub(super) two_norms: bool,
    /// There is a norm before the FFN.
    pub(super) ffn_norm: bool,
    /// Some layers have a window.
    pub(super) windowed: bool,
    /// Sizes of the residual streams.
    pub(super) streams: streams::Sizes,
}

impl Shape {
    /// The number whose root is the factor of the scores.
    fn score_width(self, widest: u32) -> u32 {
        if self.layers == widest {
            self.d_model / self.heads.max(1)
        } else {
            self.head_dim
        }
    }
}

/// Number of experts of Llama 4 Maverick, whose queries and keys have no norms; no key tells.
const MAVERICK: u32 = 128;

/// Scaling of queries by position.
fn query_scale(metadata: &Metadata, arch: &Arch) -> Result<Option<QueryScale>, Error> {
    let key = |rest: &str| format!("{}.{rest}", arch.name);
    let beta = metadata.f32(&key("attention.temperature_scale"))?;
    let Some(beta) = beta.filter(|beta| *beta != 0.0) else {
        return Ok(None);
    };
    let original = key("rope.scaling.original_context_length");
    let original_context = match metadata.u32(&key("attention.temperature_length"))? {
        Some(length) if length != 0 => Some(length),
        _ => metadata.u32(&original)?,
    };
    Ok(Some(QueryScale {
        beta,
        original_context: original_context
            .ok_or_else(|| metadata.missing(&original, "an integer"))?,
        unrotated: false,
    }))
}

/// The layers without rotary positions.
fn nope_layers(metadata: &Metadata, arch: &Arch, shape: Shape) -> Result<Vec<u32>, Error> {
    let key = format!("{}.rope.scaling.finetuned", arch.name);
    if arch.rotated_by_key && metadata.bool(&key)? == Some(false) {
        return Ok((0..shape.layers).collect());
    }
    let unrotated = (arch.unrotated).filter(|of| shape.windowed || !of.windowed);
    Ok(unrotated.map_or_else(Vec::new, |of| of.of(shape.layers)))
}

/// The form of a file.
pub(super) fn form(
    metadata: &Metadata,
    family: &Family,
    arch: &Arch,
    shape: Shape,
) -> Result<Form, Error> {
    let scores = |widest| 1.0 / (shape.score_width(widest) as f32).sqrt();
    let mut form = Form {
        layer_norm: family.layer_norm,
        norm_bias: family.layer_norm && family.norm_bias,
        parallel: family.parallel,
        pre_norm: family.pre_norm,
        post_norm: family.post_norm,
        learned_positions: family.learned_positions,
        ffn_bias: family.ffn_bias || shape.ffn_bias,
        sinks: family.sinks,
        value_norm: family.value_norm,
        rotated_qk_norm: family.qk_norm == QkNorm::HeadRotated,
        plain_qk_norm: matches!(family.qk_norm, QkNorm::PlainUnless(_))
            && metadata.u32(&format!("{}.expert_count", arch.name))? != Some(MAVERICK),
        qk_layer_norms: matches!(family.qk_norm, QkNorm::LayersBy(_)) && shape.qk_norm,
        chunked: matches!(arch.windows, Windows::Chunks(_)),
        attention_scale: family.attention_scale.or(arch.widest.map(scores)),
        embedding_scale: if family.width_scale {
            (shape.d_model as f32).sqrt()
        } else {
            1.0
        },
        nope_layers: nope_layers(metadata, arch, shape)?,
        ..Form::default()
    };
    for known in family.keys.iter().filter(|key| !key.gguf.name.is_empty()) {
        let side = known.gguf;
        let key = format!("{}.{}", arch.name, side.name);
        let given = match metadata.f32(&key)? {
            Some(factor) if factor < 0.0 => return Err(metadata.bad(&key, "a number above 0")),
            factor => factor.filter(|factor| *factor != 0.0),
        };
        let value = match (given, side.absent) {
            (Some(given), _) => given,
            (None, Absent::Is(absent)) => absent,
            (None, Absent::Needed) => return Err(metadata.missing(&key, "a number above 0")),
            (None, _) => continue,
        };
        let part = side.by.apply(value, shape.d_model, shape.layers);
        known.sets.put(&mut form, Some(part));
    }
    of_quirks(metadata, family, arch, shape, &mut form)?;
    Ok(form)
}

/// Properties that have no field in the family.
fn of_quirks(
    metadata: &Metadata,
    family: &Family,
    arch: &Arch,
    shape: Shape,
    form: &mut Form,
) -> Result<(), Error> {
    if family.has(Quirk::Falcon) {
        form.parallel = if shape.two_norms {
            Parallel::TwoNorms
        } else {
            Parallel::OneNorm
        };
    }
    for quirk in family.quirks {
        let table = shape.streams;
        match *quirk {
            Quirk::ParallelIf(key, absent) => {
                let parallel = match family.parallel {
                    Parallel::OneNorm => !shape.ffn_norm,
                    _ => metadata
                        .bool(&format!("{}.{key}", arch.name))?
                        .unwrap_or(absent),
                };
                form.parallel = if parallel {
                    family.parallel
                } else {
                    Parallel::No
                };
            }
            Quirk::Xielu => form.activations = activations(metadata, shape.layers)?,
            Quirk::Unrotated => form.nope_layers = (0..shape.layers).collect(),
            Quirk::OutputGate => form.output_gate = true,
            Quirk::Temperature => form.query_scale = Some(QueryScale::LLAMA4),
            Quirk::QueryScale => form.query_scale = query_scale(metadata, arch)?,
            Quirk::Hyper => ngrams::form(metadata, arch.name, table, form)?,
            Quirk::Streams => streams::form(metadata, arch.name, shape.layers, table, form)?,
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
    use crate::metadata::Value;

    #[test]
    fn maverick_has_no_norms_of_queries_and_keys() {
        let (family, arch) = families::find_arch("llama4").unwrap();
        let shape = Shape {
            d_model: 36,
            layers: 8,
            heads: 6,
            head_dim: 8,
            ffn_bias: false,
            qk_norm: false,
            two_norms: false,
            ffn_norm: true,
            windowed: true,
            streams: streams::Sizes::of(|_| None),
        };
        for (experts, norms) in [(16, true), (128, false)] {
            let mut metadata = Metadata::new(Path::new("model.gguf"));
            let key = "llama4.expert_count".to_owned();
            metadata.insert(key, Value::Uint(experts)).unwrap();
            let form = form(&metadata, family, arch, shape).unwrap();
            assert_eq!(form.plain_qk_norm, norms);
            assert!(form.chunked && form.nope_layers == [3, 7]);
        }
    }
}
