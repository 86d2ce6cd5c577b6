//! Arguments of commands that run a model: `run` and `perplexity`.

use std::path::PathBuf;

use clap::Args;
use emberflow_engine::Ablation;

use super::{DraftArgs, EngineArgs, ModelArg, policy_names};

/// `run`
#[derive(Debug, Clone, Args)]
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
    /// Prompt; `-` reads standard input, without its last line ending. Without this, -f and --chat, the
    /// prompt is read from a pipe; on a terminal, MODEL starts a chat, and bundled models use a default prompt.
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file")]
    pub prompt: Option<String>,
    /// File that contains the prompt; `-` reads standard input unchanged.
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Chat with the model, using its chat template: on a terminal with a line editor and commands (/help), else one
    /// message per line of standard input. With -p or -f, one message is answered.
    #[arg(long)]
    pub chat: bool,
    /// System message for --chat.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Maximum number of tokens to generate (num_predict, --n-predict); -1 for no limit but the context.
    /// Default: 128; with --chat -1, but a loop ends the answer after 512 tokens.
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..=i64::from(u32::MAX)))]
    pub tokens: Option<i64>,
    /// File for the state of the text or chat (keys, values, recurrent state): read if it exists, so that the beginning
    /// of a prompt that is the same is not computed again and a chat continues, and written at the end.
    #[arg(long, value_name = "FILE", conflicts_with = "best_of")]
    pub session: Option<PathBuf>,
    /// Context length in tokens (num_ctx, --ctx-size). Default: prompt plus -n (with -n -1: prompt plus
    /// 2048; with --chat: 2048), at most the model's limit.
    #[arg(long, value_name = "N")]
    pub context: Option<u32>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub drafts: DraftArgs,
    /// full, or a baseline with the same output: llmflash works as LLM in a flash does; mmap uses the
    /// page cache, and checks each neuron's checksum at its first use only.
    #[arg(long, value_name = "POLICY", default_value = "full", value_parser = policy_names())]
    pub policy: Ablation,
    /// Temperature; 0 = greedy. This and the next four options default to the model's recommendation, else to
    /// greedy (or temperature 1 with --top-k, --top-p or --min-p); with --chat to 0.8, top-k 40, top-p 0.95, min-p 0.05.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temp: Option<f32>,
    /// Top-k sampling: sample from the K most likely tokens; 0 = off.
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Top-p (nucleus) sampling: sample from the most likely tokens with this cumulative probability;
    /// 1 = off.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Min-p sampling: minimum probability relative to the most likely token; 0 = off.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Penalty for recent tokens; 1 = off.
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub repeat_penalty: Option<f32>,
    /// RNG seed.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Sample N texts in one batch, with seeds S to S+N-1, and print the one with the highest mean
    /// log-probability per token. Needs a temperature above 0.
    #[arg(long, value_name = "N", conflicts_with = "chat",
          value_parser = clap::value_parser!(u16).range(1..=emberflow_engine::MAX_BATCH as i64))]
    pub best_of: Option<u16>,
    /// Ignore the end-of-text token (EOS) and continue.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Allow a --memory that this machine does not have.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object instead of text. `stop` is `eos` (end-of-text token), `complete` (stop
    /// string), `length` (-n), `context` (context full) or `caller` (Ctrl-C).
    #[arg(long)]
    pub json: bool,
    /// What to record besides the text.
    #[arg(skip)]
    pub record: Record,
}

/// What to record of a run besides its text.
#[derive(Debug, Clone, Default, Args)]
pub struct Record {
    /// Write a trace of all threads and the device in Chrome's format (about:tracing, Perfetto). Of a
    /// long run only the last part is recorded.
    #[arg(long, value_name = "FILE", conflicts_with = "chat")]
    pub trace: Option<PathBuf>,
    /// With --json: add each token's time, I/O wait, hits, reads and running hash, and the memory
    /// bandwidth.
    #[arg(long, requires = "json", conflicts_with = "chat")]
    pub details: bool,
}

/// Default of `-n`.
const TOKENS: usize = 128;

impl RunArgs {
    /// The engine options with the policy applied.
    pub fn engine(&self) -> EngineArgs {
        let mut engine = self.engine.clone();
        engine.lab.ablation = self.policy;
        engine
    }

    /// Maximum number of tokens to generate; `None` for no limit.
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
    /// Tokens per window. Each window starts with an empty context: with BOS if the model has it (counted
    /// as one of the tokens), otherwise its first token is not scored. Default: 512, or the model's limit.
    #[arg(long, value_name = "N")]
    pub window: Option<u32>,
    /// Stop after this many tokens.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..))]
    pub limit: Option<u64>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    /// Allow a --memory that this machine does not have.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}
