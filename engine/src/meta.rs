//! The JSON metadata section of a container, written by the packer and read by the engine. The
//! crate `storage` treats it as opaque bytes.

use std::collections::BTreeMap;

use emberflow_kernels::DType;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::Role;
use emberflow_models::{Checkpoint, TextRules};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::sampler::Sampling;

/// The only accepted value of [`ContainerMeta::format`].
pub const META_FORMAT: &str = "emberflow-meta-v1";

/// A packed model without its weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContainerMeta {
    /// Format name and version of this JSON.
    pub format: String,
    /// The normalised model configuration.
    pub config: ModelConfig,
    /// Storage formats chosen by the packer.
    pub quant: Quant,
    /// Order of packed neuron ids.
    pub order: Order,
    /// Source of the weights.
    pub source: Source,
    /// Summary of the activation statistics, if packed with them.
    pub stats: Option<StatsSummary>,
    /// The text of `pack --calibrate`, if it was used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
    /// Layers whose outlier activations are pruned, as `prune-outliers` has chosen them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pruned: Option<Pruned>,
    /// Sampling parameters recommended by the checkpoint.
    pub sampling: SamplingDefaults,
    /// Checkpoint rules on generated texts, such as suppressed tokens.
    #[serde(default, skip_serializing_if = "TextRules::is_empty")]
    pub rules: TextRules,
    /// Chat template (Jinja), if the checkpoint has one.
    pub chat_template: Option<String>,
    /// Special tokens that the template refers to by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub named_tokens: BTreeMap<String, String>,
    /// Chat template for conversations with tools, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_template: Option<String>,
    /// The tokenizer in `tokenizer.json` form.
    pub tokenizer: String,
}

/// Block formats by weight class, as [`DType::name`] spells them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Quant {
    /// Neuron bundles.
    pub ffn: String,
    /// Attention projections.
    pub attention: String,
    /// Embedding and head.
    pub embedding: String,
    /// Whether some of these matrices have other formats; the fields name the most frequent ones.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mixed: bool,
    /// Of a model without neurons in bundles: its quantizer's name for all of them, such as `Q4_K_M`, or the most frequent
    /// format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<String>,
}

impl Quant {
    /// The most frequent formats by weight class, by bytes, of matrices of these roles, formats and bytes. `stated`: the
    /// quantizer's name for all of them.
    pub fn of_matrices(
        matrices: impl Iterator<Item = (Role, DType, u64)>,
        stated: Option<&str>,
    ) -> Self {
        let matrices: Vec<_> = matrices.collect();
        let most = |of: &dyn Fn(Role) -> bool| {
            let mut bytes = BTreeMap::<DType, u64>::new();
            for &(_, dtype, len) in matrices.iter().filter(|(role, ..)| of(*role)) {
                *bytes.entry(dtype).or_default() += len;
            }
            let most = bytes.iter().max_by_key(|(_, bytes)| **bytes);
            let most = most.map_or(DType::F32, |(dtype, _)| *dtype);
            (most.name().to_owned(), bytes.len() > 1)
        };
        let (ffn, first) = most(&Role::is_bundled);
        let (attention, second) = most(&Role::is_projection);
        let (embedding, third) = most(&|role| matches!(role, Role::Embed | Role::Head));
        let whole = stated.map_or_else(|| most(&|_| true).0.to_uppercase(), str::to_owned);
        Self {
            ffn,
            attention,
            embedding,
            mixed: first || second || third,
            whole: Some(whole),
        }
    }
}

/// Order of the neurons in a bank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Packed id = the checkpoint's id.
    Original,
    /// Hottest neuron first.
    Temperature,
    /// By temperature; neurons of similar temperature that fire together are adjacent.
    Coactivation,
}

/// The checkpoint a container was packed from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// Name of the file or folder without its path, so that the container does not depend on the
    /// checkpoint's location.
    pub name: String,
    /// Fingerprint of its contents, hexadecimal.
    pub fingerprint: String,
}

/// Summary of the activation statistics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatsSummary {
    /// Tokens profiled.
    pub tokens: u64,
    /// Mean share of neurons that fire, per layer.
    pub active_share: Vec<f64>,
}

/// The text against which matrices of grouped formats, except embedding and head, were rounded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calibration {
    /// Number of tokens used.
    pub tokens: u64,
    /// Hash of the tokens, the model and the formats, hexadecimal.
    pub hash: String,
}

/// Layers whose inputs have no outliers beside their tokens' scales (llm.npu, §3.3), and what that costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pruned {
    /// Their numbers, ascending.
    pub layers: Vec<u32>,
    /// How much perplexity rises, in percent of that without pruning; negative if it falls.
    pub loss_percent: f64,
    /// The most that it was allowed to rise.
    pub bound_percent: f64,
    /// Tokens on which it was measured.
    pub tokens: u64,
    /// Class of numerics in which it was measured: `cpu`, or device and driver.
    #[serde(default = "numerics_of_cpu")]
    pub numerics: String,
}

/// The CPU's class of numerics, also of what was written before classes were.
fn numerics_of_cpu() -> String {
    "cpu".into()
}

/// Sampling parameters recommended by a checkpoint or chosen by a caller. Missing ones come from
/// the next source, finally from [`SamplingDefaults::sampling`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SamplingDefaults {
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Keep the `k` most likely tokens.
    pub top_k: Option<u32>,
    /// Keep the smallest set of tokens with at least this probability mass.
    pub top_p: Option<f32>,
    /// Drop tokens whose probability is below this share of the largest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    /// Keep tokens whose surprise is near its mean, with this probability mass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub typical_p: Option<f32>,
    /// Divides positive and multiplies negative logits of recent tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f32>,
}

impl SamplingDefaults {
    /// What chats and servers use where a checkpoint recommends nothing: llama.cpp's defaults. The most likely token at
    /// every step leads small chat models into loops.
    pub const CHAT: Self = Self {
        temperature: Some(0.8),
        top_k: Some(40),
        top_p: Some(0.95),
        min_p: Some(0.05),
        typical_p: None,
        repetition_penalty: None,
    };

    /// Complete parameters of a chat that chooses these, with a model that recommends `recommended`.
    pub fn in_chats(self, recommended: Self) -> Sampling {
        let usual = match recommended.draws() {
            true => Self::default(),
            false => Self::CHAT,
        };
        self.or(recommended).or(usual).sampling()
    }

    /// Whether they say how a token is drawn. A repetition penalty alone does not.
    fn draws(&self) -> bool {
        let cuts = [self.top_p, self.min_p, self.typical_p];
        self.temperature
            .or(cuts.into_iter().flatten().next())
            .is_some()
            || self.top_k.is_some()
    }

    /// These parameters; missing ones from `other`.
    pub fn or(self, other: Self) -> Self {
        Self {
            temperature: self.temperature.or(other.temperature),
            top_k: self.top_k.or(other.top_k),
            top_p: self.top_p.or(other.top_p),
            min_p: self.min_p.or(other.min_p),
            typical_p: self.typical_p.or(other.typical_p),
            repetition_penalty: self.repetition_penalty.or(other.repetition_penalty),
        }
    }

    /// Complete parameters. Without a temperature: greedy, or temperature 1 if any filter is set.
    pub fn sampling(self) -> Sampling {
        let cuts = [self.top_p, self.min_p, self.typical_p];
        let chooses = self.top_k.is_some() || cuts.iter().any(Option::is_some);
        let off = Sampling::default();
        Sampling {
            temperature: (self.temperature).unwrap_or(if chooses { 1.0 } else { 0.0 }),
            top_k: self.top_k.map_or(off.top_k, |k| k as usize),
            top_p: self.top_p.unwrap_or(off.top_p),
            min_p: self.min_p.unwrap_or(off.min_p),
            typical_p: self.typical_p.unwrap_or(off.typical_p),
            repetition_penalty: (self.repetition_penalty).unwrap_or(off.repetition_penalty),
            ..off
        }
    }
}

impl ContainerMeta {
    /// The metadata of a checkpoint whose matrices have these formats, with neurons in the checkpoint's order.
    pub fn of(source: &dyn Checkpoint, quant: Quant) -> Self {
        let sampling = source.sampling_defaults();
        let name = source.path().file_name();
        Self {
            format: META_FORMAT.into(),
            config: source.config().clone(),
            quant,
            order: Order::Original,
            source: Source {
                name: name.map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
                fingerprint: format!("{:016x}", source.fingerprint()),
            },
            stats: None,
            calibration: None,
            pruned: None,
            sampling: SamplingDefaults {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
                typical_p: sampling.typical_p,
                repetition_penalty: sampling.repetition_penalty,
            },
            rules: source.rules(),
            chat_template: source.chat_template().map(str::to_owned),
            named_tokens: source.named_tokens(),
            tool_template: source.tool_template().map(str::to_owned),
            tokenizer: source.tokenizer_json().to_owned(),
        }
    }

    /// Whether outlier activations of a layer are pruned.
    pub fn prunes(&self, layer: u32) -> bool {
        let pruned = self.pruned.as_ref();
        pruned.is_some_and(|of| of.layers.binary_search(&layer).is_ok())
    }

    /// Parses the metadata section of the container at `path` (for messages) and checks its format
    /// name.
    pub fn parse(bytes: &[u8], path: &std::path::Path) -> Result<Self, Error> {
        let bad = |reason: String| Error::Metadata {
            path: path.to_path_buf(),
            reason,
        };
        let meta: Self = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
        if meta.format != META_FORMAT {
            return Err(bad(format!(
                "format is {:?}, this program reads {META_FORMAT:?}; pack the checkpoint again",
                meta.format
            )));
        }
        for (what, name) in [
            ("ffn", &meta.quant.ffn),
            ("attention", &meta.quant.attention),
            ("embedding", &meta.quant.embedding),
        ] {
            if DType::parse(name).is_none() {
                return Err(bad(format!("unknown {what} format {name:?}")));
            }
        }
        meta.config.validate(path)?;
        let layers = meta.pruned.as_ref().map_or(&[][..], |of| &of.layers);
        let ascending = layers.is_sorted_by(|a, b| a < b);
        if !ascending
            || layers
                .last()
                .is_some_and(|&last| last >= meta.config.layers)
        {
            return Err(bad(format!(
                "the pruned layers are no ascending numbers below {}",
                meta.config.layers
            )));
        }
        Ok(meta)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chat_draws_as_others_do_unless_the_model_or_the_caller_says_otherwise() {
        let none = SamplingDefaults::default();
        let shown =
            |chosen: SamplingDefaults, recommended| chosen.in_chats(recommended).to_string();
        let usual = "temperature 0.8, top-k 40, top-p 0.95, min-p 0.05";
        assert_eq!(shown(none, none), format!("{usual}, seed 0"));
        let penalty = SamplingDefaults {
            repetition_penalty: Some(1.25),
            ..none
        };
        let with_penalty = format!("{usual}, repetition penalty 1.25, seed 0");
        assert_eq!(shown(none, penalty), with_penalty);
        // A recommendation is taken as it is.
        let recommended = SamplingDefaults {
            temperature: Some(0.6),
            top_p: Some(0.9),
            ..none
        };
        assert_eq!(
            shown(none, recommended),
            "temperature 0.6, top-p 0.9, seed 0"
        );
        let top_k = SamplingDefaults {
            top_k: Some(20),
            ..none
        };
        assert_eq!(shown(none, top_k), "temperature 1, top-k 20, seed 0");
        // What the caller chooses wins; the rest is the usual.
        let greedy = SamplingDefaults {
            temperature: Some(0.0),
            ..none
        };
        assert_eq!(shown(greedy, none), "greedy");
        assert_eq!(shown(greedy, recommended), "greedy");
        assert_eq!(shown(none, greedy), "greedy");
        let chosen = "temperature 0.8, top-k 20, top-p 0.95, min-p 0.05, seed 0";
        assert_eq!(shown(top_k, none), chosen);
        // Texts that continue a prompt stay greedy.
        assert_eq!(none.sampling().to_string(), "greedy");
    }
}
