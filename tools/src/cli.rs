//! The command line. Commands and options are a contract: add, do not rename.

mod bench;
mod containers;
mod device;
mod engine;
mod hub;
mod lab;
mod profile;
mod prune_outliers;
mod run;
mod serve;
mod train_predictor;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use emberflow_engine::Budget;
use emberflow_kernels::DType;
use emberflow_storage::io::IoChoice;

pub use self::bench::*;
pub use self::containers::*;
pub use self::device::DeviceArg;
pub use self::engine::*;
pub use self::hub::*;
pub use self::lab::*;
pub use self::profile::*;
pub use self::prune_outliers::*;
pub use self::run::*;
pub use self::serve::*;
pub use self::train_predictor::*;
pub(crate) use self::values::{
    ReadSize, parse_budget, parse_read_size, parse_sector, parse_speculation, policy_names,
};
pub use self::values::{
    ablation_names, budget_text, io_names, parse_io, parse_share, parse_share_percent,
};

/// Run language models that are larger than memory.
#[derive(Debug, Parser)]
#[command(name = "emberflow", version, arg_required_else_help = true, after_help = AFTER_HELP)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// More detail on stderr: -v for decisions and their reasons, -vv for everything.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
}

const AFTER_HELP: &str = "\
Examples:
  emberflow run -p \"A vector is\"
  emberflow pack ~/models/ReluLLaMA-7B -o relullama.ember
  emberflow run relullama.ember -p \"Once\" --memory 4GiB
  emberflow run --help

MODEL defaults to the bundled dense model; demo-moe is a bundled mixture of experts.
Commands that print results accept --json.
Existing files are only replaced with --force.

Exit codes: 0 success; 1 error (see stderr); 2 wrong usage, or an output file exists; 3 a check
failed (damaged container, wrong source, weights that the chosen format cannot represent);
130 interrupted by Ctrl-C.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate text.
    Run(RunArgs),
    /// Serve a model over HTTP (OpenAI, Anthropic, Ollama and llama.cpp APIs).
    Serve(ServeArgs),
    /// Download a model by its name on Hugging Face; the file that suits the memory, unless one is named.
    Pull(PullArgs),
    /// List the models on this machine: downloaded ones, and those of Hugging Face, ollama, LM Studio and llama.cpp.
    List(ListArgs),
    /// Delete a model that `pull` downloaded.
    Remove(RemoveArgs),
    /// Convert a checkpoint (Hugging Face folder, .safetensors, .gguf) to a container; quantizes.
    Pack(PackArgs),
    /// Show what is in a container: configuration, sections, sizes, activation statistics.
    Inspect(InspectArgs),
    /// Check a container against its checksums, and optionally against its checkpoint.
    Verify(VerifyArgs),
    /// Compute the perplexity of a model on a text file.
    Perplexity(PerplexityArgs),
    /// Record how often each neuron is active on a text; merge and plot such statistics.
    Profile(ProfileArgs),
    /// Copy a container and add predictors of active neurons, trained on a text.
    TrainPredictor(TrainPredictorArgs),
    /// Copy a q8c or q4c container and prune outlier activations of as many layers as a loss of perplexity allows.
    PruneOutliers(PruneOutliersArgs),
    /// Write a container's weights as a Hugging Face folder or GGUF file.
    Export(ExportArgs),
    /// Run a benchmark.
    #[command(
        subcommand,
        after_help = "\
Examples:
  emberflow bench io                            CPU, memory and disk; saved for the planner
  emberflow bench decode model.ember
  emberflow bench sweep model.ember --out       into benches/results/MACHINE

Exit codes: 0 success; 1 error (see stderr); 2 wrong usage, or an output file exists; 3 two variants
gave different logits; 130 interrupted by Ctrl-C."
    )]
    Bench(BenchCommand),
    /// Show how a memory budget is divided and the expected speed.
    Plan(PlanArgs),
    /// Check this machine and suggest changes.
    Doctor(DoctorArgs),
    /// Print a completion script for a shell.
    Completions(CompletionsArgs),
    /// Print the manual page, or write the pages of all commands.
    Man(ManArgs),
    /// Internal: render a chat template.
    #[command(hide = true)]
    RenderTemplate,
    /// Internal: compile a grammar.
    #[command(hide = true)]
    CheckGrammar,
    /// Internal: one run of a benchmark.
    #[command(hide = true)]
    Point(Box<PointArgs>),
    /// Internal: measure the processor, the memory and a disk.
    #[command(hide = true)]
    MeasureMachine(MeasureMachineArgs),
    /// Internal: open an NPU and compare it with the CPU, or try graphs out.
    #[cfg(feature = "devices")]
    #[command(hide = true)]
    CheckNpu {
        /// The provider.
        provider: emberflow_devices::Provider,
        /// What to do in place of a comparison, as JSON.
        only: Option<String>,
    },
    /// Internal: open an OpenCL device.
    #[cfg(feature = "devices")]
    #[command(hide = true)]
    CheckOpencl {
        /// Its number; without, the first graphics processor.
        number: Option<usize>,
    },
}

/// `measure-machine`
#[derive(Debug, Args)]
pub struct MeasureMachineArgs {
    /// Formats whose kernels are measured, briefly.
    #[arg(long = "format", value_name = "FORMAT", value_parser = values::parse_format)]
    pub formats: Vec<DType>,
    /// A file whose disk is measured by a few reads.
    #[arg(long, value_name = "FILE")]
    pub disk: Option<PathBuf>,
}

/// Default of `plan --context`.
pub const PLAN_CONTEXT: u32 = 1024;

/// `plan`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow plan
  emberflow plan model.ember --memory 1GiB,2GiB,4GiB
  emberflow plan model.ember --memory 2GiB --io sim:ufs4 --json
  emberflow plan Qwen/Qwen3-8B-GGUF --memory 4GiB
  emberflow plan config.json --quant q8 --context 8192

CPU and memory, and the storage device by a few reads of the model, are measured on first use, in half a
second. emberflow bench io measures them longer.")]
pub struct PlanArgs {
    /// A model as for run; or what is not here yet: a name on Hugging Face (OWNER/NAME), whose files are compared by
    /// their headers, or the config.json of a model.
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Formats of the weights of a config.json, as for pack (auto, q4, q4k, q4c, q8, q8c, f16, f32). Default: auto.
    #[arg(long, value_name = "QUANT", value_parser = parse_quant)]
    pub quant: Option<PackQuant>,
    /// Memory budgets for the whole process, such as 1GiB,2GiB, or `auto`; default: eight steps from the smallest
    /// that works to the whole model.
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = parse_budget)]
    pub memory: Vec<Budget>,
    /// Context length in tokens.
    #[arg(long, value_name = "N", default_value_t = PLAN_CONTEXT)]
    pub context: u32,
    /// CPU threads; default: one per core, or fewer if that is faster.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Which neurons to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub sparsity: SparsityArg,
    /// I/O engine; sim:NAME simulates a storage device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = parse_io())]
    pub io: IoChoice,
    /// Devices beside the CPU, as for run: their measured times, and what they would compute.
    #[arg(long, value_name = "DEVICE[,DEVICE...][=SIZE]", default_value = "none")]
    pub device: DeviceArg,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Write expected speed over memory budget as SVG.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long, requires = "svg")]
    pub force: bool,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub served: ServedArgs,
}

/// `doctor`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow doctor
  emberflow doctor /mnt/fast/model.ember --json
  emberflow doctor --retry-devices")]
pub struct DoctorArgs {
    /// A file or folder on the file system to check; default: the current folder.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Discard the stored results for devices ($XDG_CACHE_HOME/emberflow/devices.json, and graphs of NPUs) and test all
    /// devices again, including those that failed.
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
    /// Shell.
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
    /// Write one page per command into this folder.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Replace existing pages.
    #[arg(long, requires = "out")]
    pub force: bool,
}
