//! The command line: names and flags are a contract (add, do not rename).

mod bench;
mod containers;
mod engine;
mod run;
mod serve;
mod trace;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use emberflow_engine::Budget;

pub use self::bench::*;
pub use self::containers::*;
pub use self::engine::*;
pub use self::run::*;
pub use self::serve::*;
pub use self::trace::*;
pub(crate) use self::values::{
    ReadSize, io_names, parse_budget, parse_device, parse_read_size, parse_sector, parse_share,
    parse_share_percent, policy_names,
};
use crate::synth::{firing, shape};
use crate::train_predictor::TrainPredictorArgs;

/// Run language models that are larger than memory.
#[derive(Debug, Parser)]
#[command(name = "emberflow", version, arg_required_else_help = true, after_help = AFTER_HELP)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// More detail on stderr: -v what was chosen and why, -vv everything.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
}

const AFTER_HELP: &str = "\
Examples:
  emberflow run -p \"A vector is\"
  emberflow pack ~/models/ReluLLaMA-7B -o relullama.ember
  emberflow run relullama.ember -p \"Once\" --memory 4GiB
  emberflow run --help

Every MODEL defaults to the dense model bundled in the program; demo-moe is the other one, with experts.
Every command that reports takes --json.
No command replaces a file that it is to write, unless --force is given.

Exit codes: 0 done; 1 an error, told on stderr; 2 wrong usage, or a file to write that exists; 3 a
fault found (a damaged container, not the given source, weights that the chosen format cannot hold);
130 stopped by Ctrl-C.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate text.
    Run(RunArgs),
    /// Answer requests over HTTP, as OpenAI's interface has them.
    Serve(ServeArgs),
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
    #[command(
        subcommand,
        after_help = "\
Examples:
  emberflow trace record -f text.txt -o text.trace
  emberflow trace simulate text.trace"
    )]
    Trace(TraceCommand),
    /// Copy a container and add predictors of which neurons fire, made from a text.
    TrainPredictor(TrainPredictorArgs),
    /// Write a container's weights as an ordinary Hugging Face folder or GGUF file.
    Export(ExportArgs),
    /// Write a random checkpoint of a real model's shape with given activation statistics.
    Synth(SynthArgs),
    /// Measure.
    #[command(
        subcommand,
        after_help = "\
Examples:
  emberflow bench device
  emberflow bench kernels
  emberflow bench io model.ember
  emberflow bench decode model.ember
  emberflow bench sweep model.ember --out       into benches/results/MACHINE

Exit codes: 0 measured; 1 an error, told on stderr; 2 wrong usage, or a file to write that exists; 3 two
variants differ in a bit of the logits, which none may; 130 stopped by Ctrl-C."
    )]
    Bench(BenchCommand),
    /// Say how a model would be run under a budget, and how fast.
    Plan(PlanArgs),
    /// Say what this machine offers and what to change.
    Doctor(DoctorArgs),
    /// Print a script that lets a shell complete commands, options and values.
    Completions(CompletionsArgs),
    /// Print the manual page, or write the pages of all commands.
    Man(ManArgs),
    /// Render a chat template, for this program itself.
    #[command(hide = true)]
    RenderTemplate,
    /// Compile a grammar, for this program itself.
    #[command(hide = true)]
    CheckGrammar,
}

/// `synth`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow synth --shape tiny -o tiny-hf
  emberflow synth --shape bamboo-7b --active 0.10 -o bamboo-7b.gguf
  emberflow synth --shape llama-7b --act relu --skew opt-30b --active 0.10 --quant q8_0 -o a.gguf
  emberflow synth --shape qwen3-30b-a3b --layers 6 --reuse 0.3 -o experts.gguf

llama.cpp loads the GGUF files too, and computes SiLU where another activation is asked for: the
architecture's name implies it there, the key emberflow.hidden_act says otherwise here.")]
pub struct SynthArgs {
    /// Whose dimensions.
    #[arg(long, value_enum, value_name = "NAME")]
    pub shape: shape::Shape,
    /// Mean share of neurons that fire per token (for drelu: gate and up positive; gates alone fire
    /// 1.25 times as often); default: as published for the activation. Not for silu, whose neurons all
    /// count.
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
    /// Share of a layer's experts that takes 90 % of its routes; default: as published for the shape,
    /// or Qwen3-30B-A3B's 65 of 128.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub popular: Option<f64>,
    /// Share of a token's experts that the next token visits too; default: as published for the
    /// shape, or Qwen3-30B-A3B's 0.433.
    #[arg(long, value_name = "P", value_parser = parse_share)]
    pub reuse: Option<f64>,
    /// Layers; default: those of the shape's model. Fewer make a smaller file with layers as large.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub layers: Option<u16>,
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
    /// How to read from flash; sim plays a device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
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
    /// Replace an existing file.
    #[arg(long, requires = "svg")]
    pub force: bool,
}

/// `doctor`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow doctor
  emberflow doctor /mnt/fast/model.ember --json
  emberflow doctor --retry-devices")]
pub struct DoctorArgs {
    /// A model or folder whose file system is looked at; default: the current folder.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Forget what is known of OpenCL devices ($XDG_CACHE_HOME/emberflow/devices.json) and try them anew,
    /// also those that computed wrong results.
    #[arg(long)]
    pub retry_devices: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `completions`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow completions bash > ~/.local/share/bash-completion/completions/emberflow
  emberflow completions zsh > ~/.zfunc/_emberflow
  emberflow completions fish > ~/.config/fish/completions/emberflow.fish")]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// `man`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow man | man -l -
  emberflow man --out ~/.local/share/man/man1")]
pub struct ManArgs {
    /// Write a page for each command into this folder.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Replace pages that are there.
    #[arg(long, requires = "out")]
    pub force: bool,
}
