//! The normalised model configuration: the only description of a decoder that
//! the rest of the program sees.
//!
//! Readers ([`crate::hf`], [`crate::gguf`]) translate a checkpoint's own keys
//! into [`ModelConfig`]; the packer stores it as JSON in the container; the
//! engine builds its geometry from it. There are no per-family branches after
//! this point: a family is nothing but values of these fields.

use serde::{Deserialize, Serialize};

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
}

impl Activation {
    /// True where a neuron that does not fire contributes exactly nothing, so
    /// that the `exact` mode equals the dense computation.
    pub fn is_sparse(self) -> bool {
        matches!(self, Self::Relu | Self::FatRelu { .. } | Self::Relu2)
    }
}

/// How the FFN of one layer (or expert) combines its three matrices:
/// `down · (act(gate·x) ∘ up'(up·x))`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FfnKind {
    /// Non-linearity on the gate.
    pub activation: Activation,
    /// dReLU (Bamboo, TurboSparse): the up projection passes through `max(·, 0)` too.
    pub relu_on_up: bool,
}

/// Scaling of the rotary frequencies.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RopeScaling {
    /// Plain RoPE.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// Divisor of every frequency.
        factor: f32,
    },
    /// Llama 3.1 and later.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f32,
        /// Wavelengths above `original_context / low_freq_factor` are divided.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context length before scaling, in tokens.
        original_context: u32,
    },
}

/// Rotary position embedding, rotate-half convention (readers un-permute
/// checkpoints that store the interleaved one).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f32,
    /// Dimensions per head that are rotated (even, ≤ head_dim).
    pub dims: u32,
    /// Frequency scaling.
    pub scaling: RopeScaling,
}

/// Everything the engine needs to know about a decoder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Family as named by the checkpoint (`llama`, `mistral`, `qwen2`, `qwen3`, `bamboo`).
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
    /// Experts per layer; 1 for a dense FFN.
    pub experts: u32,
    /// The FFN's formula.
    pub ffn_kind: FfnKind,
    /// Epsilon of every RMSNorm.
    pub rms_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Sliding-window attention: a query sees the last `n` positions, itself
    /// included. One entry per layer; 0 = full attention.
    pub window: Vec<u32>,
    /// Q, K and V projections carry a bias.
    pub qkv_bias: bool,
    /// The output projection carries a bias.
    pub o_bias: bool,
    /// RMSNorm over each head of Q and K (Qwen3).
    pub qk_norm: bool,
    /// The head shares the embedding matrix.
    pub tied_head: bool,
    /// Longest context the model was made for, in tokens.
    pub max_context: u32,
    /// Token put in front of a text, if any.
    pub bos: Option<u32>,
    /// Whether the tokenizer puts `bos` in front by default.
    pub add_bos: bool,
    /// Tokens that end a generation.
    pub eos: Vec<u32>,
}
