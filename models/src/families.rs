//! The families of models: what each one computes differently from the plain decoder, and what its
//! keys and tensors are called.
//!
//! A family is one `const` in a file of `families/`. Readers and writers of both formats walk it;
//! nothing else knows a family by its name.

mod cohere;
mod deepseek;
mod deepseek4;
mod experts;
mod gemma;
mod gemma_names;
mod gguf_names;
mod granite;
mod hf_names;
mod hunyuan;
mod keys;
mod kimi;
mod layer_norm;
mod lfm2;
mod llama;
mod llama4;
mod mixtures;
mod nemotron;
mod qwen;
mod qwen_names;
mod routed;

pub(crate) use self::experts::{Dense, Experts, Renormalise, ScoringBy, Shared};
pub(crate) use self::gguf_names::{DOWN_T, DOWN_T_BIAS, POSITIONS};
pub(crate) use self::keys::{Absent, By, Key};

use crate::config::{Activation, Parallel};
use crate::names::NameTable;

/// All families, group by group.
const GROUPS: [&[Family]; 15] = [
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
];

/// Other names of keys: the usual one, then that.
pub(crate) type Aliases = &'static [(&'static str, &'static str)];

/// A family. [`PLAIN`] is the decoder that the others depart from.
pub(crate) struct Family {
    /// `model_type` in `config.json`, and the family's name in containers.
    pub(crate) name: &'static str,
    /// `model_type` of models of several kinds of input that have this one as their text model.
    pub(crate) whole: Option<&'static str>,
    /// The class of transformers that runs it; without one it has no folder form.
    pub(crate) class: Option<&'static str>,
    /// Values of keys that releases leave out.
    pub(crate) defaults: &'static [(&'static str, Preset)],
    /// Names that its releases have for common keys.
    pub(crate) aliases: Aliases,
    /// Names of its tensors in safetensors.
    pub(crate) names: &'static NameTable,
    /// The same of a file with two norms before attention and FFN, to write them.
    pub(crate) names_of_two_norms: Option<&'static NameTable>,
    /// Those under which tensors are written, where transformers does not read the first ones.
    pub(crate) names_to_write: Option<&'static NameTable>,
    /// Its architecture in GGUF.
    pub(crate) gguf: Option<Arch>,
    /// The architecture under which it is written as GGUF, where that is another family's.
    pub(crate) gguf_as: Option<&'static str>,

    /// The norms before attention, FFN and head are LayerNorms.
    pub(crate) layer_norm: bool,
    /// LayerNorms have biases.
    pub(crate) norm_bias: bool,
    /// How attention and FFN follow each other, whatever the keys say.
    pub(crate) parallel: Parallel,
    /// There are norms before attention and FFN.
    pub(crate) pre_norm: bool,
    /// There are norms after attention and FFN.
    pub(crate) post_norm: bool,
    /// Weights of its norms are stored less one, in safetensors.
    pub(crate) plus_one: bool,
    pub(crate) qk_norm: QkNorm,
    /// Values are normed.
    pub(crate) value_norm: bool,
    /// Biases of attention.
    pub(crate) bias: Bias,
    /// The FFN always has biases.
    pub(crate) ffn_bias: bool,
    /// Query heads have a logit more.
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
    /// Factor of the scores, whatever the keys say.
    pub(crate) attention_scale: Option<f32>,

    /// Key of the epsilon of its norms; `None` for that of PyTorch's LayerNorm.
    pub(crate) eps: Option<&'static str>,
    /// Key of the activation.
    pub(crate) act: &'static str,
    /// The activation without the key.
    pub(crate) act_default: Option<&'static str>,
    /// It has no other activation than this.
    pub(crate) one_act: bool,
    /// Key of the number of the FFN's neurons.
    pub(crate) ffn: &'static str,
    /// Their number by `d_model`, without the key.
    pub(crate) ffn_default: Option<u32>,
    /// The key may be a list of equal numbers.
    pub(crate) ffn_list: bool,
    /// Key of the number of heads of keys and values.
    pub(crate) kv_heads: &'static str,
    /// Without the key it is that of the query heads.
    pub(crate) kv_heads_default: bool,
    /// `head_dim` may be absent and then is `hidden_size / num_attention_heads`.
    pub(crate) head_dim_default: bool,
    /// The head is the embedding without `tie_word_embeddings`.
    pub(crate) tied: bool,
    pub(crate) windows: Windows,
    /// Layers without rotary positions.
    pub(crate) unrotated: Option<Unrotated>,
    /// Base of the rotary frequencies without a key.
    pub(crate) theta: f32,
    /// Share of a head that is rotated without a key; `None` if it is always the whole.
    pub(crate) rotated: Option<f32>,
    /// Key of the rotated dimensions of a head, in releases that do not name their share.
    pub(crate) rotated_dims: Option<&'static str>,
    /// Q and K are stored in interleaved rotary order, in safetensors.
    pub(crate) interleaved: bool,
    /// Weights for multi-token prediction, which are skipped.
    pub(crate) further_tokens: FurtherTokens,
    /// Layers with a window have a rotary embedding of their own.
    pub(crate) two_ropes: bool,
    /// LongRoPE's factors of queries and keys have keys of their own.
    pub(crate) named_factors: bool,
    /// Rotary positions are scaled, and the keys say how.
    pub(crate) always_scaled: bool,
    pub(crate) experts: Option<Experts>,
    /// Keys that set parts of the form.
    pub(crate) keys: &'static [Key],
    /// Keys that may have one value only.
    pub(crate) checks: &'static [Check],
    /// Further keys that are read for it, and that other families have to refuse.
    pub(crate) reads: &'static [&'static str],
    pub(crate) quirks: &'static [Quirk],
}

/// A family as GGUF has it. Formulas as in llama.cpp's `src/models/`.
pub(crate) struct Arch {
    /// `general.architecture`.
    pub(crate) name: &'static str,
    /// Names of its tensors.
    pub(crate) names: &'static NameTable,
    /// The same of a file with a second norm before attention.
    pub(crate) names_of_two_norms: Option<&'static NameTable>,
    /// Q and K are stored in interleaved rotary order.
    pub(crate) interleaved: bool,
    /// The activation, where the file does not name one.
    pub(crate) act: Activation,
    /// It is ReLU in every file.
    pub(crate) relu: bool,
    /// Key of the epsilon, after the architecture.
    pub(crate) eps: &'static str,
    /// The epsilon of files that have no such key.
    pub(crate) usual_eps: Option<f32>,
    /// Layers that a file's sliding window applies to.
    pub(crate) windows: Windows,
    /// Layers without rotary positions.
    pub(crate) unrotated: Option<EveryNth>,
    /// `rope.scaling.finetuned` says whether there are rotary positions.
    pub(crate) rotated_by_key: bool,
    /// The ends of YaRN's ramp are rounded outwards.
    pub(crate) yarn_truncate: bool,
    /// Scores are scaled by the width of a head; by `d_model / heads` in the model of so many layers.
    pub(crate) widest: Option<u32>,
    /// The family of files whose experts are not chosen by sigmoids.
    pub(crate) without_sigmoids: Option<&'static Family>,
    /// Further keys that are read for it, after the architecture.
    pub(crate) reads: &'static [&'static str],
}

/// Where a family's releases have the weights for multi-token prediction.
#[derive(Clone, Copy)]
pub(crate) enum FurtherTokens {
    /// There are none.
    Absent,
    /// Layers after the last one of the decoder.
    PastLast,
    /// Tensors with one of these in their names.
    Named(&'static [&'static str]),
    /// Layers after the last one of the decoder; beside them, tensors with this in their names are
    /// skipped.
    PastLastOr(&'static str),
}

impl FurtherTokens {
    /// Whether a tensor is one of them: `layer` is the one in its name, of a decoder of `layers`.
    pub(crate) fn have(self, name: &str, layer: Option<u32>, layers: u32) -> bool {
        match self {
            Self::Absent => false,
            Self::PastLast => layer.is_some_and(|layer| layer >= layers),
            Self::Named(parts) => parts.iter().any(|part| name.contains(part)),
            Self::PastLastOr(part) => {
                name.contains(part) || layer.is_some_and(|layer| layer >= layers)
            }
        }
    }
}

/// The value of a key that is left out.
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
    /// Each head by itself.
    Head,
    /// Each head by itself, after its rotation.
    HeadRotated,
    /// Each head by itself, if a key says so.
    HeadBy(&'static str),
    /// Each head by itself, without weights and after its rotation, in layers that rotate it, unless a
    /// key says that there are none.
    PlainUnless(&'static str),
    /// All heads together.
    Whole,
}

/// Which projections of attention carry biases.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bias {
    No,
    /// Q, K and V.
    Qkv,
    /// Q, K and V, if a key says so; this without it.
    QkvBy(&'static str, bool),
    /// All of them, in the same way.
    AllBy(&'static str, bool),
}

/// `attention_bias` puts a bias on Q, K, V and O.
const OPTIONAL_BIAS: Bias = Bias::AllBy("attention_bias", false);

/// Layers that a sliding window applies to, if `layer_types` does not say.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Windows {
    /// None, whatever `layer_types` says.
    None,
    /// None; the family does not use the key. In GGUF: unknown.
    Never,
    /// All.
    Every,
    /// Those from `max_window_layers` on, if `use_sliding_window` is set.
    ByLayer,
    /// None; releases disagree on what `use_sliding_window` means.
    Disputed,
    /// Those of `sliding_window_layout`, of `sliding_window_size`.
    Layout,
    /// Those without rotary positions, if `use_sliding_window` is set.
    Unrotated,
    /// Every second one from the first on.
    Alternate,
    /// All but every fourth from the first on.
    AllButFourth,
    /// All but every `sliding_window_pattern`-th, of which this is the default.
    Pattern(u32),
    /// The same; the second number is the window without a key. Null is none.
    PatternOf(u32, u32),
    /// Chunks of `attention_chunk_size`, or of so many positions without the key, in the layers with
    /// rotary positions.
    Chunks(u32),
    /// Those from `max_window_layers` on, or from this one; the second number is the window without a
    /// key. Null is none.
    Late(u32, u32),
}

impl Windows {
    /// Whether llama.cpp finds a window's layers by the architecture.
    pub(crate) fn have_a_key(self) -> bool {
        matches!(
            self,
            Self::AllButFourth | Self::Alternate | Self::Pattern(_)
        )
    }
}

/// Layers without rotary positions in `config.json`.
#[derive(Clone, Copy)]
pub(crate) struct Unrotated {
    /// Key of a list with 0 for each of them.
    pub(crate) list: &'static str,
    /// Without the list: key of the interval in which they are, and its default.
    pub(crate) interval: Option<(&'static str, u32)>,
}

/// One layer of every four.
#[derive(Clone, Copy)]
pub(crate) struct EveryNth {
    /// The first of them.
    pub(crate) first: usize,
    /// Only in files with a sliding window.
    pub(crate) windowed: bool,
}

impl EveryNth {
    /// The layers.
    pub(crate) fn of(self, layers: u32) -> Vec<u32> {
        (0..layers).skip(self.first).step_by(4).collect()
    }
}

/// A key of `config.json` that may have one value only, or be absent.
#[derive(Clone, Copy)]
pub(crate) enum Check {
    Flag(&'static str, bool),
    Zero(&'static str),
    One(&'static str),
    Word(&'static str, &'static str),
    /// One of these, all of which mean what the family computes.
    Words(&'static str, &'static [&'static str]),
    /// `hidden_size`.
    Width(&'static str),
    /// At most this.
    AtMost(&'static str, f32),
    /// Any but null, which stands for another value than an absent key.
    NotNull(&'static str),
}

/// How llama.cpp's converter orders the value heads of a DeltaNet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueHeads {
    /// As transformers: those of a key head are consecutive.
    Grouped,
    /// Those of a key head are as many apart as there are key heads.
    Tiled,
}

/// What no other field can say.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quirk {
    /// Attention and FFN read the same input, after one norm or one each; the number of heads of keys
    /// and values follows from other keys (Falcon).
    Falcon,
    /// As many heads of keys and values as of queries (OPT).
    OneKvHeadEach,
    /// Several residual streams, an input for each layer, shared keys and values, gates by Gaussian
    /// top-k (Gemma 3n).
    Streams,
    /// Other heads without a window, shared keys and values, an input for each layer, a factor at each
    /// layer's end (Gemma 4).
    GlobalHeads,
    /// Unless `sliding_window` is null, layers without a window have no rotary positions (Exaone 4).
    FullUnrotated,
    /// Some layers have a short convolution in place of attention; the head's tie has a second key
    /// (LFM2).
    ShortConv,
    /// Some layers have a gated DeltaNet in place of attention, whose output has gates (Qwen3-Next).
    DeltaNet(ValueHeads),
    /// Every layer with attention has latent attention (DeepSeek-V2).
    Latent,
    /// Every layer has attention over a window and over pools, and SiLU is clamped (DeepSeek-V4).
    Pooled,
    /// Some layers have Kimi Delta Attention in place of attention, and none has rotary positions (Kimi
    /// Linear).
    Kda,
    /// Beside [`Quirk::Kda`]: its projections take one step and its decays have a bound; the other layers
    /// have rotary positions, and a gate for each head (Ling 3).
    Bounded,
    /// Attention sees the positions that an indexer chooses, so many as these keys say in `config.json`
    /// and, after the architecture, in GGUF: all of them in texts that are not longer, which are the
    /// ones that are run (DeepSeek-V3.2).
    Indexed(&'static str, &'static str),
    /// Several residual streams with gates, sigmoids as gates of a DeltaNet's output where a file does not
    /// say, and rows for the last tokens (Qwen3.8-Flash-Next).
    Hyper,
    /// `alpha` of the type `dynamic` stretches the base of the rotary frequencies (Hunyuan).
    NtkAlpha,
    /// Some layers have Mamba-2 in place of attention (Granite 4 H).
    Mamba,
    /// Each layer is a mixer alone or an FFN alone, without rotary positions (Nemotron-H).
    Sublayers,
    /// Queries and keys are rotated only if `position_embedding_type` says `rope` (Granite 4).
    RotatedByName,
    /// Queries grow with their position, as the rotary parameters say (Ministral 3).
    QueryScale,
    /// Queries without rotary positions grow with their position (Llama 4).
    Temperature,
    /// The FFN's size is computed from the key's (LFM2).
    AdjustedFfn,
    /// transformers' own padding token may lie past the vocabulary.
    NoPadding,
    /// The context before scaling is named beside the scaling.
    OriginalContextBeside,
    /// Biases of the choice of experts are stored as a matrix of one row (Ernie 4.5).
    ChoiceRow,
    /// Keys that a folder of this family must not have.
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
    rotated_by_key: false,
    yarn_truncate: true,
    widest: None,
    without_sigmoids: None,
    reads: &[],
};

/// All families.
pub(crate) fn all() -> impl Iterator<Item = &'static Family> {
    GROUPS.into_iter().flatten()
}

/// The family that `model_type` names.
pub(crate) fn find(name: &str) -> Option<&'static Family> {
    all().find(|family| family.name == name)
}

/// The family of a configuration; the plain one for a name that no reader gives.
pub(crate) fn of(name: &str) -> &'static Family {
    const NONE: &Family = &PLAIN;
    find(name).unwrap_or(NONE)
}

/// The family of an architecture in GGUF, and its own description of it.
pub(crate) fn find_arch(name: &str) -> Option<(&'static Family, &'static Arch)> {
    all()
        .filter_map(|family| Some((family, family.gguf.as_ref()?)))
        .find(|(_, arch)| arch.name == name)
}

impl Family {
    /// The architecture that llama.cpp uses for it.
    pub(crate) fn written_arch(&self) -> Option<&'static Arch> {
        let own = || self.gguf.as_ref().map(|arch| arch.name);
        Some(find_arch(self.gguf_as.or_else(own)?)?.1)
    }

    /// The families with experts that are stored under its architecture, which has none itself.
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

    /// Whether some of its layers are gated DeltaNets.
    pub(crate) fn has_delta_nets(&self) -> bool {
        (self.quirks.iter()).any(|quirk| matches!(quirk, Quirk::DeltaNet(_)))
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
        matches!(self.bias, Bias::Qkv | Bias::QkvBy(_, true))
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
