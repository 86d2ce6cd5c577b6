//! Arguments of commands about containers: `pack`, `inspect`, `verify` and `export`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{ModelArg, parse_sector};
use crate::size;
use crate::suggest::did_you_mean;

/// Block formats for weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum QuantArg {
    /// 4 bits, one f16 scale per 32 weights.
    Q4,
    /// 4 bits, same size as q4, with 6-bit scales and minimums per 32 weights: a third less squared error.
    Q4k,
    /// 4 bits, one scale per row, and one weight of 64 in 8 bits: for NPUs.
    Q4c,
    /// 8 bits, one f16 scale per 32 weights.
    Q8,
    /// 8 bits, one scale per row: for NPUs.
    Q8c,
    /// 16-bit floats.
    F16,
    /// 32-bit floats.
    F32,
}

/// Target format of `pack`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackQuant {
    /// Per matrix, a format with at least as many bits as the source.
    AsSource,
    /// All formats of the source.
    Keep,
    /// One format for all matrices.
    One(QuantArg),
    /// A mix of formats that gives a container of about this many bytes.
    Size(u64),
}

/// The nearest format for a name of llama.cpp. Names are not aliases, because llama.cpp's formats are mixtures.
fn of_llama_cpp(text: &str) -> Option<&'static str> {
    let text = text.to_ascii_lowercase();
    let names = [
        ("q8_0", "q8"),
        ("q4_k", "q4k for all matrices, or auto:SIZE for a mixture"),
        ("q4_", "q4"),
        ("iq4_", "q4k"),
        (
            "q5_",
            "q8 with more bits, q4k with fewer, or auto:SIZE for a mixture",
        ),
        (
            "q6_",
            "q8 with more bits, q4k with fewer, or auto:SIZE for a mixture",
        ),
        ("bf16", "f16 or f32"),
    ];
    let known = names.into_iter().find(|(name, _)| text.starts_with(name));
    known.map(|(_, ours)| ours)
}

/// The argument of `--quant`.
///
/// # Errors
/// No such format: the nearest.
pub fn parse_quant(text: &str) -> Result<PackQuant, String> {
    if text == "auto" {
        return Ok(PackQuant::AsSource);
    }
    if text == "keep" {
        return Ok(PackQuant::Keep);
    }
    if let Some(size) = text.strip_prefix("auto:") {
        return size::parse(size).map(PackQuant::Size);
    }
    let one = QuantArg::from_str(text, true);
    one.map(PackQuant::One).map_err(|_| {
        if let Some(ours) = of_llama_cpp(text) {
            return format!("{text:?} is a name of llama.cpp: here it is {ours}");
        }
        let near = did_you_mean(text, ["auto", "keep", "q4", "q4k", "q4c", "q8", "q8c", "f16", "f32"]);
        format!("{text:?} is not one of auto, keep, q4, q4k, q4c, q8, q8c, f16, f32 or auto:SIZE (such as auto:2GiB){near}")
    })
}

/// `pack`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow pack ~/models/ReluLLaMA-7B -o relullama.ember
  emberflow pack model-00001-of-00003.gguf -o model.ember
  emberflow pack bamboo-7b.powerinfer.gguf -o bamboo.ember --quant q4 --stats stats.json

To resume an interrupted pack, run the same command again.")]
pub struct PackArgs {
    /// A Hugging Face folder, a .safetensors file with config.json in the same folder, or a GGUF file.
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// Container to write.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Format of FFN and attention weights. auto: at least the bits of the checkpoint. If every neuron is active, as
    /// with SiLU, that is its own blocks; otherwise q4k for formats of up to 4.5 bits and q8 for others. Float
    /// checkpoints become q4k. keep: the checkpoint's blocks and floats, whatever the model; no neuron is skipped.
    /// Other values put neurons in bundles. q4, q4k, q8, f16, f32: this format for all. q4c, q8c: likewise, with
    /// one scale per row, for NPUs; use q4c with --calibrate. auto:SIZE: a container of about this size, with more
    /// bits where they reduce the error most. Only q8, q8c, f16 and f32 change MXFP4 experts.
    #[arg(long, value_name = "QUANT", default_value = "auto", value_parser = parse_quant)]
    pub quant: PackQuant,
    /// Format of the attention matrices; default: as --quant.
    #[arg(long, value_enum, value_name = "QUANT")]
    pub attention_quant: Option<QuantArg>,
    /// Format of embedding and output head. Default: with auto, as in the checkpoint (q8 if all of it is floats); q8
    /// with q4, q4k and q8, q8c with q4c; otherwise as --quant.
    #[arg(long, value_enum, value_name = "QUANT")]
    pub embedding_quant: Option<QuantArg>,
    /// Activation statistics (see profile). Sorts neurons by activation frequency, with neurons that are
    /// active together next to each other.
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    /// Calibration text, similar to the model's later input but not used for evaluation. Weights are
    /// rounded to minimize the output error of each matrix on this text.
    #[arg(long, value_name = "TEXT")]
    pub calibrate: Option<PathBuf>,
    /// Tokens of the calibration text to use, spread evenly over it.
    #[arg(long, value_name = "N", default_value_t = 32768, requires = "calibrate", value_parser = clap::value_parser!(u32).range(1..))]
    pub calibrate_tokens: u32,
    /// CPU threads; default: one per core. The output does not depend on them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Order of neurons with --stats.
    #[arg(long, value_enum, default_value = "coactivation")]
    pub order: OrderArg,
    /// Alignment of bundles, 512 to 4096: the direct I/O block size of the device that will hold the file.
    /// Default: as the output's file system reports, otherwise a size with little padding.
    #[arg(long, value_name = "BYTES", value_parser = parse_sector)]
    pub sector: Option<u32>,
    /// Where to store quantization scales.
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
    /// Hottest first; of neurons with similar frequency, those active together are neighbours.
    Coactivation,
    /// Hottest first.
    Temperature,
}

/// Scale placement.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum ScalesArg {
    /// Whichever needs less padding.
    Auto,
    /// In the bundle.
    Inline,
    /// In a section held in memory, so that quantized rows fill whole sectors.
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
    /// Write the activation frequencies as SVG.
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

Exit code 3 if a check fails.")]
pub struct VerifyArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Also compare every weight with this checkpoint, from which the container was packed.
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

Weights are written as f32; in GGUF files, q4k matrices become Q4_K without loss. llama.cpp loads these
files, but it infers SiLU from the architecture name even if the model has another activation. GGUF
export supports byte-level tokenizers only.")]
pub struct ExportArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// GGUF file (name ends in .gguf) or folder to create.
    #[arg(short, long, value_name = "DIR|FILE.gguf")]
    pub output: PathBuf,
    /// Replace an existing file. Folders are never replaced.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_llama_cpp_are_answered_with_those_of_this_program() {
        for (theirs, ours) in [
            ("q8_0", "it is q8"),
            ("Q8_0", "it is q8"),
            ("Q4_0", "it is q4"),
            ("Q4_K_M", "q4k for all matrices"),
            ("q4_k_s", "q4k for all matrices"),
            ("IQ4_XS", "it is q4k"),
            ("Q5_K_M", "auto:SIZE"),
            ("BF16", "f16"),
        ] {
            let told = parse_quant(theirs).unwrap_err();
            assert!(told.contains(ours) && told.contains(theirs), "{told}");
        }
        for (name, known) in [("q8", QuantArg::Q8), ("Q4K", QuantArg::Q4k)] {
            assert_eq!(parse_quant(name), Ok(PackQuant::One(known)));
        }
        assert!(parse_quant("q9").unwrap_err().contains("not one of"));
    }
}
