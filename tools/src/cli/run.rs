//! Arguments of commands that run a model: `run` and `perplexity`.

use std::path::PathBuf;

use clap::Args;
use emberflow_engine::Ablation;

use super::{EngineArgs, ModelArg, policy_names};

/// `run`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow run -p \"A vector is\" -n 80
  emberflow run --ffn-resident 0.45             bundled model, most of its FFN left on disk
  emberflow run model.ember -f prompt.txt --temp 0.7 --top-p 0.9 --seed 7
  emberflow run model.ember < prompt.txt
  emberflow run model.ember --chat --memory 4GiB
  emberflow run -p \"A trait\" -n 48 --temp 0.8 --best-of 4
  emberflow run model.ember -p \"Hello\" --json")]
pub struct RunArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Text to continue; `-` for standard input, without its last line end. Where neither this nor -f
    /// nor --chat is given, the prompt is what comes through a pipe; else the bundled model has one.
    #[arg(short, long, value_name = "TEXT", conflicts_with_all = ["file", "chat"])]
    pub prompt: Option<String>,
    /// File with the text to continue; `-` for standard input, as it is.
    #[arg(short, long, value_name = "FILE", conflicts_with = "chat")]
    pub file: Option<PathBuf>,
    /// Talk to the model with its chat template, one message per line of standard input.
    #[arg(long)]
    pub chat: bool,
    /// System message for --chat.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Most tokens to generate (num_predict, --n-predict); -1 goes on to the end of the text or of the
    /// context. Default: 128, and -1 for --chat.
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..=i64::from(u32::MAX)))]
    pub tokens: Option<i64>,
    /// Context length in tokens (num_ctx, --ctx-size); default: prompt plus -n (for -n -1: 2048 more
    /// than the prompt; for --chat: 2048), at most the model's limit.
    #[arg(long, value_name = "N")]
    pub context: Option<u32>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    /// full, or a baseline with the same answers to compare with: llmflash, as LLM in a flash works;
    /// mmap, the system's page cache, which checks a neuron when it is first used, and not what the
    /// system drops and reads again.
    #[arg(long, value_name = "POLICY", default_value = "full", value_parser = policy_names())]
    pub policy: Ablation,
    /// Temperature; 0 = greedy. This and the next four default to what the checkpoint
    /// recommends, else to greedy (to temperature 1 with --top-k, --top-p or --min-p).
    #[arg(long, value_name = "T")]
    pub temp: Option<f32>,
    /// Keep the K likeliest tokens; 0 = all.
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Keep the likeliest tokens that together have this probability (nucleus sampling).
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Drop tokens less likely than this share of the likeliest; 0 = none.
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Repeat penalty: weaken tokens that were used recently; 1 = off.
    #[arg(long, value_name = "R")]
    pub repeat_penalty: Option<f32>,
    /// Seed of the random choices.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Draw N texts at once, with seeds S to S+N-1, and give the one whose tokens have the highest
    /// mean log-probability. Needs a temperature above 0.
    #[arg(long, value_name = "N", conflicts_with = "chat",
          value_parser = clap::value_parser!(u16).range(1..=emberflow_engine::MAX_BATCH as i64))]
    pub best_of: Option<u16>,
    /// Go on after an end-of-text token (EOS).
    #[arg(long)]
    pub ignore_eos: bool,
    /// Take a --memory that this machine does not have.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object instead of text; its `stop` says why the text ended: `eos` (end-of-text
    /// token), `length` (-n), `context` (full) or `caller` (Ctrl-C).
    #[arg(long)]
    pub json: bool,
    /// What is written down beside the text.
    #[arg(skip)]
    pub record: Record,
}

/// What is written down of a run beside its text.
#[derive(Debug, Clone, Default, Args)]
pub struct Record {
    /// Record what every thread and the device did when, and write it at the end in Chrome's trace
    /// format (about:tracing, Perfetto). The last part of a long run is kept.
    #[arg(long, value_name = "FILE", conflicts_with = "chat")]
    pub trace: Option<PathBuf>,
    /// With --json: also each token's time, waiting, hits and reads, the hash so far, and the speed
    /// of memory.
    #[arg(long, requires = "json", conflicts_with = "chat")]
    pub details: bool,
}

/// Most tokens where none are given.
const TOKENS: usize = 128;

impl RunArgs {
    /// How the engine is to be run.
    pub fn engine(&self) -> EngineArgs {
        let mut engine = self.engine.clone();
        engine.lab.ablation = self.policy;
        engine
    }

    /// Most tokens to generate; `None`: to the end of the text or of the context.
    pub fn most_tokens(&self) -> Option<usize> {
        match self.tokens {
            None if self.chat => None,
            None => Some(TOKENS),
            Some(n) => usize::try_from(n).ok(),
        }
    }
}

/// `perplexity`
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  emberflow perplexity model.ember -f heldout.txt --window 512")]
pub struct PerplexityArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// The text.
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Tokens per window. Each window starts afresh: with the start token (BOS) where the model has
    /// one, which counts as one of its tokens; else its first token is not scored. Default: 512, or
    /// the model's limit.
    #[arg(long, value_name = "N")]
    pub window: Option<u32>,
    /// Stop after this many tokens.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..))]
    pub limit: Option<u64>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    /// Take a --memory that this machine does not have.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}
