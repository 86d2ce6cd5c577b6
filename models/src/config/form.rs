//! Properties in which a few families differ from the plain decoder.

use serde::{Deserialize, Serialize};

use super::{
    Activation, GlobalHeads, HyperConnections, LayerInputs, Mixing, NGrams, Rope, Streams,
};
use crate::mixers::{
    DeltaNets, KdaLayers, LatentShape, Mamba1Layers, MambaLayers, MixerLayers, PooledAttention,
    ShortConvs,
};

/// Order of attention and FFN in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Parallel {
    /// The FFN reads the residual stream after attention.
    #[default]
    No,
    /// Both read the layer's input after a shared norm (Falcon 7B).
    OneNorm,
    /// Both read the layer's input, each after its own norm (Falcon 40B).
    TwoNorms,
}

impl Parallel {
    /// Whether the FFN does not read attention's output.
    pub(super) fn is_parallel(self) -> bool {
        self != Self::No
    }
}

/// Deviations from the common form. The default is the common form: RMSNorm without biases before
/// attention and before the FFN, sequential, rotary positions in every layer, no scales.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Form {
    /// The norms before attention, FFN and head are LayerNorms.
    pub layer_norm: bool,
    /// These norms have biases.
    pub norm_bias: bool,
    /// There are norms before attention and before the FFN.
    pub pre_norm: bool,
    /// Outputs of attention and of the FFN are normed before they are added to the residual stream.
    pub post_norm: bool,
    /// Layers with attention norm the outputs of attention and FFN instead of their inputs (OLMo Hybrid).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub late_norms: bool,
    /// Order of attention and FFN.
    pub parallel: Parallel,
    /// A learned vector is added for each position; this many rows precede that of position 0 (OPT:
    /// 2).
    pub learned_positions: Option<u32>,
    /// Layers without rotary positions, ascending.
    pub nope_layers: Vec<u32>,
    /// The projections of the FFN, or of every expert, carry biases.
    pub ffn_bias: bool,
    /// The head has a bias.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub head_bias: bool,
    /// Attention sinks: each query head has one more logit in the softmax, whose share is dropped
    /// (gpt-oss).
    pub sinks: bool,
    /// Factor of the embedding.
    pub embedding_scale: f32,
    /// Factor of the outputs of attention and FFN before they are added to the residual stream.
    pub residual_scale: f32,
    /// Factor of the logits.
    pub logit_scale: f32,
    /// Factor of the attention scores instead of `1 / sqrt(head_dim)`.
    pub attention_scale: Option<f32>,
    /// Queries grow with their position (Ministral 3, Llama 4).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query_scale: Option<QueryScale>,
    /// Scores `s` become `cap · tanh(s / cap)`.
    pub attention_cap: Option<f32>,
    /// The same cap for logits, after their factor.
    pub logit_cap: Option<f32>,
    /// Rotary embedding of layers with a window and without pools, if it differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_rope: Option<Rope>,
    /// Values are divided by their root mean square, head by head.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub value_norm: bool,
    /// Number of last layers without keys and values of their own: each reads those of the last
    /// earlier layer of its kind (with or without a window).
    #[serde(skip_serializing_if = "is_zero")]
    pub shared_kv: u32,
    /// Gaussian top-k of each layer, or empty: of a token's gates `g`, those not above
    /// `mean(g) + quantile(share) * deviation(g)` become zero, and the others are reduced by it. 0
    /// for a layer without.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gate_top: Vec<f32>,
    /// The activation of each layer, if they differ, or empty (Apertus).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub activations: Vec<Activation>,
    /// Layers with a short convolution instead of attention (LFM2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub short_conv: Option<ShortConvs>,
    /// Layers with a gated DeltaNet instead of attention (Qwen3-Next, Qwen3.5).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta_net: Option<DeltaNets>,
    /// Layers with Kimi Delta Attention instead of attention (Kimi Linear, Ling 3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kda: Option<KdaLayers>,
    /// Every layer with attention has latent attention (DeepSeek-V2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latent: Option<LatentShape>,
    /// Every layer has attention over a window and over pools (DeepSeek-V4).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pooled: Option<PooledAttention>,
    /// Norms of query and key heads are applied after the rotation (Hunyuan).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub rotated_qk_norm: bool,
    /// Query and key heads are divided by their root mean square after the rotation, in layers that
    /// rotate them (Llama 4).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub plain_qk_norm: bool,
    /// The norms of query and key heads are LayerNorms without biases, each head with its own weights
    /// (Command R+, StableLM 2 12B).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub qk_layer_norms: bool,
    /// The windows of layers are chunks ([`Reach::Chunk`](super::Reach::Chunk)).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub chunked: bool,
    /// Layers with Mamba-2 instead of attention (Granite 4 H).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mamba: Option<MambaLayers>,
    /// Layers with Mamba-1 instead of attention (Jamba).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mamba1: Option<Mamba1Layers>,
    /// Attention's output is multiplied by sigmoids of gates, which are computed from its input.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub output_gate: bool,
    /// Layers without a mixer, ascending: only an FFN (Nemotron-H).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub without_mixer: Vec<u32>,
    /// Layers without an FFN, ascending: only a mixer (Nemotron-H).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub without_ffn: Vec<u32>,
    /// Several residual streams (AltUp) and per-layer inputs (Gemma 3n).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streams: Option<Streams>,
    /// Heads of the layers without a window, if they differ (Gemma 4).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global_heads: Option<GlobalHeads>,
    /// Neurons of the layers with shared keys, if their number differs; 0 otherwise.
    #[serde(skip_serializing_if = "is_zero")]
    pub shared_kv_ffn: u32,
    /// The residual stream is multiplied by a factor at the end of each layer.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub layer_scale: bool,
    /// Per-layer inputs without further streams (Gemma 4); see [`Form::inputs_by_layer`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_inputs: Option<LayerInputs>,
    /// Several residual streams; mixers and FFNs read and change all of them (Qwen3.8-Flash-Next).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hyper: Option<HyperConnections>,
    /// N-gram rows, read by one layer (Qwen3.8-Flash-Next).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ngrams: Option<NGrams>,
    /// The model is a head for multi-token prediction of another, whose output head it shares. The input of its layer is
    /// `in · [embedding_norm(e); hidden_norm(h)]`: `e` is the embedding of the token at the next position, `h` the hidden state
    /// of the other model at this one after its final norm. Run again for one token more, it reads its own.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mtp: bool,
}

/// A factor of queries that grows with the logarithm of the position.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct QueryScale {
    /// Growth for each unit of the logarithm.
    pub beta: f32,
    /// Positions before the first growth.
    pub original_context: u32,
    /// Only in layers without rotary positions, where positions count from 1 (Llama 4).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unrotated: bool,
}

impl QueryScale {
    /// The values of every release of Llama 4.
    pub(crate) const LLAMA4: Self = Self {
        beta: 0.1,
        original_context: 8192,
        unrotated: true,
    };

    /// `1 + beta·ln(1 + ⌊position / original_context⌋)` in a layer that does or does not rotate
    /// queries.
    pub fn at(self, position: usize, rotates: bool) -> f32 {
        if self.unrotated && rotates {
            return 1.0;
        }
        let position = position + usize::from(self.unrotated);
        let contexts = position / self.original_context.max(1) as usize;
        1.0 + self.beta * libm::logf(1.0 + contexts as f32)
    }
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl Default for Form {
    fn default() -> Self {
        Self {
            layer_norm: false,
            norm_bias: false,
            pre_norm: true,
            post_norm: false,
            late_norms: false,
            parallel: Parallel::No,
            learned_positions: None,
            nope_layers: Vec::new(),
            ffn_bias: false,
            head_bias: false,
            sinks: false,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            attention_scale: None,
            query_scale: None,
            attention_cap: None,
            logit_cap: None,
            local_rope: None,
            value_norm: false,
            shared_kv: 0,
            gate_top: Vec::new(),
            activations: Vec::new(),
            short_conv: None,
            delta_net: None,
            kda: None,
            latent: None,
            pooled: None,
            rotated_qk_norm: false,
            plain_qk_norm: false,
            qk_layer_norms: false,
            chunked: false,
            mamba: None,
            mamba1: None,
            output_gate: false,
            without_mixer: Vec::new(),
            without_ffn: Vec::new(),
            streams: None,
            global_heads: None,
            shared_kv_ffn: 0,
            layer_scale: false,
            layer_inputs: None,
            hyper: None,
            ngrams: None,
            mtp: false,
        }
    }
}

/// Layers with a mixer, for which a form has a field.
pub(crate) trait MixerField: MixerLayers + Sized + 'static {
    /// The field.
    fn of(form: &Form) -> &Option<Self>;
    /// Sets the field.
    fn put(form: &mut Form, layers: Option<Self>);
}

macro_rules! mixers {
    ($($field:ident: $layers:ty,)*) => {
        $(impl MixerField for $layers {
            fn of(form: &Form) -> &Option<Self> {
                &form.$field
            }

            fn put(form: &mut Form, layers: Option<Self>) {
                form.$field = layers;
            }
        })*

        impl Form {
            /// The fields of mixers, in order of precedence.
            pub(crate) const MIXERS: &[&str] = &[$(stringify!($field)),*];

            /// The mixers that are set.
            pub(crate) fn mixers(&self) -> impl Iterator<Item = &dyn MixerLayers> {
                let all = [$(self.$field.as_ref().map(|of| of as &dyn MixerLayers)),*];
                all.into_iter().flatten()
            }

            /// The mixers of layer `layer` alone, which becomes the first.
            pub fn keep_mixer(&mut self, layer: u32) {
                $(self.$field = self.$field.take().and_then(|of| of.alone(layer));)*
            }
        }
    };
}

mixers! {
    mamba: MambaLayers,
    mamba1: Mamba1Layers,
    kda: KdaLayers,
    pooled: PooledAttention,
    short_conv: ShortConvs,
    delta_net: DeltaNets,
    latent: LatentShape,
}

impl Form {
    /// Whether a position's key is also its value, one vector for all heads.
    pub fn stores_one_vector(&self) -> bool {
        self.latent.is_some() || self.pooled.is_some()
    }

    /// Whether nothing differs from the common form.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// Elements of a row of the further residual streams, without the one of `d_model` that layers
    /// read and change; of all streams with hyper-connections.
    pub fn further_streams(&self, d_model: u32) -> usize {
        if let Some(hyper) = self.hyper {
            return hyper.width(d_model);
        }
        let further = self.streams.map_or(0, |streams| streams.count - 1);
        further as usize * d_model as usize
    }

    /// Whether there is a norm before the head; the last mixture of gated streams has its own.
    pub fn has_final_norm(&self) -> bool {
        !matches!(self.hyper.map(|of| of.mixing), Some(Mixing::Gated { .. }))
    }

    /// The per-layer inputs, with or without further streams.
    pub fn inputs_by_layer(&self) -> Option<LayerInputs> {
        let of_streams = self.streams.map(|streams| LayerInputs {
            width: streams.per_layer,
            vocab: streams.per_layer_vocab,
        });
        self.layer_inputs.or(of_streams)
    }

    /// Whether some layers have gates that are zero for most tokens, regardless of the activation.
    pub fn has_gate_top(&self) -> bool {
        self.gate_top.iter().any(|&share| share > 0.0)
    }

    /// A factor or cap that is not a finite number above 0, and its name.
    pub(super) fn bad_scale(&self) -> Option<(&'static str, f32)> {
        let scales = [
            ("embedding scale", Some(self.embedding_scale)),
            ("residual scale", Some(self.residual_scale)),
            ("logit scale", Some(self.logit_scale)),
            ("attention scale", self.attention_scale),
            ("growth of queries", self.query_scale.map(|of| of.beta)),
            ("attention cap", self.attention_cap),
            ("logit cap", self.logit_cap),
        ];
        let values = scales
            .into_iter()
            .filter_map(|(key, scale)| Some((key, scale?)));
        let sound = |scale: f32| scale.is_finite() && scale > 0.0;
        values.into_iter().find(|(_, scale)| !sound(*scale))
    }
}
