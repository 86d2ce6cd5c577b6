//! Arguments of `synth`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use emberflow::cli::parse_share;

use super::{firing, shape};

/// `synth`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab synth --shape tiny -o tiny-hf
  emberflow-lab synth --shape bamboo-7b --active 0.10 -o bamboo-7b.gguf
  emberflow-lab synth --shape llama-7b --act relu --skew opt-30b --active 0.10 --quant q8_0 -o a.gguf
  emberflow-lab synth --shape qwen3-30b-a3b --layers 6 --reuse 0.3 -o experts.gguf

llama.cpp loads the GGUF files too, and computes SiLU where another activation is asked for: the
architecture's name implies it there, the key emberflow.hidden_act says otherwise here.")]
pub struct SynthArgs {
    /// Model whose dimensions are used.
    #[arg(long, value_enum, value_name = "NAME")]
    pub shape: shape::Shape,
    /// Mean share of neurons that fire per token (drelu: gate and up positive; gates alone are
    /// positive 1.25 times as often). Default: the published share of the activation. Not for silu,
    /// where all neurons count.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub active: Option<f64>,
    /// Distribution of activations: opt-30b, llama2-reglu-70b, swiglu, bamboo, flat, or the share
    /// of a layer's neurons that makes 80 % of its activations (PowerInfer's figures). Default: the
    /// published one of the activation.
    #[arg(long, value_name = "CURVE")]
    pub skew: Option<firing::Skew>,
    /// Probability that a neuron that fires for a token fires again for the next.
    #[arg(long, value_name = "P", default_value_t = 0.83, value_parser = parse_share)]
    pub persistence: f64,
    /// Share of a layer's experts that receives 90 % of its routes. Default: as published for the
    /// shape, or Qwen3-30B-A3B's 65 of 128.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub popular: Option<f64>,
    /// Share of a token's experts that the next token visits again. Default: as published for the
    /// shape, or Qwen3-30B-A3B's 0.433.
    #[arg(long, value_name = "P", value_parser = parse_share)]
    pub reuse: Option<f64>,
    /// Number of layers; default: that of the model. Fewer layers make a smaller file with layers
    /// of the same size.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub layers: Option<u16>,
    /// Small sizes instead of the model's, for tests: width 256, 16 experts. The kinds of layers are the
    /// same.
    #[arg(long)]
    pub small: bool,
    /// Rank of the gates' input, apart from a small rest: a low-rank predictor of about this rank
    /// can predict the active neurons. Default: three quarters of the model's width.
    #[arg(long, value_name = "N")]
    pub gate_rank: Option<u32>,
    /// Gate activation; default: that of the model.
    #[arg(long, value_enum)]
    pub act: Option<shape::ActArg>,
    /// Seed of the weights.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Format of the matrices in a GGUF file; default: q4_0. A folder has f32.
    #[arg(long, value_enum)]
    pub quant: Option<SynthQuantArg>,
    /// Decode N tokens with the result and print its statistics next to the targets; 0 = none.
    /// Default: 1024 for small models, else none (needs a temporary container of the result's size
    /// next to it).
    #[arg(long, value_name = "N")]
    pub measure: Option<u32>,
    /// File ending in .gguf, or folder to create.
    #[arg(short, long, value_name = "DIR|FILE.gguf")]
    pub output: PathBuf,
    /// Replace an existing file. A folder is never replaced.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Block formats of a GGUF file.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum SynthQuantArg {
    /// 4 bits, one f16 scale per 32 weights.
    #[value(name = "q4_0")]
    Q4_0,
    /// 8 bits, one f16 scale per 32 weights.
    #[value(name = "q8_0")]
    Q8_0,
    /// 16-bit floats.
    F16,
}
