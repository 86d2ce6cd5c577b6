//! The command line: names and flags are a contract (add, do not rename).

mod bench;
mod trace;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use emberflow_engine::{Budget, Policy, Sparsity};

pub use self::bench::*;
pub use self::trace::*;
use crate::size;
use crate::synth::{firing, shape};
use crate::train_predictor::TrainPredictorArgs;

/// Run language models that are larger than memory.
#[derive(Debug, Parser)]
#[command(name = "emberflow", version, about, arg_required_else_help = true, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// More detail on stderr: -v what was chosen and why, -vv everything.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
}

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 an error, told on stderr; 2 wrong usage; 3 a fault in a file (verify, or
weights that cannot be stored); 130 stopped by Ctrl-C.

Every MODEL defaults to the model bundled in the program.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate text.
    Run(RunArgs),
    /// Turn a checkpoint (Hugging Face folder, .safetensors, .gguf) into a container.
    Pack(PackArgs),
    /// Explain a container: configuration, sections, sizes, padding, temperature.
    Inspect(InspectArgs),
    /// Re-read a container against its checksums, and against its checkpoint.
    Verify(VerifyArgs),
    /// Perplexity of a model over a text file.
    Perplexity(PerplexityArgs),
    /// Count how a text makes a model's neurons fire; merge and draw such statistics.
    Profile(ProfileArgs),
    /// Record which neurons a real run needs, and replay that against caches.
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Copy a container and add predictors of which neurons fire, made from a text.
    TrainPredictor(TrainPredictorArgs),
    /// Write a container's weights as an ordinary Hugging Face folder.
    Export(ExportArgs),
    /// Write a random checkpoint of a real model's shape with given activation statistics.
    Synth(SynthArgs),
    /// Measure.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Say how a model would be run under a budget, and how fast.
    Plan(PlanArgs),
    /// Say what this machine offers and what to change.
    Doctor(DoctorArgs),
}

/// Which container.
#[derive(Debug, Clone, Args)]
pub struct ModelArg {
    /// A packed model (.ember); default: the bundled demo model.
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
}

/// How to run it.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Memory for the whole process, such as 600MiB, or `auto`.
    #[arg(long, value_name = "SIZE|auto", default_value = "auto", value_parser = parse_budget,
          conflicts_with = "ffn_resident")]
    pub memory: Budget,
    /// Instead of --memory: the budget that keeps this share of the FFN in memory, 0 to 1.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub ffn_resident: Option<f64>,
    /// Compute threads; default: one per core, or fewer where that is faster.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Which neurons to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub sparsity: SparsityArg,
    /// Which mechanisms are at work: full, or a baseline to compare with: no-pipeline, no-cache,
    /// no-bundle, baseline, bundle-only, llmflash, mmap.
    #[arg(long, value_name = "POLICY", default_value = "full")]
    pub policy: Policy,
    /// How to read from flash: auto, uring, pread, or sim:PROFILE.
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub io: String,
    /// Core to pin the I/O thread to; default: a strong one where cores differ, else none.
    #[arg(long, value_name = "CORE")]
    pub io_core: Option<usize>,
    /// Keep neurons from being swapped out, as far as the system allows (see doctor).
    #[arg(long)]
    pub lock: bool,
    /// Prompt tokens computed at once; default: the longest chunk that the budget can well afford.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub chunk: Option<u16>,
    /// Format of the key/value cache.
    #[arg(long, value_enum, default_value = "f16")]
    pub kv: KvArg,
}

/// Sparsity modes.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum SparsityArg {
    /// `predicted` where the model has predictors and they pay, else `exact` where it equals
    /// dense, else `dense`.
    Auto,
    /// Every neuron.
    Dense,
    /// Gate first, then only neurons that fire; equals dense bit for bit.
    Exact,
    /// Only neurons that a predictor names (see train-predictor); an approximation.
    Predicted,
}

impl From<SparsityArg> for Sparsity {
    fn from(arg: SparsityArg) -> Self {
        match arg {
            SparsityArg::Auto => Self::Auto,
            SparsityArg::Dense => Self::Dense,
            SparsityArg::Exact => Self::Exact,
            SparsityArg::Predicted => Self::Predicted,
        }
    }
}

/// Key/value formats.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum KvArg {
    /// 2 bytes per element.
    F16,
    /// 4 bytes per element.
    F32,
}

/// Block formats of weights.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum QuantArg {
    /// 4 bits, one f16 scale per 32 weights.
    Q4,
    /// 8 bits, one f16 scale per 32 weights.
    Q8,
    /// 16-bit floats.
    F16,
    /// 32-bit floats.
    F32,
}

/// `run`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow run -p \"A vector is\" -n 80
  emberflow run --ffn-resident 0.45             bundled model, most of its FFN left on disk
  emberflow run model.ember -f prompt.txt --temp 0.7 --top-p 0.9 --seed 7
  emberflow run model.ember --chat --memory 4GiB
  emberflow run -p \"A trait\" -n 48 --temp 0.8 --best-of 4
  emberflow run model.ember -p \"Hello\" --json")]
pub struct RunArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Text to continue.
    #[arg(short, long, value_name = "TEXT", conflicts_with_all = ["file", "chat"])]
    pub prompt: Option<String>,
    /// File with the text to continue; `-` for standard input.
    #[arg(short, long, value_name = "FILE", conflicts_with = "chat")]
    pub file: Option<PathBuf>,
    /// Talk to the model with its chat template, one message per line of standard input.
    #[arg(long)]
    pub chat: bool,
    /// System message for --chat.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Most tokens to generate.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    pub tokens: u32,
    /// Positions to make room for; default: prompt plus -n (for --chat: 2048 or the model's limit).
    #[arg(long, value_name = "N")]
    pub context: Option<u32>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    /// Softmax temperature; 0 = greedy. This and the next four default to what the checkpoint
    /// recommends, else to greedy.
    #[arg(long, value_name = "T")]
    pub temp: Option<f32>,
    /// Keep the K likeliest tokens; 0 = all.
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Keep the likeliest tokens with this probability mass.
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Drop tokens less likely than this share of the likeliest; 0 = none.
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Weaken tokens that were used recently; 1 = off.
    #[arg(long, value_name = "R")]
    pub repeat_penalty: Option<f32>,
    /// Seed of the random choices.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Draw N texts at once, with seeds S to S+N-1, and give the one whose tokens have the highest
    /// mean log-probability. Needs a temperature above 0.
    #[arg(long, value_name = "N", conflicts_with = "chat",
          value_parser = clap::value_parser!(u16).range(1..=emberflow_engine::MAX_BATCH as i64))]
    pub best_of: Option<u16>,
    /// Go on after an end-of-text token.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Record what every thread and the device did when, and write it at the end in Chrome's trace
    /// format (about:tracing, Perfetto). The last part of a long run is kept.
    #[arg(long, value_name = "FILE", conflicts_with = "chat")]
    pub trace: Option<PathBuf>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
    /// With --json: also each token's time, waiting, hits and reads, the hash so far, and the speed
    /// of memory.
    #[arg(long, requires = "json", conflicts_with = "chat")]
    pub details: bool,
}

/// `pack`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow pack ~/models/ReluLLaMA-7B -o relullama.ember
  emberflow pack bamboo-7b.powerinfer.gguf -o bamboo.ember --quant q4 --stats stats.json

A killed pack goes on where it stopped when the same command is given again.")]
pub struct PackArgs {
    /// A Hugging Face folder, a .safetensors file beside its config.json, or a GGUF file.
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// The container to write.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Format of the neuron bundles and attention matrices.
    #[arg(long, value_enum, default_value = "q4")]
    pub quant: QuantArg,
    /// Format of the attention matrices, if another one.
    #[arg(long, value_enum, value_name = "QUANT")]
    pub attention_quant: Option<QuantArg>,
    /// Format of embedding and head; default: q8 for q4 and q8, else the same.
    #[arg(long, value_enum, value_name = "QUANT")]
    pub embedding_quant: Option<QuantArg>,
    /// Activation statistics (from profile); orders neurons by temperature, and those that fire
    /// together side by side.
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    /// How statistics order neurons.
    #[arg(long, value_enum, default_value = "coactivation")]
    pub order: OrderArg,
    /// Bundle alignment; default: what direct I/O on the output's file system needs.
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
}

/// `verify`
#[derive(Debug, Args)]
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

/// `perplexity`
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  emberflow perplexity model.ember -f heldout.txt --window 512")]
pub struct PerplexityArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// The text.
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Tokens per window; each window starts afresh and its first token is not scored; default:
    /// 512, or the model's limit.
    #[arg(long, value_name = "N")]
    pub window: Option<u32>,
    /// Stop after this many tokens.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..))]
    pub limit: Option<u64>,
    /// Hold the container's predictors against what the gates of this text do, by layer, and give
    /// the perplexity with them too.
    #[arg(long, conflicts_with = "sparsity")]
    pub judge: bool,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `export`
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  emberflow export -o demo-hf && emberflow pack demo-hf -o demo-q4.ember --quant q4")]
pub struct ExportArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Folder to create.
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
}

/// `synth`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow synth --shape tiny -o tiny-hf
  emberflow synth --shape bamboo-7b --active 0.10 -o bamboo-7b.gguf
  emberflow synth --shape llama-7b --act relu --skew opt-30b --active 0.10 --quant q8_0 -o a.gguf

llama.cpp loads the GGUF files too, and computes SiLU where another activation is asked for: the
architecture's name implies it there, the key emberflow.hidden_act says otherwise here.")]
pub struct SynthArgs {
    /// Whose dimensions.
    #[arg(long, value_enum, value_name = "NAME")]
    pub shape: shape::Shape,
    /// Mean share of neurons that fire per token (for drelu: gate and up positive; gates alone fire
    /// 1.25 times as often); default: as published for the activation.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub active: Option<f64>,
    /// Hot/cold curve: opt-30b, llama2-reglu-70b, swiglu, bamboo, flat, or the share of neurons
    /// that gives 80 % of activations (PowerInfer's figures per layer); default: as published for
    /// the activation.
    #[arg(long, value_name = "CURVE")]
    pub skew: Option<firing::Skew>,
    /// Chance that a neuron that fires for a token fires for the next one too.
    #[arg(long, value_name = "P", default_value_t = 0.83, value_parser = parse_share)]
    pub persistence: f64,
    /// Rank of what the gates read, but for a small rest: a low-rank predictor of about this rank
    /// can name the neurons that fire; default: three quarters of the shape's width.
    #[arg(long, value_name = "N")]
    pub gate_rank: Option<u32>,
    /// Gate non-linearity; default: that of the shape's model.
    #[arg(long, value_enum)]
    pub act: Option<shape::ActArg>,
    /// Seed of the weights.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Format of a GGUF file's matrices; default: q4_0. A folder has f32.
    #[arg(long, value_enum)]
    pub quant: Option<SynthQuantArg>,
    /// Decode N tokens with the result and print its statistics beside the targets; 0 = none.
    /// Default: 1024 for small shapes, none for others (a container of the result's size is
    /// written beside it for that, and deleted).
    #[arg(long, value_name = "N")]
    pub measure: Option<u32>,
    /// File that ends in .gguf, or folder to create.
    #[arg(short, long, value_name = "DIR|FILE.gguf")]
    pub output: PathBuf,
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

/// `plan`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow plan
  emberflow plan model.ember --memory 1GiB,2GiB,4GiB
  emberflow plan model.ember --memory 2GiB --io sim:ufs4 --json

Measure the storage device first (emberflow bench io MODEL); the machine is measured by this command
when it was not yet.")]
pub struct PlanArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// One budget for the whole process or several, such as 1GiB,2GiB, or `auto`; default: eight
    /// from the smallest that works to the whole model.
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = parse_budget)]
    pub memory: Vec<Budget>,
    /// Positions to make room for.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub context: u32,
    /// Compute threads; default: one per core, or fewer where that is faster.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Which neurons to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub sparsity: SparsityArg,
    /// How to read from flash: auto, uring, pread, or sim:PROFILE.
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub io: String,
    /// Prompt tokens computed at once; default: the plan's choice.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub chunk: Option<u16>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Write expected speed over budget as SVG.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// `doctor`
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// A model or folder whose file system is looked at; default: the current folder.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

fn parse_read_size(text: &str) -> Result<ReadSize, String> {
    if text == "seq" {
        return Ok(ReadSize::Sequential);
    }
    match size::parse(text)? {
        n if (4096..=16 << 20).contains(&n) && n.is_multiple_of(4096) => {
            Ok(ReadSize::Random(n as u32))
        }
        n => Err(format!(
            "a read of {n} bytes, expected a multiple of 4KiB up to 16MiB"
        )),
    }
}

fn parse_budget(text: &str) -> Result<Budget, String> {
    if text == "auto" {
        Ok(Budget::Auto)
    } else {
        size::parse(text).map(Budget::Bytes)
    }
}

pub(crate) fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(v) if (0.0..=1.0).contains(&v) => Ok(v),
        _ => Err(format!("{text:?} is not a share between 0 and 1")),
    }
}

/// A share given in percent, with or without the sign.
fn parse_share_percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(v) if v > 0.0 && v <= 100.0 => Ok(v / 100.0),
        _ => Err(format!("{text:?} is no percentage above 0 and at most 100")),
    }
}

fn parse_sector(text: &str) -> Result<u32, String> {
    match size::parse(text)? {
        n @ (512 | 1024 | 2048 | 4096) => Ok(n as u32),
        n => Err(format!(
            "a sector of {n} bytes, expected 512, 1024, 2048 or 4096"
        )),
    }
}
