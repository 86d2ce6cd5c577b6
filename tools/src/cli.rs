//! The command line: names and flags are a contract (add, do not rename).

mod bench;
mod containers;
mod engine;
mod lab;
mod profile;
mod run;
mod serve;
mod train_predictor;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use emberflow_engine::Budget;
use emberflow_storage::io::IoChoice;

pub use self::bench::*;
pub use self::containers::*;
pub use self::engine::*;
pub use self::lab::*;
pub use self::profile::*;
pub use self::run::*;
pub use self::serve::*;
pub use self::train_predictor::*;
pub(crate) use self::values::{
    ReadSize, parse_budget, parse_read_size, parse_sector, policy_names,
};
pub use self::values::{ablation_names, io_names, parse_io, parse_share, parse_share_percent};

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
    /// Copy a container and add predictors of which neurons fire, made from a text.
    TrainPredictor(TrainPredictorArgs),
    /// Write a container's weights as an ordinary Hugging Face folder or GGUF file.
    Export(ExportArgs),
    /// Measure.
    #[command(
        subcommand,
        after_help = "\
Examples:
  emberflow bench io                            the machine and its disk; saved for plans
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
    /// One run of a benchmark, for this program itself.
    #[command(hide = true)]
    Point(Box<PointArgs>),
    /// Measure the processor and the memory, for this program itself.
    #[command(hide = true)]
    MeasureMachine,
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
    /// Context length in tokens.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub context: u32,
    /// CPU threads; default: one per core, or fewer where that is faster.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Which neurons to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub sparsity: SparsityArg,
    /// How to read from flash; sim plays a device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = parse_io())]
    pub io: IoChoice,
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
