//! The laboratory's command line.

mod bench;
mod phone;
mod trace;

use clap::{Args, Parser, Subcommand};
use emberflow::cli::{BenchDecodeArgs, EngineArgs, LabArgs, PerplexityArgs, PointArgs};

pub use self::bench::*;
pub use self::phone::*;
pub use self::trace::*;
use crate::synth::SynthArgs;

/// Emberflow's laboratory: measurements, charts, simulations, reproductions of papers.
#[derive(Debug, Parser)]
#[command(name = "emberflow-lab", version, arg_required_else_help = true, after_help = AFTER_HELP)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// More detail on stderr: -v plan and choices, -vv everything.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
}

const AFTER_HELP: &str = "\
Examples:
  emberflow-lab synth --shape bamboo-7b --active 0.10 -o bamboo-7b.gguf
  emberflow-lab kernels
  emberflow-lab ablation model.ember --io sim:ufs4
  emberflow-lab run model.ember -p \"Once\" --ablation no-cache --json --details

MODEL is as for the program emberflow; so are the options that both have.

Exit codes: 0 measured; 1 an error, told on stderr; 2 wrong usage, or a file to write that exists; 3
two variants differ in a bit of the logits, which none may; 130 stopped by Ctrl-C.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate text as emberflow run does, with further measurements.
    #[command(
        alias = "point",
        after_help = "\
Examples:
  emberflow-lab run model.ember -p \"Once\" --ablation no-cache --json --details
  emberflow-lab run -n 16 --ffn-resident 0.45 --trace trace.json
  emberflow-lab run demo-moe -p \"A trait\" --ffn-resident 0.5 --read-ahead off --io sim:ufs4"
    )]
    Run(Box<PointArgs>),
    /// Write a random checkpoint with the shape of a real model and given activation statistics.
    Synth(SynthArgs),
    /// Record which neurons a run needs, and replay that on caches.
    #[command(
        subcommand,
        after_help = "\
Examples:
  emberflow-lab trace record -f text.txt -o text.trace
  emberflow-lab trace simulate text.trace"
    )]
    Trace(TraceCommand),
    /// Speed of the kernels for decode and prefill, compared with memory.
    Kernels(KernelsArgs),
    /// Cost of the neuron cache's bookkeeping, compared with a memory access.
    Cache(CacheArgs),
    /// Time and quality of predicting each layer's active neurons, compared with memory speed.
    Predictor(PredictorArgs),
    /// Compare a container's predictors with the true gates of a text, layer by layer, and report
    /// the perplexity with and without them.
    #[command(after_help = "\
Example:
  emberflow-lab judge named.ember -f heldout.txt --window 512")]
    Judge(JudgeArgs),
    /// As emberflow bench decode, optionally with a perfect predictor.
    #[command(after_help = "\
Example:
  emberflow-lab decode model.ember --oracle --json")]
    Decode(DecodeArgs),
    /// Timeline of one token: every compute thread, the I/O thread and the disk.
    Timeline(TimelineArgs),
    /// Speed with bundles, cache and pipeline, added one by one.
    Ablation(AblationArgs),
    /// Latency of single tokens, and what they wait for.
    Latency(LatencyArgs),
    /// Speed of prompts with part of the FFN on disk, compared with memory.
    Prefill(PrefillArgs),
    /// Several texts at once: tokens per second, and shared neurons.
    Batch(BatchArgs),
    /// Requests at random times: latency of interactive ones next to background work.
    Serve(ServeArgs),
    /// Simulated: how a phone's GPU and NPU would share a model's products, from published times.
    Split(SplitArgs),
    /// Simulated: schedules of phones' processors from published times, compared with the papers' results.
    Phone(Box<PhoneArgs>),
    /// Measure processor and memory; used by this program itself.
    #[command(hide = true)]
    MeasureMachine(emberflow::cli::MeasureMachineArgs),
    /// Open an NPU and compare it with the CPU; used by this program itself.
    #[command(hide = true)]
    CheckNpu {
        /// The provider.
        provider: emberflow_devices::Provider,
        /// What to do in place of a comparison, as JSON.
        only: Option<String>,
    },
    /// Open an OpenCL device; used by this program itself.
    #[command(hide = true)]
    CheckOpencl {
        /// Its number; without, the first graphics processor.
        number: Option<usize>,
    },
    /// Any command of the program emberflow; used by tests.
    #[command(subcommand, hide = true)]
    Program(Box<emberflow::cli::Command>),
}

/// Engine options, and what is measured.
#[derive(Debug, Clone, Args)]
pub struct LabEngineArgs {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    lab: LabArgs,
}

impl LabEngineArgs {
    /// Engine options with those of the laboratory.
    pub fn engine(&self) -> EngineArgs {
        let mut engine = self.engine.clone();
        self.lab.apply(&mut engine);
        engine
    }
}

/// `judge`
#[derive(Debug, Args)]
pub struct JudgeArgs {
    #[command(flatten)]
    text: PerplexityArgs,
    #[command(flatten)]
    lab: LabArgs,
}

impl JudgeArgs {
    /// The text and the engine options for it.
    pub fn into_text(mut self) -> PerplexityArgs {
        self.lab.apply(&mut self.text.engine);
        self.text
    }
}

/// `decode`
#[derive(Debug, Args)]
pub struct DecodeArgs {
    #[command(flatten)]
    decode: BenchDecodeArgs,
    #[command(flatten)]
    lab: LabArgs,
    /// Use recorded active sets of a first run over the same tokens: the speed of a perfect
    /// predictor that costs nothing. Requires resident Gate rows.
    #[arg(long)]
    oracle: bool,
}

impl DecodeArgs {
    /// Decode options with those of the laboratory.
    pub fn into_decode(mut self) -> BenchDecodeArgs {
        self.lab.apply(&mut self.decode.engine);
        self.decode.oracle = self.oracle;
        self.decode
    }
}
