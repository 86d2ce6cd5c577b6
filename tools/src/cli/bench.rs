//! `bench` and its arguments.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{EngineArgs, ModelArg, io_names, parse_read_size};
use crate::size;

/// `bench`
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Speed of the device by read size, depth, address range and engine.
    Io(BenchIoArgs),
    /// Speed of the processor and the memory, for plans: a few seconds, saved.
    Device(BenchDeviceArgs),
    /// Speed of decoding, where the time goes, and its share of the speed of memory.
    Decode(BenchDecodeArgs),
    /// One token as a picture: what every thread, the I/O thread and the device did when.
    Timeline(BenchTimelineArgs),
}

/// `bench decode`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow bench decode model.ember --sparsity dense
  emberflow bench decode model.ember --contexts 0,4096,16384 --json")]
pub struct BenchDecodeArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Tokens to decode at each context length.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
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
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
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
  emberflow bench io --quick --io sim:ufs4 --svg ufs4.svg")]
pub struct BenchIoArgs {
    /// A large file to read; default: a temporary one in the current folder.
    #[arg(value_name = "FILE", conflicts_with = "size")]
    pub file: Option<PathBuf>,
    /// Size of the temporary file; default: 1GiB, or 64MiB with --quick.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub size: Option<u64>,
    /// Fewer points and less time for each: a few seconds in all.
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
    /// Time for each point.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub millis: Option<u32>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Write the curves as SVG.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Save the profile, to FILE or where the planner looks for it
    /// ($XDG_CACHE_HOME/emberflow/device.json). A full measurement of a real device is saved there
    /// anyway.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub save: Option<Option<PathBuf>>,
}

/// A kind of read.
#[derive(Debug, Clone, Copy)]
pub enum ReadSize {
    /// This many bytes, anywhere.
    Random(u32),
    /// 1 MiB after 1 MiB.
    Sequential,
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
}
