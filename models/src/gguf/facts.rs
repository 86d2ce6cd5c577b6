//! Properties of a configuration that follow from a file's tensors and vocabulary.

use std::collections::BTreeSet;

use super::gemma4::Gemma4Facts;
use super::header::Raw;
use super::rope::ROPE_FACTORS;
use super::streams;
use crate::config::Form;
use crate::error::Error;
use crate::families::{Family, POSITIONS, QkNorm};
use crate::gguf_vocab::GgufVocab;
use crate::metadata::ArchKeys;
use crate::mixers::pooled;
use crate::store::indexed_context;
use crate::tensor_id::split_index;

/// Properties from the tensors and the vocabulary.
#[derive(Default)]
pub(super) struct Facts {
    /// PowerInfer wrote the file for sparse inference.
    pub(super) powerinfer: bool,
    pub(super) vocab: u32,
    pub(super) has_qkv_bias: bool,
    pub(super) has_o_bias: bool,
    pub(super) has_ffn_bias: bool,
    pub(super) has_qk_norm: bool,
    /// There is a second norm before attention.
    pub(super) two_norms: bool,
    /// There is a norm before the FFN.
    pub(super) has_ffn_norm: bool,
    pub(super) has_head: bool,
    /// Experts are chosen by scores plus biases.
    pub(super) has_choice_bias: bool,
    /// Names of tensors in layers, without the layer.
    pub(super) layer_tensors: BTreeSet<String>,
    /// Layers with a router.
    pub(super) routers: BTreeSet<u32>,
    /// Rows of the table of learned positions.
    pub(super) positions: Option<u32>,
    /// Sizes of the residual streams.
    pub(super) streams: streams::Sizes,
    /// Properties of Gemma 4 from the tensors.
    pub(super) gemma4: Gemma4Facts,
}

impl Facts {
    /// From a file's tensors and vocabulary.
    pub(super) fn of(powerinfer: bool, vocab: &GgufVocab, tensors: &[Raw]) -> Self {
        let has = |name: &str| tensors.iter().any(|raw| raw.name == name);
        let in_layer =
            |raw: &Raw| split_index(raw.name.strip_prefix("blk.")?).map(|of| of.1.to_owned());
        let layer_tensors: BTreeSet<String> = tensors.iter().filter_map(in_layer).collect();
        // 0, except in a file with a head for multi-token prediction alone
        let layers = tensors
            .iter()
            .filter_map(|raw| split_index(raw.name.strip_prefix("blk.")?));
        let first = layers.map(|of| of.0).min().unwrap_or(0);
        // in any layer: not all have attention
        let some_has = |name: &str| layer_tensors.contains(name);
        let count = |end: &str| tensors.iter().filter(|raw| raw.name.ends_with(end)).count();
        let shape_of = |name: &str| {
            let raw = tensors.iter().find(|raw| raw.name == name);
            raw.map(|raw| &raw.shape[..])
        };
        let rows_of = |name: &str| {
            let rows = shape_of(name).and_then(|shape| shape.first().copied());
            rows.map_or(0, |rows| u32::try_from(rows).unwrap_or(u32::MAX))
        };
        Self {
            powerinfer,
            vocab: u32::try_from(vocab.tokens.len()).unwrap_or(u32::MAX),
            has_qkv_bias: some_has("attn_q.bias") || some_has("attn_qkv.bias"),
            has_qk_norm: has(&format!("blk.{first}.attn_q_norm.weight")),
            has_o_bias: some_has("attn_output.bias"),
            has_ffn_bias: some_has("ffn_up.bias") || some_has("ffn_up_exps.bias"),
            two_norms: has("blk.0.attn_norm_2.weight"),
            has_ffn_norm: has("blk.0.ffn_norm.weight"),
            has_head: has("output.weight"),
            has_choice_bias: (tensors.iter()).any(|raw| raw.name.ends_with(".exp_probs_b.bias")),
            routers: (tensors.iter())
                .filter_map(|raw| split_index(raw.name.strip_prefix("blk.")?))
                .filter(|(_, rest)| *rest == "ffn_gate_inp.weight")
                .map(|(layer, _)| layer)
                .collect(),
            positions: has(POSITIONS).then(|| rows_of(POSITIONS)),
            streams: streams::Sizes::of(shape_of),
            gemma4: Gemma4Facts {
                rows: rows_of("per_layer_token_embd.weight"),
                key_is_value: count(".attn_k.weight") > count(".attn_v.weight"),
                layer_scale: some_has("layer_output_scale.weight"),
                rope_factors: has(ROPE_FACTORS),
            },
            layer_tensors,
        }
    }

    /// The context. A file with learned positions declares the rows of their table, or fewer.
    pub(super) fn max_context(
        &self,
        keys: ArchKeys<'_>,
        family: &Family,
        form: &Form,
    ) -> Result<u32, Error> {
        let declared = keys.need_uniform("context_length")?;
        let indexed = |key: &str, most| indexed_context(keys.metadata.path(), key, declared, most);
        if let Some(of) = &form.pooled {
            let (key, chosen) = pooled::gguf_chosen(keys)?;
            let most = of.most_positions(chosen);
            return Ok(most.map_or(declared, |most| indexed(&key, most)));
        }
        if let Some([_, chosen]) = family.indexed() {
            return Ok(indexed(chosen, keys.need_uniform(chosen)?));
        }
        let rows = self.positions.unwrap_or(u32::MAX);
        Ok(declared.min(rows.saturating_sub(family.learned_positions.unwrap_or(0))))
    }

    /// Whether queries and keys are normed.
    pub(super) fn qk_norm(&self, family: &Family) -> bool {
        match family.qk_norm {
            QkNorm::HeadBy(_) | QkNorm::LayersBy(_) => self.has_qk_norm,
            QkNorm::PlainUnless(_) => false,
            norm => norm != QkNorm::No,
        }
    }
}
