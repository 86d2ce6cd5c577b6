//! The laboratory's command line.

mod bench;
mod trace;

use clap::{Args, Parser, Subcommand};
use emberflow::cli::{BenchDecodeArgs, EngineArgs, LabArgs, PerplexityArgs, PointArgs};

pub use self::bench::*;
pub use self::trace::*;
use crate::synth::SynthArgs;

/// Emberflow's laboratory: measures, draws, simulates, reproduces papers.
#[derive(Debug, Parser)]
#[command(name = "emberflow-lab", version, arg_required_else_help = true, after_help = AFTER_HELP)]
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
    /// Generate text, as emberflow run does, with what else can be measured of it.
    #[command(
        alias = "point",
        after_help = "\
Examples:
  emberflow-lab run model.ember -p \"Once\" --ablation no-cache --json --details
  emberflow-lab run -n 16 --ffn-resident 0.45 --trace trace.json
  emberflow-lab run demo-moe -p \"A trait\" --ffn-resident 0.5 --read-ahead off --io sim:ufs4"
    )]
    Run(Box<PointArgs>),
    /// Write a random checkpoint of a real model's shape with given activation statistics.
    Synth(SynthArgs),
    /// Record which neurons a real run needs, and replay that against caches.
    #[command(
        subcommand,
        after_help = "\
Examples:
  emberflow-lab trace record -f text.txt -o text.trace
  emberflow-lab trace simulate text.trace"
    )]
    Trace(TraceCommand),
    /// Speed of the kernels that decoding and prompts use, beside that of memory.
    Kernels(KernelsArgs),
    /// What the bookkeeping of the neuron cache takes, beside an access to memory.
    Cache(CacheArgs),
    /// What naming the neurons of each layer takes, beside the speed of memory, and how good it is.
    Predictor(PredictorArgs),
    /// Hold a container's predictors against what the gates of a text do, by layer, and give the
    /// perplexity with and without them.
    #[command(after_help = "\
Example:
  emberflow-lab judge named.ember -f heldout.txt --window 512")]
    Judge(JudgeArgs),
    /// As emberflow bench decode, also with a perfect predictor.
    #[command(after_help = "\
Example:
  emberflow-lab decode model.ember --oracle --json")]
    Decode(DecodeArgs),
    /// One token as a picture: what every thread, the I/O thread and the device did when.
    Timeline(TimelineArgs),
    /// What bundles, cache and pipeline give, one after the other.
    Ablation(AblationArgs),
    /// How long single tokens take, and what they wait for.
    Latency(LatencyArgs),
    /// Speed of prompts with a part of the FFN on disk, beside memory.
    Prefill(PrefillArgs),
    /// Several texts at once: tokens per second, and what they share.
    Batch(BatchArgs),
    /// Requests at random times: latency of interactive ones beside background work.
    Serve(ServeArgs),
    /// How the GPU and the NPU of a phone, as published, would share the products of a model: simulated.
    Split(SplitArgs),
    /// Measure the processor and the memory, for this program itself.
    #[command(hide = true)]
    MeasureMachine,
    /// A command of the program emberflow, for tests.
    #[command(subcommand, hide = true)]
    Program(Box<emberflow::cli::Command>),
}

/// How the engine is run, and how it is measured.
#[derive(Debug, Clone, Args)]
pub struct LabEngineArgs {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    lab: LabArgs,
}

impl LabEngineArgs {
    /// Both together.
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
    /// The text, and how its model is run.
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
    /// Take the active neurons for granted, as recorded in a first run over the same tokens: what a
    /// perfect predictor without costs would give. Needs resident Gate rows.
    #[arg(long)]
    oracle: bool,
}

impl DecodeArgs {
    /// What is decoded, and how.
    pub fn into_decode(mut self) -> BenchDecodeArgs {
        self.lab.apply(&mut self.decode.engine);
        self.decode.oracle = self.oracle;
        self.decode
    }
}
