//! Arguments of benchmarks.

use std::path::PathBuf;

use clap::Args;
use emberflow::cli::{
    BenchArgs, ModelArg, OutputArgs, ablation_names, io_names, parse_share_percent,
};
use emberflow_devices::DeviceChoices;
use emberflow_engine::Ablation;

use super::LabEngineArgs;

/// `ablation`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab ablation model.ember
  emberflow-lab ablation model.ember --io sim:ufs4 -n 8 --rounds 2 --svg ladder.svg")]
pub struct AblationArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub bench: BenchArgs,
    /// I/O engines: auto and pread use the real disk, sim:PROFILE a simulated one.
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
    /// Device for a last step with the full system, as for run.
    #[arg(long, value_name = "DEVICE", value_parser = parse_device)]
    pub device: Option<String>,
}

/// `latency`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab latency model.ember -n 1024
  emberflow-lab latency model.ember --shares 25,50,75 --policies full,llmflash --svg tokens.svg")]
pub struct LatencyArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub bench: BenchArgs,
    /// Shares of the FFN in memory, in percent.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "50", value_parser = parse_share_percent)]
    pub shares: Vec<f64>,
    /// Policies: what emberflow-lab run takes for --ablation.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "full",
        value_parser = ablation_names()
    )]
    pub policies: Vec<Ablation>,
    /// I/O engine; sim:PROFILE simulates a disk.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
    pub io: String,
}

/// `prefill`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab prefill model.ember --lengths 128,512
  emberflow-lab prefill model.ember --share 25 --chunks 64,256 --json")]
pub struct PrefillArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub bench: BenchArgs,
    /// Approximate prompt lengths in tokens; default: 128 and 512, limited to the model's context.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub lengths: Vec<u32>,
    /// Prompt tokens per pass; 0 = the planner's choice.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0", value_parser = clap::value_parser!(u16).range(0..=512))]
    pub chunks: Vec<u16>,
    /// Share of the FFN in memory, in percent; 100 is measured for comparison.
    #[arg(long, value_name = "SHARE", default_value = "50", value_parser = parse_share_percent)]
    pub share: f64,
    /// I/O engine; sim:PROFILE simulates a disk.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
    pub io: String,
}

/// `batch`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab batch
  emberflow-lab batch model.ember --sizes 1,4,16 --shares 50,100 --svg batch.svg")]
pub struct BatchArgs {
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
    /// I/O engine; sim:PROFILE simulates a disk.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
    pub io: String,
}

/// Common arguments of benchmarks that measure repeatedly in this process.
#[derive(Debug, Clone, Args)]
pub struct RepeatArgs {
    /// Rounds, interleaved over all points; default: 5.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: Option<u32>,
    /// One short round, to see that it works; seconds.
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

/// `kernels`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab kernels
  emberflow-lab kernels --rounds 9 --out results
  EMBERFLOW_ISA=avx2 emberflow-lab kernels --json

\"rows\" are read one after the other, as attention, head and Gate rows are; \"neurons\" are one in five,
the product with one row and another row added to a sum, as FFNs do it; \"products\" are those of prompts.
It takes 1 GiB of memory, or a quarter of what is free.")]
pub struct KernelsArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub repeat: RepeatArgs,
}

/// `cache`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab cache
  emberflow-lab cache --slots 4096,262144 --svg cache.svg")]
pub struct CacheArgs {
    /// Neurons in the cache, out of twice as many.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "4096,32768,262144",
          value_parser = clap::value_parser!(u32).range(64..=1 << 24))]
    pub slots: Vec<u32>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub repeat: RepeatArgs,
}

/// `serve`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab serve
  emberflow-lab serve --simulate --minutes 1500
  emberflow-lab serve model.ember --ffn-resident 0.5 --reactive 1,3,5 --svg latency.svg")]
pub struct ServeArgs {
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
    /// Requests that fill a scaled minute when run one after the other. If more arrive, first come,
    /// first served never catches up, as with Agent.xpu's baselines.
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..))]
    pub serial: u32,
    /// Length of the load in scaled minutes.
    #[arg(long, value_name = "N", default_value_t = 15.0)]
    pub minutes: f64,
    /// Measure passes only, and serve in simulated time (for long traces).
    #[arg(long)]
    pub simulate: bool,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: LabEngineArgs,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub repeat: RepeatArgs,
}

/// `predictor`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab predictor
  emberflow train-predictor model.ember -f text.txt -o named.ember && emberflow-lab predictor named.ember
  emberflow-lab predictor named.ember --threads 2 --out results

MODEL needs predictors, which the bundled one has. Recall and precision are those that train-predictor
measured; emberflow-lab judge measures them on another text.")]
pub struct PredictorArgs {
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

/// `timeline`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab timeline --ffn-resident 0.5 --svg token.svg
  emberflow-lab timeline model.ember --layers 2 --svg layers.svg --json")]
pub struct TimelineArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Text to continue.
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Tokens before the traced ones.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub warm_up: usize,
    /// Draw only the first N layers.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub layers: Option<u64>,
    /// Write the timeline as SVG.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long, requires = "svg")]
    pub force: bool,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: LabEngineArgs,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `split`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab split
  emberflow-lab split --tokens 135,525,1000 --sync-us 400 --json")]
pub struct SplitArgs {
    /// Lengths of the prompts.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "135,256,525,1000",
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub tokens: Vec<u32>,
    /// Microseconds to synchronise two processors and copy.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub sync_us: u32,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Validates the name of a device.
fn parse_device(name: &str) -> Result<String, String> {
    name.parse::<DeviceChoices>().map(|_| name.to_owned())
}
