//! `bench` and its arguments.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use emberflow_engine::Ablation;

use super::{
    EngineArgs, ModelArg, ReadSize, SparsityArg, io_names, parse_device, parse_read_size,
    parse_share_percent, policy_names,
};
use crate::size;

/// `bench`
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Speed of the device by read size, depth, address range and engine.
    Io(BenchIoArgs),
    /// Speed of the processor and the memory, for plans: a few seconds, saved.
    Device(BenchDeviceArgs),
    /// Speed of the kernels that decoding and prompts use, beside that of memory.
    Kernels(BenchKernelsArgs),
    /// What the bookkeeping of the neuron cache takes, beside an access to memory.
    Cache(BenchCacheArgs),
    /// What naming the neurons of each layer takes, beside the speed of memory, and how good it is.
    Predictor(BenchPredictorArgs),
    /// Speed of decoding, where the time goes, and its share of the speed of memory.
    Decode(BenchDecodeArgs),
    /// One token as a picture: what every thread, the I/O thread and the device did when.
    Timeline(BenchTimelineArgs),
    /// Decoding with more and less of the FFN in memory, by policy.
    Sweep(BenchSweepArgs),
    /// What bundles, cache and pipeline give, one after the other.
    Ablation(BenchAblationArgs),
    /// How long single tokens take, and what they wait for.
    Latency(BenchLatencyArgs),
    /// Speed of prompts with a part of the FFN on disk, beside memory.
    Prefill(BenchPrefillArgs),
    /// Several texts at once: tokens per second, and what they share.
    Batch(BenchBatchArgs),
    /// Requests at random times: latency of interactive ones beside background work.
    Serve(BenchServeArgs),
    /// How the GPU and the NPU of a phone, as published, would share the products of a model: simulated.
    Split(BenchSplitArgs),
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

/// `bench ablation`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench ablation model.ember
  emberflow bench ablation model.ember --io sim:ufs4 -n 8 --rounds 2 --svg ladder.svg")]
pub struct BenchAblationArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub bench: BenchArgs,
    /// Devices: auto and pread are the real one, sim:PROFILE a simulated one.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "sim:ufs4,sim:ufs31,auto",
        value_parser = io_names()
    )]
    pub io: Vec<String>,
    /// Share of the FFN in memory, in percent.
    #[arg(long, value_name = "SHARE", default_value = "50", value_parser = parse_share_percent)]
    pub share: f64,
    /// A device for a last step: as for run.
    #[arg(long, value_name = "DEVICE", value_parser = parse_device)]
    pub device: Option<String>,
}

/// `bench latency`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench latency model.ember -n 1024
  emberflow bench latency model.ember --shares 25,50,75 --policies full,llmflash --svg tokens.svg")]
pub struct BenchLatencyArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub bench: BenchArgs,
    /// Shares of the FFN in memory, in percent.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "50", value_parser = parse_share_percent)]
    pub shares: Vec<f64>,
    /// Policies (see run --help).
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "full",
        value_parser = policy_names()
    )]
    pub policies: Vec<Ablation>,
    /// How to read from flash; sim plays a device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
    pub io: String,
}

/// `bench prefill`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench prefill model.ember --lengths 128,512
  emberflow bench prefill model.ember --share 25 --chunks 64,256 --json")]
pub struct BenchPrefillArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub bench: BenchArgs,
    /// Tokens of the prompts, about; default: 128 and 512, as far as the model goes.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub lengths: Vec<u32>,
    /// Prompt tokens computed at once; 0: what the planner chooses.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0", value_parser = clap::value_parser!(u16).range(0..=512))]
    pub chunks: Vec<u16>,
    /// Share of the FFN in memory, in percent; measured beside 100.
    #[arg(long, value_name = "SHARE", default_value = "50", value_parser = parse_share_percent)]
    pub share: f64,
    /// How to read from flash; sim plays a device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
    pub io: String,
}

/// `bench batch`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench batch
  emberflow bench batch model.ember --sizes 1,4,16 --shares 50,100 --svg batch.svg")]
pub struct BenchBatchArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub bench: BenchArgs,
    /// Numbers of texts at once.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8",
          value_parser = clap::value_parser!(u16).range(1..=emberflow_engine::MAX_BATCH as i64))]
    pub sizes: Vec<u16>,
    /// Shares of the FFN in memory, in percent.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "50,100", value_parser = parse_share_percent)]
    pub shares: Vec<f64>,
    /// How to read from flash; sim plays a device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
    pub io: String,
}

/// What benchmarks of parts that are measured over and over in this process have in common.
#[derive(Debug, Clone, Args)]
pub struct RepeatArgs {
    /// Times that everything is measured, all in turns; default: 5.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: Option<u32>,
    /// Little time, one round: whether it works here, in seconds.
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub output: OutputArgs,
}

impl RepeatArgs {
    /// Rounds.
    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 5 })
    }
}

/// `bench kernels`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench kernels
  emberflow bench kernels --rounds 9 --out results
  EMBERFLOW_ISA=avx2 emberflow bench kernels --json

\"rows\" are read one after the other, as attention, head and Gate rows are; \"neurons\" are one in five,
the product with one row and another row added to a sum, as FFNs do it; \"products\" are those of prompts.
It takes 1 GiB of memory, or a quarter of what is free.")]
pub struct BenchKernelsArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub repeat: RepeatArgs,
}

/// `bench cache`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench cache
  emberflow bench cache --slots 4096,262144 --svg cache.svg")]
pub struct BenchCacheArgs {
    /// Neurons that the cache holds, of twice as many.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "4096,32768,262144",
          value_parser = clap::value_parser!(u32).range(64..=1 << 24))]
    pub slots: Vec<u32>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub repeat: RepeatArgs,
}

/// `bench serve`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench serve
  emberflow bench serve --simulate --minutes 1500
  emberflow bench serve model.ember --ffn-resident 0.5 --reactive 1,3,5 --svg latency.svg")]
pub struct BenchServeArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Interactive requests per scaled minute.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,3,5"
    )]
    pub reactive: Vec<f64>,
    /// Background requests per scaled minute.
    #[arg(long, value_name = "N", default_value_t = 6.0)]
    pub proactive: f64,
    /// Requests that fill a scaled minute if they run one after the other. Where this is below the
    /// number that arrives, first come, first served falls behind for good, as Agent.xpu's baselines do.
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..))]
    pub serial: u32,
    /// Scaled minutes.
    #[arg(long, value_name = "N", default_value_t = 15.0)]
    pub minutes: f64,
    /// Measure passes only, and serve in simulated time: for long traces.
    #[arg(long)]
    pub simulate: bool,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub repeat: RepeatArgs,
}

/// `bench predictor`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench predictor
  emberflow train-predictor model.ember -f text.txt -o named.ember && emberflow bench predictor named.ember
  emberflow bench predictor named.ember --threads 2 --out results

MODEL needs predictors, which the bundled one has. Recall and precision are those that train-predictor
measured; perplexity --judge measures them on another text.")]
pub struct BenchPredictorArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Compute threads; default: one per core.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub repeat: RepeatArgs,
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
    /// Take the active neurons for granted, as recorded in a first run over the same tokens: what a
    /// perfect predictor without costs would give. Needs resident Gate rows.
    #[arg(long)]
    pub oracle: bool,
    /// Positions before the first token; their keys and values are made up.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0")]
    pub contexts: Vec<usize>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub output: OutputArgs,
}

/// `bench timeline`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench timeline --ffn-resident 0.5 --svg token.svg
  emberflow bench timeline model.ember --layers 2 --svg layers.svg --json")]
pub struct BenchTimelineArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Text to continue.
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Tokens before those that are looked at.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub warm_up: usize,
    /// Draw only the first N layers.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub layers: Option<u64>,
    /// Write the picture as SVG.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long, requires = "svg")]
    pub force: bool,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
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

/// `bench split`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench split
  emberflow bench split --tokens 135,525,1000 --sync-us 400 --json")]
pub struct BenchSplitArgs {
    /// Lengths of the prompts.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "135,256,525,1000",
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub tokens: Vec<u32>,
    /// Microseconds to synchronise two processors and to copy.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub sync_us: u32,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `bench device`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench device
  emberflow bench device --json --save machine.json")]
pub struct BenchDeviceArgs {
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Save to FILE instead of where the planner looks for it
    /// ($XDG_CACHE_HOME/emberflow/machine.json).
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Replace an existing FILE.
    #[arg(long, requires = "save")]
    pub force: bool,
}
