//! Arguments of `trace`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use emberflow::cli::{ModelArg, parse_share_percent};

use super::LabEngineArgs;

/// `trace …`
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Run a text through a model and record which neurons or experts each token needs.
    Record(Box<TraceRecordArgs>),
    /// Replay a trace on caches of several sizes and policies.
    Simulate(TraceSimulateArgs),
}

/// `trace record`
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  emberflow-lab trace record -f heldout.txt -o demo.trace && emberflow-lab trace simulate demo.trace")]
pub struct TraceRecordArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// The text.
    #[arg(short, long, value_name = "TEXT")]
    pub file: PathBuf,
    /// The trace to write.
    #[arg(short, long, value_name = "TRACE")]
    pub output: PathBuf,
    /// Replace an existing trace.
    #[arg(long)]
    pub force: bool,
    /// Tokens per sequence; default: the model's limit, at most 1024.
    #[arg(long, value_name = "N")]
    pub window: Option<u32>,
    /// Stop after this many tokens.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: LabEngineArgs,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `trace simulate`
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  emberflow-lab trace simulate demo.trace --cache 25%,50%,75% --svg misses.svg

Policies: shipped, the cache of real runs with its hot region; lru; lfu, by frequency so far; s3fifo;
belady, the optimum among those that keep what they read, which knows the future; belady-bypass, the
optimum among those that need not. Misses are counted in neurons, or in experts where a trace is of
them.")]
pub struct TraceSimulateArgs {
    /// A trace.
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// Cache sizes, in percent of all neurons or experts.
    #[arg(long, value_name = "PERCENT,..", value_delimiter = ',', default_value = "25%,50%,75%",
          value_parser = parse_share_percent)]
    pub cache: Vec<f64>,
    /// Eviction policies.
    #[arg(
        long,
        value_enum,
        value_name = "NAME,..",
        value_delimiter = ',',
        default_value = "shipped,lru,lfu,s3fifo,belady,belady-bypass"
    )]
    pub policy: Vec<EvictionArg>,
    /// Tokens that fill the cache before misses are counted; default: a tenth of the trace.
    #[arg(long, value_name = "N")]
    pub warm_up: Option<u64>,
    /// Draw the miss curves.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long, requires = "svg")]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Eviction policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EvictionArg {
    /// The engine's cache.
    Shipped,
    /// Least recently used.
    Lru,
    /// Least frequently used, over all uses so far.
    Lfu,
    /// S3-FIFO.
    S3fifo,
    /// Belady's optimum: evicts the neuron needed last.
    Belady,
    /// Belady's optimum that may also drop the neuron just read.
    BeladyBypass,
}
