//! Metadata by which an architecture departs from the plain decoder.

use super::arch::{GPT_OSS, OPT};
use super::streams::{self, ACTIVE, GEMMA3N, PER_LAYER, SHARED_KV, STREAMS, TOP};
use super::value::Metadata;
use crate::config::{Activation, Form, Parallel, SWIGLU_ALPHA, SWIGLU_LIMIT};
use crate::error::Error;

/// What an architecture departs in. Formulas as in llama.cpp's `src/models/`.
#[derive(Clone, Copy)]
pub(super) struct Style {
    name: &'static str,
    /// Key of the epsilon of its norms, after the architecture.
    pub(super) eps: &'static str,
    /// The epsilon of files that have no such key.
    pub(super) usual_eps: Option<f32>,
    /// Its activation, where the file does not name one.
    pub(super) act: Activation,
    /// Its FFN has no gate.
    pub(super) ungated: bool,
    /// A part of each head may be rotated.
    pub(super) partial: bool,
    /// Layers with a window have a rotary embedding of their own.
    pub(super) local_rope: bool,
    /// Its norms are LayerNorms with biases.
    layer_norm: bool,
    /// Keys that are read for it, after the architecture.
    pub(super) reads: &'static [&'static str],
}

const PLAIN: Style = Style {
    name: "",
    eps: "attention.layer_norm_rms_epsilon",
    usual_eps: None,
    act: Activation::Silu,
    ungated: false,
    partial: false,
    local_rope: false,
    layer_norm: false,
    reads: &[],
};

const UNGATED: Style = Style {
    eps: "attention.layer_norm_epsilon",
    act: Activation::Gelu,
    ungated: true,
    layer_norm: true,
    ..PLAIN
};

/// The divisors of LongRoPE are tensors; this is the factor of queries and keys.
pub(super) const ATTENTION_FACTOR: &str = "rope.scaling.attn_factor";

/// Where logits are capped.
const LOGIT_CAP: &str = "final_logit_softcapping";

/// Rows of OPT's table of positions before that of position 0.
pub(super) const UNUSED_POSITIONS: u32 = 2;

/// Every how many layers one has no window.
pub(super) const PATTERN: &str = "attention.sliding_window_pattern";
/// Base of the rotary frequencies in layers with a window.
pub(super) const LOCAL_BASE: &str = "rope.freq_base_swa";

const STYLES: [Style; 11] = [
    Style {
        name: GPT_OSS,
        act: Activation::ClampedSwiglu {
            limit: SWIGLU_LIMIT,
            alpha: SWIGLU_ALPHA,
        },
        ..PLAIN
    },
    Style {
        name: "phi3",
        partial: true,
        reads: &[ATTENTION_FACTOR],
        ..PLAIN
    },
    Style {
        name: "granite",
        reads: &[
            "attention.scale",
            "embedding_scale",
            "residual_scale",
            "logit_scale",
        ],
        ..PLAIN
    },
    Style {
        name: "minicpm",
        reads: &["embedding_scale", "residual_scale", "logit_scale"],
        ..PLAIN
    },
    Style {
        name: "starcoder2",
        act: Activation::GeluTanh,
        ..UNGATED
    },
    Style {
        name: "nemotron",
        act: Activation::Relu2,
        partial: true,
        ..UNGATED
    },
    Style {
        name: "falcon",
        ..UNGATED
    },
    Style {
        name: OPT,
        act: Activation::Relu,
        usual_eps: Some(1e-5),
        ..UNGATED
    },
    Style {
        name: "gemma2",
        act: Activation::GeluTanh,
        reads: &["attn_logit_softcapping", LOGIT_CAP],
        ..PLAIN
    },
    Style {
        name: "gemma3",
        act: Activation::GeluTanh,
        local_rope: true,
        reads: &[PATTERN, LOCAL_BASE, LOGIT_CAP],
        ..PLAIN
    },
    Style {
        name: GEMMA3N,
        act: Activation::GeluTanh,
        local_rope: true,
        reads: &[
            PATTERN, LOCAL_BASE, LOGIT_CAP, STREAMS, ACTIVE, PER_LAYER, SHARED_KV, TOP,
        ],
        ..PLAIN
    },
];

/// What `arch` departs in.
pub(super) fn style_of(arch: &str) -> &'static Style {
    let mut styles = STYLES.iter();
    styles.find(|style| style.name == arch).unwrap_or(&PLAIN)
}

/// The sizes and tensors that some forms follow from.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) d_model: u32,
    pub(super) layers: u32,
    pub(super) heads: u32,
    pub(super) head_dim: u32,
    /// The FFN's projections carry biases.
    pub(super) ffn_bias: bool,
    /// There is a second norm before attention (Falcon 40B).
    pub(super) two_norms: bool,
    /// Some layers have a window.
    pub(super) windowed: bool,
    /// Of the residual streams.
    pub(super) streams: streams::Sizes,
}

/// What follows from the style and the tensors alone.
fn plain(arch: &str, shape: Shape) -> Form {
    let style = style_of(arch);
    Form {
        layer_norm: style.layer_norm,
        norm_bias: style.layer_norm,
        ffn_bias: shape.ffn_bias,
        learned_positions: (arch == OPT).then_some(UNUSED_POSITIONS),
        ..Form::default()
    }
}

/// The form of a file of architecture `arch`.
pub(super) fn form(metadata: &Metadata, arch: &str, shape: Shape) -> Result<Form, Error> {
    let factor = |rest: &str| -> Result<Option<f32>, Error> {
        let key = format!("{arch}.{rest}");
        match metadata.f32(&key)? {
            Some(factor) if factor < 0.0 => Err(metadata.bad(&key, "a number above 0")),
            factor => Ok(factor.filter(|factor| *factor != 0.0)),
        }
    };
    let need = |rest: &str| {
        let missing = || metadata.missing(&format!("{arch}.{rest}"), "a number above 0");
        factor(rest)?.ok_or_else(missing)
    };
    let plain = plain(arch, shape);
    Ok(match arch {
        "smallthinker" if shape.windowed => Form {
            nope_layers: (0..shape.layers).step_by(4).collect(),
            ..plain
        },
        GPT_OSS => Form {
            ffn_bias: true,
            sinks: true,
            ..plain
        },
        "olmo2" => Form {
            pre_norm: false,
            post_norm: true,
            ..plain
        },
        "granite" => Form {
            attention_scale: factor("attention.scale")?,
            embedding_scale: factor("embedding_scale")?.unwrap_or(1.0),
            residual_scale: factor("residual_scale")?.unwrap_or(1.0),
            logit_scale: 1.0 / factor("logit_scale")?.unwrap_or(1.0),
            ..plain
        },
        // every fourth layer, in every release
        "smollm3" => Form {
            nope_layers: (0..shape.layers).filter(|layer| layer % 4 == 3).collect(),
            ..plain
        },
        // files without the keys are of a time when programs disagreed on the values
        "minicpm" => Form {
            embedding_scale: need("embedding_scale")?,
            residual_scale: need("residual_scale")?,
            logit_scale: 1.0 / need("logit_scale")?,
            ..plain
        },
        "falcon" => Form {
            parallel: [Parallel::OneNorm, Parallel::TwoNorms][usize::from(shape.two_norms)],
            ..plain
        },
        "gemma2" => Form {
            attention_cap: Some(factor("attn_logit_softcapping")?.unwrap_or(50.0)),
            logit_cap: Some(factor(LOGIT_CAP)?.unwrap_or(30.0)),
            ..gemma(shape, 46, plain)
        },
        "gemma3" => Form {
            logit_cap: factor(LOGIT_CAP)?,
            ..gemma(shape, 62, plain)
        },
        GEMMA3N => {
            let plain = gemma(shape, 0, plain);
            Form {
                logit_cap: Some(factor(LOGIT_CAP)?.unwrap_or(30.0)),
                ..streams::form(metadata, shape.layers, shape.streams, plain)?
            }
        }
        _ => plain,
    })
}

/// Gemma 2 and 3 without caps. The largest one, of `most` layers, has another scale of scores.
fn gemma(shape: Shape, most: u32, plain: Form) -> Form {
    let width = match shape.layers == most {
        true => shape.d_model / shape.heads.max(1),
        false => shape.head_dim,
    };
    Form {
        post_norm: true,
        embedding_scale: (shape.d_model as f32).sqrt(),
        attention_scale: Some(1.0 / (width as f32).sqrt()),
        ..plain
    }
}
