//! Arguments of commands about containers: `pack`, `inspect`, `verify` and `export`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{ModelArg, parse_sector};
use crate::size;
use crate::suggest::did_you_mean;

/// Block formats of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum QuantArg {
    /// 4 bits, one f16 scale per 32 weights.
    Q4,
    /// 4 bits, as large, with scales and minimums in 6 bits per 32 weights: a third less squared
    /// error.
    Q4k,
    /// 8 bits, one f16 scale per 32 weights.
    Q8,
    /// 16-bit floats.
    F16,
    /// 32-bit floats.
    F32,
}

/// What `pack` quantises to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackQuant {
    /// Formats of at least as many bits as the source has.
    AsSource,
    /// One format.
    One(QuantArg),
    /// Whatever makes a container of about so many bytes.
    Size(u64),
}

fn parse_quant(text: &str) -> Result<PackQuant, String> {
    if text == "auto" {
        return Ok(PackQuant::AsSource);
    }
    if let Some(size) = text.strip_prefix("auto:") {
        return size::parse(size).map(PackQuant::Size);
    }
    let one = QuantArg::from_str(text, true);
    one.map(PackQuant::One).map_err(|_| {
        let near = did_you_mean(text, ["auto", "q4", "q4k", "q8", "f16", "f32"]);
        format!("{text:?} is not auto, q4, q4k, q8, f16, f32 or auto:SIZE, such as auto:2GiB{near}")
    })
}

/// `pack`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow pack ~/models/ReluLLaMA-7B -o relullama.ember
  emberflow pack model-00001-of-00003.gguf -o model.ember
  emberflow pack bamboo-7b.powerinfer.gguf -o bamboo.ember --quant q4 --stats stats.json

A killed pack goes on where it stopped when the same command is given again.")]
pub struct PackArgs {
    /// A Hugging Face folder, a .safetensors file beside its config.json, or a GGUF file.
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// The container to write.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Format of the neuron bundles and attention matrices. auto gives each matrix as many bits as the
    /// checkpoint has: q4k for Q4_0 and Q4_K, q8 for what has more, and q4k for a checkpoint of floats.
    /// q4, q4k, q8, f16, f32: this one for all (of four bits, graphics processors know q4 alone).
    /// auto:SIZE: a container of that size, with more bits where they take away more error. With auto, q4
    /// and q4k, neurons that the checkpoint has in MXFP4 stay as they are.
    #[arg(long, value_name = "QUANT", default_value = "auto", value_parser = parse_quant)]
    pub quant: PackQuant,
    /// Format of the attention matrices, if another one.
    #[arg(long, value_enum, value_name = "QUANT")]
    pub attention_quant: Option<QuantArg>,
    /// Format of embedding and head; default: with auto as the checkpoint has them, q8 for floats; q8 for
    /// q4, q4k and q8, else the same.
    #[arg(long, value_enum, value_name = "QUANT")]
    pub embedding_quant: Option<QuantArg>,
    /// Activation statistics (from profile); orders neurons by temperature, and those that fire
    /// together side by side.
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    /// A text of the kind that the model will meet, not one that it is judged by: weights are rounded
    /// so that what they compute from it changes least.
    #[arg(long, value_name = "TEXT")]
    pub calibrate: Option<PathBuf>,
    /// Tokens to take from that text, evenly spread over it.
    #[arg(long, value_name = "N", default_value_t = 32768, requires = "calibrate", value_parser = clap::value_parser!(u32).range(1..))]
    pub calibrate_tokens: u32,
    /// Compute threads; default: one per core. They change no byte.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// How statistics order neurons.
    #[arg(long, value_enum, default_value = "coactivation")]
    pub order: OrderArg,
    /// Bundle alignment, 512 to 4096: the unit of direct reads of the device that will serve the file;
    /// default: what the output's file system says, or what pads little where it does not say.
    #[arg(long, value_name = "BYTES", value_parser = parse_sector)]
    pub sector: Option<u32>,
    /// Where quantisation scales live.
    #[arg(long, value_enum, default_value = "auto")]
    pub scales: ScalesArg,
    /// Replace an existing output.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object at the end.
    #[arg(long)]
    pub json: bool,
}

/// Orders of neurons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OrderArg {
    /// Hottest first; neurons of similar temperature that fire together are neighbours.
    Coactivation,
    /// Hottest first, nothing else.
    Temperature,
}

/// Scale placement.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum ScalesArg {
    /// Whatever pads less.
    Auto,
    /// In the bundle.
    Inline,
    /// In memory, so that quantised rows fill whole sectors.
    Resident,
}

/// `inspect`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow inspect
  emberflow inspect model.ember --tensors
  emberflow inspect model.ember --json --svg temperature.svg")]
pub struct InspectArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// List every tensor.
    #[arg(long)]
    pub tensors: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Write the temperature curve as SVG.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long, requires = "svg")]
    pub force: bool,
}

/// `verify`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow verify model.ember
  emberflow verify model.ember --source checkpoint --json

Ends with exit code 3 where something is wrong.")]
pub struct VerifyArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Also compare every weight with the checkpoint it was packed from.
    #[arg(long, value_name = "CHECKPOINT")]
    pub source: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `export`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow export -o demo-hf && emberflow pack demo-hf -o demo-q4.ember --quant q4
  emberflow export -o demo.gguf && emberflow pack demo.gguf -o demo-q8.ember --quant q8

Weights are written in f32, but for matrices in q4k of a GGUF file, which become Q4_K with the same
numbers. llama.cpp loads the GGUF files too, and computes SiLU where another activation is asked for:
the architecture's name implies it there. Only byte-level tokenizers go into GGUF.")]
pub struct ExportArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// File that ends in .gguf, or folder to create.
    #[arg(short, long, value_name = "DIR|FILE.gguf")]
    pub output: PathBuf,
    /// Replace an existing file. A folder is never replaced.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}
