//! The normalised model configuration: the only description of a decoder that the rest of the
//! program sees.
//!
//! The readers translate a checkpoint's own keys into [`ModelConfig`]; the packer stores it as JSON
//! in the container; the engine builds its geometry from it. There are no per-family branches after
//! this point: a family is only a set of field values.

mod form;
mod heads;
mod hyper;
mod mixers;
mod mixture;
mod mtp;
mod ngrams;
mod norms;
mod reach;
mod rope;
mod streams;
mod sublayers;
mod xielu;

pub(crate) use form::MixerField;
pub use form::{Form, Parallel, QueryScale};
pub use heads::{GlobalHeads, HeadShape};
pub use hyper::{HyperConnections, MAX_STREAMS, Mixing};
pub use mixture::{ExpertGroups, Mixture, Scoring};
pub use ngrams::NGrams;
pub use norms::LayerNorms;
pub use reach::Reach;
pub(crate) use rope::yarn_attention;
pub use rope::{Rope, RopeScaling};
pub use streams::{LayerInputs, Streams};
pub(crate) use xielu::XieluParameters;

pub use crate::mixers::*;

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Error;
pub(crate) use crate::limits::MAX_COUNT;
use crate::limits::{BadField, MAX_HEAD_DIM, MAX_WIDTH};

/// Gate non-linearity of one FFN.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// FATReLU: `x` where `x > threshold`, else 0 (ProSparse, arXiv 2402.13516).
    FatRelu {
        /// Values at or below this are zero.
        threshold: f32,
    },
    /// `max(x, 0)²`.
    Relu2,
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU with the error function.
    Gelu,
    /// GELU with the tanh approximation.
    GeluTanh,
    /// gpt-oss: `g · sigmoid(alpha · g)` with `g = min(x, limit)`. Up comes as `u + 1` with `u`
    /// clamped to ±`limit`.
    ClampedSwiglu {
        /// Largest gate, and largest magnitude of Up.
        limit: f32,
        /// Steepness of the sigmoid.
        alpha: f32,
    },
    /// `g · sigmoid(g)` with `g = min(x, limit)`, and Up clamped to ±`limit` (DeepSeek-V4).
    ClampedSilu {
        /// Largest gate, and largest magnitude of Up.
        limit: f32,
    },
    /// xIELU: `positive · x² + beta · x` above 0, `negative · (e^min(x, eps) − 1 − x) + beta · x` elsewhere
    /// (Apertus).
    Xielu {
        /// Factor of the square.
        positive: f32,
        /// Factor of the exponential part.
        negative: f32,
        /// Factor of the linear part.
        beta: f32,
        /// Largest exponent.
        eps: f32,
    },
}

impl Activation {
    /// xIELU before training.
    pub(crate) const XIELU: Self = Self::Xielu {
        positive: 0.8,
        negative: 0.8,
        beta: 0.5,
        eps: -1e-6,
    };

    /// True if a neuron that does not fire contributes exactly zero, so that the `exact` mode
    /// equals the dense computation.
    pub fn is_sparse(self) -> bool {
        matches!(self, Self::Relu | Self::FatRelu { .. } | Self::Relu2)
    }
}

/// The limit and the steepness of every published gpt-oss.
pub(crate) const SWIGLU_LIMIT: f32 = 7.0;
/// See [`SWIGLU_LIMIT`].
pub(crate) const SWIGLU_ALPHA: f32 = 1.702;

/// How the FFN of one layer (or expert) combines its three matrices:
/// `down · (act(gate·x) ∘ up'(up·x))`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FfnKind {
    /// Non-linearity on the gate.
    pub activation: Activation,
    /// dReLU (Bamboo, TurboSparse): the up projection passes through `max(·, 0)` too.
    pub relu_on_up: bool,
    /// Two matrices: `down · act(gate·x)`. The projection with the activation is called Gate even
    /// if a checkpoint calls it `up` or `fc1`, because it decides which neurons fire.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ungated: bool,
}

/// One FFN's neurons: those of an expert, or of a dense layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bank {
    /// Layer, from 0.
    pub layer: u32,
    /// Index of the layer among those with an FFN, from 0.
    pub place: u32,
    /// Expert, from 0; the number of experts for the shared one, 0 for a dense FFN.
    pub expert: u32,
    /// Number of neurons.
    pub neurons: u32,
}

/// The full description of a decoder for the engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Family as named by the checkpoint (`llama`, `qwen3`, `mixtral`, …).
    pub family: String,
    /// Human name, from the checkpoint or its folder.
    pub name: String,
    /// Rows of the embedding and of the head.
    pub vocab: u32,
    /// Width of the residual stream.
    pub d_model: u32,
    /// Decoder layers.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// Key/value heads (divides `heads`).
    pub kv_heads: u32,
    /// Dimensions per head.
    pub head_dim: u32,
    /// Neurons per FFN (per expert).
    pub ffn: u32,
    /// Experts per layer, without a shared one; 1 for a dense FFN.
    pub experts: u32,
    /// The FFN's formula.
    pub ffn_kind: FfnKind,
    /// Epsilon of every RMSNorm.
    pub rms_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Positions of a sliding window, or of a chunk: see [`ModelConfig::reach`]. One entry per layer;
    /// 0 = full attention.
    pub window: Vec<u32>,
    /// Q, K and V projections carry a bias.
    pub qkv_bias: bool,
    /// The output projection carries a bias.
    pub o_bias: bool,
    /// RMSNorm over each head of Q and K (Qwen3).
    pub qk_norm: bool,
    /// The head shares the embedding matrix.
    pub tied_head: bool,
    /// Context length the model was trained for, in tokens.
    pub max_context: u32,
    /// Token prepended to a text, if any.
    pub bos: Option<u32>,
    /// Whether the tokenizer prepends `bos` by default.
    pub add_bos: bool,
    /// Tokens that end a generation. The first is the tokenizer's own end-of-text token, if it
    /// names one.
    pub eos: Vec<u32>,
    /// Score below which an imported predictor skips a neuron (PowerInfer's `sparse_threshold`);
    /// `None` without one.
    #[serde(default)]
    pub predictor_threshold: Option<f32>,
    /// The mixture of experts; `None` if every layer has a dense FFN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mixture: Option<Mixture>,
    /// The norms of `qk_norm` are over all heads together (OLMoE).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub qk_norm_whole: bool,
    /// Largest magnitude of queries, keys and values: others are clamped to it, after the norms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_qkv: Option<f32>,
    /// Properties that differ from the common form.
    #[serde(default, skip_serializing_if = "Form::is_plain")]
    pub form: Form,
}

/// Maximum vocabulary.
const MAX_VOCAB: u32 = 1 << 24;
/// Maximum banks of a model.
const MAX_BANKS: u64 = 1 << 16;

impl ModelConfig {
    /// The mixture, if layer `layer` has one.
    pub fn mixture_of(&self, layer: u32) -> Option<&Mixture> {
        self.mixture
            .as_ref()
            .filter(|mixture| mixture.dense_layers.binary_search(&layer).is_err())
            .filter(|_| self.has_ffn(layer))
    }

    /// The banks of layer `layer`, in the order in which a container stores them.
    pub fn banks_of(&self, layer: u32) -> impl Iterator<Item = Bank> + Clone + use<> {
        let (experts, neurons, shared) = match (&self.mixture, self.mixture_of(layer)) {
            _ if !self.has_ffn(layer) => (0, 0, 0),
            (_, Some(mixture)) => (self.experts, self.ffn, mixture.shared_bank()),
            (Some(mixture), None) => (1, mixture.dense_ffn, 0),
            (None, None) => match self.form.shared_kv_ffn {
                wide if wide > 0 && layer >= self.first_shared() => (1, wide, 0),
                _ => (self.experts, self.ffn, 0),
            },
        };
        let place = self.ffn_place(layer) as u32;
        (0..experts)
            .map(move |expert| (expert, neurons))
            .chain((shared > 0).then_some((experts, shared)))
            .map(move |(expert, neurons)| Bank {
                layer,
                place,
                expert,
                neurons,
            })
    }

    /// Elements of a neuron's vectors: the input and output width of banks.
    pub fn bundle_width(&self) -> u32 {
        let width = self.mixture.as_ref().map_or(0, |mixture| mixture.width);
        match width {
            0 => self.d_model,
            width => width,
        }
    }

    /// All banks, layer by layer.
    pub fn banks(&self) -> impl Iterator<Item = Bank> + Clone {
        (0..self.layers).flat_map(|layer| self.banks_of(layer))
    }

    /// Whether layer `layer` rotates queries and keys.
    pub fn rotates(&self, layer: u32) -> bool {
        self.form.nope_layers.binary_search(&layer).is_err()
    }

    /// The rotary embedding of layer `layer`: [`Form::local_rope`] for layers with a window and without
    /// pools.
    pub fn rope_of(&self, layer: u32) -> &Rope {
        let pooled = self.form.pooled.as_ref();
        let locally = self.windowed(layer) && pooled.is_none_or(|of| of.of(layer).pool == 0);
        let local = self.form.local_rope.as_ref().filter(|_| locally);
        local.unwrap_or(&self.rope)
    }

    /// Whether neurons of layer `layer` that do not fire add exactly zero.
    pub fn is_sparse(&self, layer: u32) -> bool {
        let top = self.form.gate_top.get(layer as usize).copied();
        self.ffn_kind.activation.is_sparse() || top.unwrap_or(0.0) > 0.0
    }

    /// Whether neurons of any layer that do not fire add exactly zero.
    pub fn has_zeros(&self) -> bool {
        self.ffn_kind.activation.is_sparse() || self.form.has_gate_top()
    }

    /// Rows of the table of learned positions; 0 without one.
    pub fn position_rows(&self) -> u32 {
        let rows = |before: u32| self.max_context.saturating_add(before);
        self.form.learned_positions.map_or(0, rows)
    }

    /// Checks the range of every field and their consistency. A valid configuration converts to
    /// sizes without overflow in 64 bits. `path` names the file in errors.
    ///
    /// # Errors
    /// [`Error::BadKey`] with the name of the invalid field.
    pub fn validate(&self, path: &Path) -> Result<(), Error> {
        let Some(bad) = self.first_bad() else {
            return Ok(());
        };
        Err(Error::BadKey {
            path: path.to_owned(),
            key: bad.key.to_owned(),
            found: bad.found,
            expected: bad.expected,
        })
    }

    /// The first invalid field, in the order in which a reader checks them.
    fn first_bad(&self) -> Option<BadField> {
        (self.bad_size())
            .or_else(|| self.bad_mixture())
            .or_else(|| self.bad_rope())
            .or_else(|| self.bad_number())
            .or_else(|| self.bad_entry())
            .or_else(|| self.bad_form())
    }

    /// A size of zero or above its maximum, or heads that do not divide.
    fn bad_size(&self) -> Option<BadField> {
        let bounded = [
            ("vocab", self.vocab, MAX_VOCAB),
            ("d_model", self.d_model, MAX_WIDTH),
            ("layers", self.layers, MAX_COUNT),
            ("heads", self.heads, MAX_COUNT),
            ("kv_heads", self.kv_heads, MAX_COUNT),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("ffn", self.ffn, MAX_WIDTH),
            ("experts", self.experts, MAX_COUNT),
            ("max_context", self.max_context, u32::MAX),
        ];
        if let Some(bad) = BadField::outside(&bounded.map(|(key, n, most)| (key, n, 1, most))) {
            return Some(bad);
        }
        let global = self.form.global_heads;
        let global = global.map(|of| ("kv_heads without a window", of.kv_heads));
        for (key, heads) in [("kv_heads", self.kv_heads)].into_iter().chain(global) {
            if heads == 0 || !self.heads.is_multiple_of(heads) {
                let expected = format!("a divisor of heads = {}", self.heads);
                return BadField::some(key, &heads, expected);
            }
        }
        None
    }

    /// Whether a list names layers, in ascending order.
    fn are_layers(&self, list: &[u32]) -> bool {
        let ascending = list.windows(2).all(|pair| pair[0] < pair[1]);
        ascending && list.last().is_none_or(|&layer| layer < self.layers)
    }

    /// A rotary embedding with non-finite angles.
    fn bad_rope(&self) -> Option<BadField> {
        let global = self.form.global_heads.map(|of| of.head_dim);
        let widest = match self.form.local_rope {
            Some(_) => global.unwrap_or(self.head_dim),
            None => global.map_or(self.head_dim, |dim| dim.min(self.head_dim)),
        };
        let local = self.form.local_rope.as_ref();
        bad_angles(&self.rope, widest).or_else(|| bad_angles(local?, self.head_dim))
    }

    /// An epsilon or a threshold of the FFN out of range.
    fn bad_number(&self) -> Option<BadField> {
        if let Some(bad) = BadField::unless_share("rms_eps", self.rms_eps) {
            return Some(bad);
        }
        if let Activation::FatRelu { threshold } = self.ffn_kind.activation
            && !(threshold.is_finite() && threshold >= 0.0)
        {
            return BadField::some(
                "fatrelu threshold",
                &threshold,
                "a finite number, 0 or more",
            );
        }
        if let Activation::ClampedSwiglu { limit, alpha } = self.ffn_kind.activation
            && ![limit, alpha].iter().all(|x| x.is_finite() && *x > 0.0)
        {
            let found = [limit, alpha];
            return BadField::some("swiglu limit and alpha", &found, "finite, above 0");
        }
        if let Activation::ClampedSilu { limit } = self.ffn_kind.activation
            && !(limit.is_finite() && limit > 0.0)
        {
            return BadField::some("swiglu limit", &limit, "finite, above 0");
        }
        if let Some(bad) = self.bad_activations() {
            return Some(bad);
        }
        match self.clip_qkv {
            Some(clip) if !(clip.is_finite() && clip > 0.0) => {
                BadField::some("clip_qkv", &clip, "a finite number above 0")
            }
            _ => None,
        }
    }

    /// A number of windows other than the number of layers, tokens outside the vocabulary, or a
    /// predictor's threshold that is not a number.
    fn bad_entry(&self) -> Option<BadField> {
        if self.window.len() != self.layers as usize {
            let expected = format!("one for each of {} layers", self.layers);
            let found = format!("{} entries", self.window.len());
            return BadField::some("window", &found, expected);
        }
        if self.add_bos && self.bos.is_none() {
            return BadField::some("add_bos", &true, "a bos token to add");
        }
        let mut special = self.bos.iter().chain(&self.eos);
        if let Some(token) = special.find(|token| **token >= self.vocab) {
            let expected = format!("below the vocabulary's {}", self.vocab);
            return BadField::some("bos or eos token", token, expected);
        }
        match self.predictor_threshold {
            Some(value) if !value.is_finite() => {
                BadField::some("predictor_threshold", &value, "a finite number")
            }
            _ => None,
        }
    }

    /// An invalid or unimplemented form.
    fn bad_form(&self) -> Option<BadField> {
        let (form, kind) = (&self.form, self.ffn_kind);
        if let Some((key, scale)) = form.bad_scale() {
            return BadField::some(key, &scale, "a finite number above 0");
        }
        let nope = &form.nope_layers;
        if !self.are_layers(nope) {
            let expected = format!("layers below {}, ascending", self.layers);
            return BadField::some("layers without rotary positions", nope, expected);
        }
        if self.position_rows() > MAX_WIDTH {
            let expected = format!("at most {MAX_WIDTH} with learned positions");
            return BadField::some("max_context", &self.max_context, expected);
        }
        if form.parallel != Parallel::No && (!form.pre_norm || form.post_norm) {
            let expected = "no, as the norms are not those before attention and FFN alone";
            return BadField::some("parallel", &form.parallel, expected);
        }
        if let Some(mixture) = &self.mixture {
            let alike = mixture.shared == 0 && mixture.dense_layers.is_empty();
            if form.ffn_bias && !alike {
                let expected = "false, as not all of a layer's experts are alike";
                return BadField::some("ffn_bias", &true, expected);
            }
        }
        let bad = (self.bad_sublayers()).or_else(|| self.bad_sharing());
        let bad = bad.or_else(|| norms::bad(self));
        let bad = (bad.or_else(|| self.bad_streams())).or_else(|| form.hyper?.bad(self));
        let bad = (bad.or_else(|| self.bad_layer_inputs())).or_else(|| self.bad_global_heads());
        let bad = bad.or_else(|| self.bad_mixers());
        if let Some(bad) = bad.or_else(|| form.ngrams.as_ref()?.bad(self)) {
            return Some(bad);
        }
        if kind.ungated && kind.relu_on_up {
            return BadField::some("relu_on_up", &true, "an up projection to have it on");
        }
        None
    }
}

/// Non-finite angles for heads of this width.
fn bad_angles(rope: &Rope, head_dim: u32) -> Option<BadField> {
    if !rope.dims.is_multiple_of(2) || rope.dims > head_dim {
        let expected = format!("even, at most head_dim = {head_dim}");
        return BadField::some("rope.dims", &rope.dims, expected);
    }
    if !(rope.theta.is_finite() && rope.theta > 1.0) {
        return BadField::some("rope.theta", &rope.theta, "a finite number above 1");
    }
    if !rope.scaling.is_sound(rope.dims / 2) {
        let expected = "positive finite factors, those of low frequencies at most those of high \
                        ones, one of longrope's for each pair of rotated dimensions";
        return BadField::some("rope.scaling", &rope.scaling, expected);
    }
    None
}
