//! Arguments of `bench`.

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
    /// Measure disk, CPU and memory; saved for the planner.
    Io(BenchIoArgs),
    /// Decode speed, time per stage, and speed relative to memory bandwidth.
    Decode(BenchDecodeArgs),
    /// Decode speed over the share of the FFN in memory, by policy.
    Sweep(BenchSweepArgs),
}

/// Options of benchmarks of whole runs. Each point runs in a separate process; variants are interleaved.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Tokens to generate per run; the default depends on the benchmark.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Runs of each variant, interleaved with the others; default: 3.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: Option<u32>,
    /// A smoke test in seconds: few points, few tokens, one round.
    #[arg(long)]
    pub quick: bool,
    /// Prompt.
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// CPU threads; default: as for run.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Which neurons to compute; default: as for run.
    #[arg(long, value_enum)]
    pub sparsity: Option<SparsityArg>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub output: OutputArgs,
}

/// Output options of benchmarks.
#[derive(Debug, Clone, Default, Args)]
pub struct OutputArgs {
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Write the points as CSV.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write the chart as SVG.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write MODEL-BENCH.csv, .svg and .json to this folder; without DIR, to benches/results/MACHINE
    /// below the current folder.
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    pub out: Option<Option<PathBuf>>,
    /// Replace existing files.
    #[arg(long)]
    pub force: bool,
}

impl BenchArgs {
    /// Tokens per run, by default `default`.
    pub fn tokens_or(&self, default: u32) -> u32 {
        let default = if self.quick { default.min(8) } else { default };
        self.tokens.unwrap_or(default)
    }

    /// Rounds, by default `default`.
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
    /// Policies (see run --help). `mmap` runs in a memory control group limited to the same budget, if one
    /// can be created; otherwise it would use the whole page cache.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "full,llmflash,mmap",
        value_parser = policy_names()
    )]
    pub policies: Vec<Ablation>,
    /// Tokens per run with `mmap`, which can be very slow; default: at most 8.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub mmap_tokens: Option<u32>,
    /// I/O engine; sim:NAME simulates a storage device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
    pub io: String,
    /// Add another program's speeds to the chart: CSV with the columns share, name, median, low, high, as
    /// benches/peers/offload.py writes it. Lines about Emberflow are ignored.
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
    /// A smoke test in seconds: few tokens.
    #[arg(long)]
    pub quick: bool,
    /// Context lengths to decode at; the KV cache is filled with random values.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0")]
    pub contexts: Vec<usize>,
    /// Replay the active neurons recorded in a first run over the same tokens: the speed with a perfect
    /// predictor that costs nothing. Needs resident Gate rows.
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
  emberflow bench io                            with a temporary file; saved for the planner
  emberflow bench io model.ember --save         with a model's file; saved for the planner
  emberflow bench io model.ember --json
  emberflow bench io model.ember --rounds 5 --out results
  emberflow bench io --quick --io sim:ufs4 --svg ufs4.svg")]
pub struct BenchIoArgs {
    /// Large file to read; default: a temporary file in the current folder.
    #[arg(value_name = "FILE", conflicts_with = "size")]
    pub file: Option<PathBuf>,
    /// Size of the temporary file; default: 1GiB, or 256MiB with --quick.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub size: Option<u64>,
    /// Fewer and shorter measurements, about ten seconds in total.
    #[arg(long)]
    pub quick: bool,
    /// I/O engine; auto measures all that are available, sim:NAME simulates a device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
    pub io: String,
    /// Read sizes to measure, multiples of 4KiB; `seq` for sequential reads of 1MiB.
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = parse_read_size)]
    pub sizes: Vec<ReadSize>,
    /// Queue depths to measure.
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub depths: Vec<u32>,
    /// Address ranges to measure besides the whole file; `0` for none.
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = size::parse)]
    pub ranges: Vec<u64>,
    /// Time per point and round.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub millis: Option<u32>,
    /// Measurements of each point, interleaved; default: 3, or 2 with --quick.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: Option<u32>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub output: OutputArgs,
    /// Save the device profile to FILE, or without FILE where the planner finds it
    /// ($XDG_CACHE_HOME/emberflow/device.json). A full measurement with a temporary file is always saved there, one of a
    /// FILE only on request.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub save: Option<Option<PathBuf>>,
}

impl BenchIoArgs {
    /// Whether the measurement is saved without a request: not an incomplete one, and not that of a FILE, whose device need
    /// not be that of the models.
    pub(crate) fn saves_by_itself(&self) -> bool {
        let all = self.sizes.is_empty() && self.depths.is_empty() && self.ranges.is_empty();
        self.file.is_none() && !self.quick && self.io == "auto" && all
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn only_full_measurements_with_a_file_of_their_own_are_saved_unasked() {
        let saves = |line: &str| {
            let words = ["emberflow", "bench", "io"].into_iter();
            match Cli::parse_from(words.chain(line.split_whitespace())).command {
                Command::Bench(BenchCommand::Io(args)) => args.saves_by_itself(),
                _ => panic!("{line}"),
            }
        };
        assert!(saves(""));
        for line in ["model.ember", "--quick", "--io pread", "--depths 4"] {
            assert!(!saves(line), "{line}");
        }
    }
}
