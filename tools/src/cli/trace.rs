//! Arguments of `profile` and `trace`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{EngineArgs, ModelArg, parse_share_percent};

/// `profile`
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "\
Examples:
  emberflow profile model.ember -f text.txt -o stats.bin --memory 2GiB
  emberflow profile merge part1.bin part2.bin -o stats.bin
  emberflow profile show stats.bin --svg stats.svg
  emberflow pack checkpoint -o model.ember --stats stats.bin

A run that was stopped goes on where it was when the same command is given again. Texts profiled on
several machines can be merged as long as each text is profiled once, with the same --window."
)]
pub struct ProfileArgs {
    /// Merge or show statistics.
    #[command(subcommand)]
    pub command: Option<ProfileCommand>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub run: ProfileRunArgs,
}

/// `profile …`
#[derive(Debug, Subcommand)]
pub enum ProfileCommand {
    /// Add up the statistics of several texts.
    Merge(ProfileMergeArgs),
    /// Print and draw statistics.
    Show(ProfileShowArgs),
}

/// `profile MODEL`
#[derive(Debug, Args)]
pub struct ProfileRunArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// The text.
    #[arg(short, long, value_name = "TEXT", required = true)]
    pub file: Option<PathBuf>,
    /// The statistics to write.
    #[arg(short, long, value_name = "STATS", required = true)]
    pub output: Option<PathBuf>,
    /// Tokens per window; each window starts afresh. Default: 256, or the model's limit.
    #[arg(long, value_name = "N")]
    pub window: Option<u32>,
    /// Stop after this many tokens.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    /// Replace existing statistics.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Behave as if stopped by Ctrl-C after this many windows, for tests.
    #[arg(long, hide = true)]
    pub stop_after: Option<u64>,
}

/// `profile merge`
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  emberflow profile merge part1.bin part2.bin -o stats.bin")]
pub struct ProfileMergeArgs {
    /// Statistics of the same model over different texts.
    #[arg(value_name = "STATS", required = true)]
    pub stats: Vec<PathBuf>,
    /// The sum.
    #[arg(short, long, value_name = "STATS")]
    pub output: PathBuf,
    /// Replace existing statistics.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `profile show`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow profile show stats.bin
  emberflow profile show stats.bin --svg stats.svg --json")]
pub struct ProfileShowArgs {
    /// Statistics.
    #[arg(value_name = "STATS")]
    pub stats: PathBuf,
    /// Draw them.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long, requires = "svg")]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `trace …`
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Run a text through a model and write down which neurons, or experts, each token needs.
    Record(TraceRecordArgs),
    /// Replay a trace against cache sizes and policies.
    Simulate(TraceSimulateArgs),
}

/// `trace record`
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  emberflow trace record -f heldout.txt -o demo.trace && emberflow trace simulate demo.trace")]
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
    pub engine: EngineArgs,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `trace simulate`
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  emberflow trace simulate demo.trace --cache 25%,50%,75% --svg misses.svg

Policies: shipped, the cache of real runs with its hot region; lru; lfu, by frequency so far; s3fifo;
belady, the optimum among those that keep what they read, which knows the future; belady-bypass, the
optimum among those that need not. Misses are counted in neurons, or in experts where a trace is of
them.")]
pub struct TraceSimulateArgs {
    /// A trace.
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// Sizes of the cache, in percent of all neurons, or of all experts.
    #[arg(long, value_name = "PERCENT,..", value_delimiter = ',', default_value = "25%,50%,75%",
          value_parser = parse_share_percent)]
    pub cache: Vec<f64>,
    /// Policies.
    #[arg(
        long,
        value_enum,
        value_name = "NAME,..",
        value_delimiter = ',',
        default_value = "shipped,lru,lfu,s3fifo,belady,belady-bypass"
    )]
    pub policy: Vec<EvictionArg>,
    /// Tokens that fill the cache before misses are counted; default: a tenth.
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

/// Which neuron leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EvictionArg {
    /// The cache of real runs.
    Shipped,
    /// The least recently used.
    Lru,
    /// The least frequently used so far.
    Lfu,
    /// S3-FIFO.
    S3fifo,
    /// The one that is needed last.
    Belady,
    /// The one that is needed last, be it the one that was just read.
    BeladyBypass,
}
