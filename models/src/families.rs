//! The model families: what each computes differently from the plain decoder, and the names of its
//! keys and tensors.
//!
//! A family is one `const` in a file of `families/`. Readers and writers of both formats iterate
//! over it; no other code refers to a family by name.

mod apertus;
mod arcee;
mod cohere;
mod deepseek;
mod deepseek4;
mod experts;
mod gemma;
mod gemma_names;
mod gguf_names;
mod glm;
mod gpt;
mod granite;
mod hf_names;
mod hunyuan;
mod hybrids;
mod keys;
mod kimi;
mod layer_norm;
mod layers;
mod lfm2;
mod llama;
mod llama4;
mod mixers;
mod mixtures;
mod nemotron;
mod olmo;
mod qwen;
mod qwen_names;
mod routed;
mod stablelm;

pub(crate) use self::experts::{Dense, Experts, Renormalise, ScoringBy, Shared};
pub(crate) use self::gguf_names::{DOWN_T, DOWN_T_BIAS, POSITIONS};
pub(crate) use self::keys::{Absent, By, Key};
pub(crate) use self::layers::{EveryNth, FurtherTokens, Unrotated, Windows};
pub(crate) use self::mixers::FamilyMixer;

use crate::config::{Activation, Parallel};
use crate::json::Aliases;
use crate::metadata::{ArchKeys, Metadata};
use crate::mixers::keys::HeadKeys;
use crate::names::NameTable;

/// All families, group by group.
const GROUPS: &[&[Family]] = &[
    &llama::FAMILIES,
    &llama4::FAMILIES,
    &qwen::FAMILIES,
    &mixtures::FAMILIES,
    &routed::FAMILIES,
    &deepseek::FAMILIES,
    &deepseek4::FAMILIES,
    &kimi::FAMILIES,
    &hunyuan::FAMILIES,
    &granite::FAMILIES,
    &nemotron::FAMILIES,
    &cohere::FAMILIES,
    &layer_norm::FAMILIES,
    &gemma::FAMILIES,
    &lfm2::FAMILIES,
    &olmo::FAMILIES,
    &glm::FAMILIES,
    &arcee::FAMILIES,
    &stablelm::FAMILIES,
    &gpt::FAMILIES,
    &apertus::FAMILIES,
    &hybrids::FAMILIES,
];

/// A family, as differences from [`PLAIN`].
pub(crate) struct Family {
    /// `model_type` in `config.json`, and the family's name in containers.
    pub(crate) name: &'static str,
    /// `model_type` of multimodal models with this family as their text model.
    pub(crate) whole: Option<&'static str>,
    /// The class in transformers that implements it; without one it has no folder form.
    pub(crate) class: Option<&'static str>,
    /// Values of keys that releases leave out.
    pub(crate) defaults: &'static [(&'static str, Preset)],
    /// Names of common keys in its releases.
    pub(crate) aliases: Aliases,
    /// Names of its tensors in safetensors.
    pub(crate) names: &'static NameTable,
    /// The same for a file with two norms before attention and FFN, for writing.
    pub(crate) names_of_two_norms: Option<&'static NameTable>,
    /// Names for writing, if transformers does not read the first ones.
    pub(crate) names_to_write: Option<&'static NameTable>,
    /// Its architecture in GGUF.
    pub(crate) gguf: Option<Arch>,
    /// The architecture for writing GGUF, if it is another family's.
    pub(crate) gguf_as: Option<&'static str>,

    /// The norms before attention, FFN and head are LayerNorms.
    pub(crate) layer_norm: bool,
    /// LayerNorms have biases.
    pub(crate) norm_bias: bool,
    /// Order of attention and FFN, regardless of keys.
    pub(crate) parallel: Parallel,
    /// There are norms before attention and FFN.
    pub(crate) pre_norm: bool,
    /// There are norms after attention and FFN.
    pub(crate) post_norm: bool,
    /// Its norms store weights minus one, in safetensors.
    pub(crate) plus_one: bool,
    pub(crate) qk_norm: QkNorm,
    /// Values are normed.
    pub(crate) value_norm: bool,
    /// Biases of attention.
    pub(crate) bias: Bias,
    /// The FFN always has biases.
    pub(crate) ffn_bias: bool,
    /// Attention sinks: query heads have an additional logit.
    pub(crate) sinks: bool,
    /// The FFN has no gate.
    pub(crate) ungated: bool,
    /// ReLU on the up projection as well.
    pub(crate) relu_on_up: bool,
    /// SiLU means gpt-oss's clamped SwiGLU.
    pub(crate) clamped: bool,
    /// Rows of the table of learned positions before that of position 0, if positions are learned.
    pub(crate) learned_positions: Option<u32>,
    /// Embeddings are multiplied by `sqrt(d_model)`.
    pub(crate) width_scale: bool,
    /// Factor of the scores, regardless of keys.
    pub(crate) attention_scale: Option<f32>,

    /// Key of the epsilon of its norms; `None` for that of PyTorch's LayerNorm.
    pub(crate) eps: Option<&'static str>,
    /// Key of the activation.
    pub(crate) act: &'static str,
    /// The activation without the key.
    pub(crate) act_default: Option<&'static str>,
    /// The only activation it supports.
    pub(crate) one_act: bool,
    /// Key of the FFN's number of neurons.
    pub(crate) ffn: &'static str,
    /// The number as a multiple of `d_model`, without the key.
    pub(crate) ffn_default: Option<u32>,
    /// The key may be a list of equal numbers.
    pub(crate) ffn_list: bool,
    /// Key of the number of heads of keys and values.
    pub(crate) kv_heads: &'static str,
    /// Without the key, equal to the number of query heads.
    pub(crate) kv_heads_default: bool,
    /// `head_dim` may be absent and then is `hidden_size / num_attention_heads`.
    pub(crate) head_dim_default: bool,
    /// The head is tied to the embedding without `tie_word_embeddings`.
    pub(crate) tied: bool,
    pub(crate) windows: Windows,
    /// Layers without rotary positions.
    pub(crate) unrotated: Option<Unrotated>,
    /// Base of the rotary frequencies without a key.
    pub(crate) theta: f32,
    /// Rotated share of a head without a key; `None` if always the whole head.
    pub(crate) rotated: Option<f32>,
    /// Key of the rotated dimensions of a head, in releases without a share.
    pub(crate) rotated_dims: Option<&'static str>,
    /// Q and K are stored in interleaved rotary order, in safetensors.
    pub(crate) interleaved: bool,
    /// Weights for multi-token prediction.
    pub(crate) further_tokens: FurtherTokens,
    /// Layers with a window have their own rotary embedding.
    pub(crate) two_ropes: bool,
    /// LongRoPE's factors of queries and keys have separate keys.
    pub(crate) named_factors: bool,
    /// Rotary positions are scaled as given by keys.
    pub(crate) always_scaled: bool,
    pub(crate) experts: Option<Experts>,
    /// Mixers other than attention.
    pub(crate) mixers: &'static [&'static dyn FamilyMixer],
    /// Keys that set parts of the form.
    pub(crate) keys: &'static [Key],
    /// Keys with a single supported value.
    pub(crate) checks: &'static [Check],
    /// Further keys that are read for it and refused for other families.
    pub(crate) reads: &'static [&'static str],
    pub(crate) quirks: &'static [Quirk],
}

/// A family in GGUF. Formulas as in llama.cpp's `src/models/`.
pub(crate) struct Arch {
    /// `general.architecture`.
    pub(crate) name: &'static str,
    /// Names of its tensors.
    pub(crate) names: &'static NameTable,
    /// The same for a file with a second norm before attention.
    pub(crate) names_of_two_norms: Option<&'static NameTable>,
    /// Q and K are stored in interleaved rotary order.
    pub(crate) interleaved: bool,
    /// The activation, if the file does not name one.
    pub(crate) act: Activation,
    /// The activation is ReLU in every file.
    pub(crate) relu: bool,
    /// Key of the epsilon, after the architecture.
    pub(crate) eps: &'static str,
    /// The epsilon of files without the key.
    pub(crate) usual_eps: Option<f32>,
    /// Layers with the file's sliding window.
    pub(crate) windows: Windows,
    /// Layers without rotary positions.
    pub(crate) unrotated: Option<EveryNth>,
    /// A part of each head may be rotated, though the family's class rotates all of it (Bamba).
    pub(crate) part_rotated: bool,
    /// `rope.scaling.finetuned` decides whether there are rotary positions.
    pub(crate) rotated_by_key: bool,
    /// The ends of YaRN's ramp are rounded outwards.
    pub(crate) yarn_truncate: bool,
    /// Scores are scaled by the width of a head; by `d_model / heads` in the model with this many
    /// layers.
    pub(crate) widest: Option<u32>,
    /// The family for files with a sliding window, if it is another one.
    pub(crate) windowed: Option<&'static Family>,
    /// The family for files whose experts are not chosen by sigmoids.
    pub(crate) without_sigmoids: Option<&'static Family>,
    /// Further keys that are read for it, after the architecture.
    pub(crate) reads: &'static [&'static str],
}

/// The value of a missing key.
#[derive(Clone, Copy)]
pub(crate) enum Preset {
    Int(u32),
    Float(f64),
    Text(&'static str),
}

/// RMSNorms of queries and keys.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum QkNorm {
    No,
    /// Over each head.
    Head,
    /// Over each head, after the rotation.
    HeadRotated,
    /// Over each head, if a key is set.
    HeadBy(&'static str),
    /// Over each head, without weights and after the rotation, in layers that rotate, unless a key
    /// disables them.
    PlainUnless(&'static str),
    /// LayerNorms without biases over each head, with weights of its own, if a key is set.
    LayersBy(&'static str),
    /// Over all heads together.
    Whole,
}

/// Projections of attention with biases.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bias {
    No,
    /// Q, K and V.
    Qkv,
    /// Q, K and V, if a key is set; the default without it.
    QkvBy(&'static str, bool),
    /// All of them.
    All,
    /// All of them, if a key is set; the default without it.
    AllBy(&'static str, bool),
}

/// `attention_bias` puts a bias on Q, K, V and O.
const OPTIONAL_BIAS: Bias = Bias::AllBy("attention_bias", false);

/// A key of `config.json` that must have a certain value or be absent.
#[derive(Clone, Copy)]
pub(crate) enum Check {
    Flag(&'static str, bool),
    Zero(&'static str),
    One(&'static str),
    Word(&'static str, &'static str),
    /// One of these, which are equivalent for the family.
    Words(&'static str, &'static [&'static str]),
    /// `hidden_size`.
    Width(&'static str),
    Number(&'static str, f32),
    /// At most this.
    AtMost(&'static str, f32),
    /// Any but null, which differs from an absent key.
    NotNull(&'static str),
}

/// Properties that no other field describes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quirk {
    /// Attention and FFN read the same input, after a shared norm or one each; the number of
    /// key/value heads follows from other keys (Falcon).
    Falcon,
    /// As many key/value heads as query heads (OPT).
    OneKvHeadEach,
    /// Several residual streams, per-layer inputs, shared keys and values, gates by Gaussian top-k
    /// (Gemma 3n).
    Streams,
    /// Other heads in layers without a window, shared keys and values, per-layer inputs, a factor at
    /// each layer's end (Gemma 4).
    GlobalHeads,
    /// Unless `sliding_window` is null, layers without a window have no rotary positions (Exaone 4).
    FullUnrotated,
    /// The tied head has this key in addition (LFM2).
    Tied(&'static str),
    /// Layers with attention norm outputs instead of inputs; a rotary base of null means no rotary positions (OLMo
    /// Hybrid).
    LateNorms,
    /// Layers without pools have another rotary embedding, weights of residual streams are normed by Sinkhorn
    /// iterations, and SiLU is clamped (DeepSeek-V4).
    DeepSeek4,
    /// No layer has rotary positions (Kimi Linear, Jamba).
    Unrotated,
    /// Attention sees only the positions that an indexer chooses; these keys give their number in
    /// `config.json` and, after the architecture, in GGUF. Texts up to this length see all positions;
    /// only those are supported (DeepSeek-V3.2).
    Indexed(&'static str, &'static str),
    /// Several residual streams with gates, sigmoid output gates of a DeltaNet unless a file says
    /// otherwise, and n-gram rows (Qwen3.8-Flash-Next).
    Hyper,
    /// `alpha` of the type `dynamic` scales the base of the rotary frequencies (Hunyuan).
    NtkAlpha,
    /// Keys give factors of matrices (Falcon-H1).
    Gains,
    /// Each layer is only a mixer, attention or Mamba-2, or only an FFN, without rotary positions (Nemotron-H).
    Sublayers,
    /// Queries and keys are rotated only if `position_embedding_type` is `rope` (Granite 4).
    RotatedByName,
    /// Queries are scaled by position, as given by the rotary parameters (Ministral 3).
    QueryScale,
    /// Queries without rotary positions are scaled by position (Llama 4).
    Temperature,
    /// The FFN's size is computed from that of the key (LFM2).
    AdjustedFfn,
    /// transformers' padding token may be outside the vocabulary.
    NoPadding,
    /// The original context is a key next to the scaling.
    OriginalContextBeside,
    /// Biases for choosing experts are stored as a matrix of one row (Ernie 4.5).
    ChoiceRow,
    /// The parallel order only if a key is set (this default). In GGUF, one with two norms is a key too, one
    /// with one norm follows from the tensors (GPT-NeoX, StableLM).
    ParallelIf(&'static str, bool),
    /// Layers with a window have the same rotary base, without scaling (Olmo 3).
    OneBase,
    /// `gelu` means its approximation by tanh (Gemma).
    TanhGelu,
    /// xIELU with parameters by layer (Apertus).
    Xielu,
    /// Matrices are stored transposed in folders (GPT-2).
    Conv1d,
    /// Tensor names may lack this prefix in folders (GPT-2).
    Prefix(&'static str),
    /// Folders have the keys under their alternative names.
    OtherNames,
    /// Attention's output has gates (AFMoE).
    OutputGate,
    /// Embeddings are multiplied by `sqrt(d_model)` only if a key is set (AFMoE).
    WidthScaleBy(&'static str),
    /// Keys that are refused in a folder of this family.
    Lacks(&'static [&'static str]),
}

/// The plain decoder: Llama without options.
pub(crate) const PLAIN: Family = Family {
    name: "",
    whole: None,
    class: None,
    defaults: &[],
    aliases: &[],
    names: &hf_names::PLAIN,
    names_of_two_norms: None,
    names_to_write: None,
    gguf: None,
    gguf_as: None,
    layer_norm: false,
    norm_bias: true,
    parallel: Parallel::No,
    pre_norm: true,
    post_norm: false,
    plus_one: false,
    qk_norm: QkNorm::No,
    value_norm: false,
    bias: Bias::No,
    ffn_bias: false,
    sinks: false,
    ungated: false,
    relu_on_up: false,
    clamped: false,
    learned_positions: None,
    width_scale: false,
    attention_scale: None,
    eps: Some("rms_norm_eps"),
    act: "hidden_act",
    act_default: None,
    one_act: false,
    ffn: "intermediate_size",
    ffn_default: None,
    ffn_list: false,
    kv_heads: "num_key_value_heads",
    kv_heads_default: false,
    head_dim_default: true,
    tied: false,
    windows: Windows::Never,
    unrotated: None,
    theta: 10_000.0,
    rotated: None,
    rotated_dims: None,
    interleaved: false,
    further_tokens: FurtherTokens::Absent,
    two_ropes: false,
    named_factors: false,
    always_scaled: false,
    experts: None,
    mixers: &[],
    keys: &[],
    checks: &[],
    reads: &[],
    quirks: &[],
};

/// The plain decoder in GGUF.
const PLAIN_ARCH: Arch = Arch {
    name: "",
    names: &gguf_names::PLAIN,
    names_of_two_norms: None,
    interleaved: false,
    act: Activation::Silu,
    relu: false,
    eps: "attention.layer_norm_rms_epsilon",
    usual_eps: None,
    windows: Windows::Never,
    unrotated: None,
    part_rotated: false,
    rotated_by_key: false,
    yarn_truncate: true,
    widest: None,
    windowed: None,
    without_sigmoids: None,
    reads: &[],
};

/// All families.
pub(crate) fn all() -> impl Iterator<Item = &'static Family> {
    GROUPS.iter().copied().flatten()
}

/// The family that `model_type` names.
pub(crate) fn find(name: &str) -> Option<&'static Family> {
    all().find(|family| family.name == name)
}

/// The family of a configuration; the plain one for an unknown name.
pub(crate) fn of(name: &str) -> &'static Family {
    const NONE: &Family = &PLAIN;
    find(name).unwrap_or(NONE)
}

/// The family of an architecture in GGUF, and its GGUF description.
pub(crate) fn find_arch(name: &str) -> Option<(&'static Family, &'static Arch)> {
    all()
        .filter_map(|family| Some((family, family.gguf.as_ref()?)))
        .find(|(_, arch)| arch.name == name)
}

impl Arch {
    /// The plain decoder under this name.
    const fn named(name: &'static str) -> Self {
        Self { name, ..PLAIN_ARCH }
    }

    /// Its keys in a file.
    pub(crate) fn keys<'a>(&self, metadata: &'a Metadata) -> ArchKeys<'a> {
        ArchKeys {
            metadata,
            arch: self.name,
        }
    }
}

impl Family {
    /// The number of heads of keys and values if a mixer fixes it, for so many query heads.
    pub(crate) fn fixed_kv_heads(&self, heads: u32) -> Option<u32> {
        let fixed = self.mixers.iter().find_map(|of| of.facts().kv_heads);
        Some(fixed?(heads))
    }

    /// Keys of the width of a head, if they are a mixer's.
    pub(crate) fn head_dim(&self) -> Option<HeadKeys> {
        self.mixers.iter().find_map(|of| of.facts().head_dim)
    }

    /// The architecture that llama.cpp uses for it.
    pub(crate) fn written_arch(&self) -> Option<&'static Arch> {
        let own = || self.gguf.as_ref().map(|arch| arch.name);
        Some(find_arch(self.gguf_as.or_else(own)?)?.1)
    }

    /// The families with experts stored under its architecture, if it has no experts itself.
    pub(crate) fn with_experts(&self) -> impl Iterator<Item = &'static Family> {
        let arch = self.gguf.as_ref().map(|arch| arch.name);
        all().filter(move |other| {
            other.gguf_as.is_some() && other.gguf_as == arch && other.experts.is_some()
        })
    }

    /// Keys of the number of positions that an indexer chooses.
    pub(crate) fn indexed(&self) -> Option<[&'static str; 2]> {
        self.quirks.iter().find_map(|quirk| match *quirk {
            Quirk::Indexed(hf, gguf) => Some([hf, gguf]),
            _ => None,
        })
    }

    /// Whether queries and keys are rotated at all.
    pub(crate) fn rotates(&self) -> bool {
        self.learned_positions.is_none() && !self.has(Quirk::Sublayers)
    }

    pub(crate) fn has(&self, quirk: Quirk) -> bool {
        self.quirks.contains(&quirk)
    }

    /// Whether a key of `config.json` is read for it that other families refuse.
    pub(crate) fn reads(&self, key: &str) -> bool {
        let of_experts = self.experts.is_some_and(|experts| experts.reads(key));
        let of_form = self.keys.iter().any(|known| known.hf.name == key);
        let other_name = self.aliases.iter().any(|(_, other)| *other == key);
        self.reads.contains(&key) || of_experts || of_form || other_name
    }

    /// Whether Q, K and V have biases in every GGUF file.
    pub(crate) fn always_has_qkv_bias(&self) -> bool {
        matches!(self.bias, Bias::All | Bias::Qkv | Bias::QkvBy(_, true))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_lead_somewhere() {
        let (mut names, mut archs) = (BTreeSet::new(), BTreeSet::new());
        for family in all() {
            assert!(names.insert(family.name), "{}", family.name);
            if let Some(arch) = &family.gguf {
                assert!(archs.insert(arch.name), "{}", arch.name);
            }
            if let Some(other) = family.gguf_as {
                assert!(find_arch(other).is_some(), "{other}");
            }
        }
    }
}
