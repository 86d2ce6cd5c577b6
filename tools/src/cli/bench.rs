//! `bench` and its arguments.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use emberflow_engine::Ablation;

use super::{
    EngineArgs, ModelArg, ReadSize, SparsityArg, io_names, parse_read_size, parse_share_percent,
    policy_names,
};
use crate::size;

/// `bench`
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Speed of the disk, the CPU and the memory, for plans.
    Io(BenchIoArgs),
    /// Speed of decoding, where the time goes, and its share of the speed of memory.
    Decode(BenchDecodeArgs),
    /// Decoding with more and less of the FFN in memory, by policy.
    Sweep(BenchSweepArgs),
}

/// What benchmarks of whole runs have in common. Each point is a run of its own process; variants
/// take turns.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Tokens that each run generates; the default depends on the benchmark.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Times that each variant runs, in turns with the others; default: 3.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: Option<u32>,
    /// Few points, few tokens, one round: whether it works here, in seconds.
    #[arg(long)]
    pub quick: bool,
    /// Text to continue.
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Compute threads; default: as for run.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Which neurons to compute; default: as for run.
    #[arg(long, value_enum)]
    pub sparsity: Option<SparsityArg>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub output: OutputArgs,
}

/// Where the result of a benchmark goes.
#[derive(Debug, Clone, Default, Args)]
pub struct OutputArgs {
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Write the points as comma-separated values.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write the chart as SVG.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write points, chart and JSON to MODEL-BENCH.csv, .svg and .json in a folder; without DIR in
    /// benches/results/MACHINE, below the current folder.
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    pub out: Option<Option<PathBuf>>,
    /// Replace existing files.
    #[arg(long)]
    pub force: bool,
}

impl BenchArgs {
    /// Tokens of a run, of which the benchmark has a default.
    pub fn tokens_or(&self, default: u32) -> u32 {
        let default = if self.quick { default.min(8) } else { default };
        self.tokens.unwrap_or(default)
    }

    /// Rounds, of which the benchmark has a default.
    pub fn rounds_or(&self, default: u32) -> u32 {
        let default = if self.quick { 1 } else { default };
        self.rounds.unwrap_or(default)
    }
}

/// `bench sweep`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench sweep model.ember --svg sweep.svg
  emberflow bench sweep model.ember --shares 25,50,100 --policies full,llmflash --rounds 5
  emberflow bench sweep model.ember --beside llama-cpp.csv --out results")]
pub struct BenchSweepArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub bench: BenchArgs,
    /// Shares of the FFN in memory, in percent.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_share_percent)]
    pub shares: Vec<f64>,
    /// Policies (see run --help). `mmap` runs in a memory control group of the same budget where
    /// one can be made, as it would otherwise have the whole page cache.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "full,llmflash,mmap",
        value_parser = policy_names()
    )]
    pub policies: Vec<Ablation>,
    /// Tokens of a run with `mmap`, which can be very slow; default: at most 8.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub mmap_tokens: Option<u32>,
    /// How to read from flash; sim plays a device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
    pub io: String,
    /// Draw another program's speeds beside ours: CSV with the columns share, name, median, low,
    /// high, as benches/peers/offload.py writes it. Its lines about Emberflow are left out.
    #[arg(long, value_name = "FILE")]
    pub beside: Option<PathBuf>,
}

/// `bench decode`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench decode model.ember --sparsity dense
  emberflow bench decode model.ember --contexts 0,4096,16384 --json
  emberflow bench decode model.ember --svg where-time-goes.svg
  emberflow bench decode --quick --out results")]
pub struct BenchDecodeArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Tokens to decode at each context length; default: 32, or 8 with --quick.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Few tokens: whether it works here, in seconds.
    #[arg(long)]
    pub quick: bool,
    /// Positions before the first token; their keys and values are made up.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0")]
    pub contexts: Vec<usize>,
    /// Take the active neurons for granted, as recorded in a first run over the same tokens: what a
    /// perfect predictor without costs would give. Needs resident Gate rows.
    #[arg(skip)]
    pub oracle: bool,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub output: OutputArgs,
}

/// `bench io`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench io                            a temporary file here; saved for the planner
  emberflow bench io model.ember --json
  emberflow bench io model.ember --rounds 5 --out results
  emberflow bench io --quick --io sim:ufs4 --svg ufs4.svg")]
pub struct BenchIoArgs {
    /// A large file to read; default: a temporary one in the current folder.
    #[arg(value_name = "FILE", conflicts_with = "size")]
    pub file: Option<PathBuf>,
    /// Size of the temporary file; default: 1GiB, or 256MiB with --quick.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub size: Option<u64>,
    /// Fewer points and less time for each: some ten seconds in all.
    #[arg(long)]
    pub quick: bool,
    /// Which engine: auto takes all that work here, sim plays a device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
    pub io: String,
    /// Only these read sizes, multiples of 4KiB; `seq` stands for sequential reads of 1MiB.
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = parse_read_size)]
    pub sizes: Vec<ReadSize>,
    /// Only these numbers of reads in flight.
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub depths: Vec<u32>,
    /// Only these address ranges beside the whole file; `0` for none.
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = size::parse)]
    pub ranges: Vec<u64>,
    /// Time for each point in a round.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub millis: Option<u32>,
    /// Times that all points are measured, in turns; default: 3, or 2 with --quick.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: Option<u32>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub output: OutputArgs,
    /// Save the profile, to FILE or where the planner looks for it
    /// ($XDG_CACHE_HOME/emberflow/device.json). A full measurement of a real device is saved there
    /// anyway.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub save: Option<Option<PathBuf>>,
}
