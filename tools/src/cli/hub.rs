//! Arguments of commands about models by name: `pull`, `list` and `remove`.

use std::path::PathBuf;

use clap::Args;
use emberflow_engine::Budget;

use super::{PLAN_CONTEXT, parse_budget};

/// What a server needs besides a text: internal options of `pull` and `plan`.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct ServedArgs {
    /// Internal: concurrent requests of a server.
    #[arg(long, value_name = "N", hide = true, value_parser = clap::value_parser!(u16).range(1..))]
    pub requests: Option<u16>,
    /// Internal: bytes that are needed besides the engine.
    #[arg(long, value_name = "BYTES", hide = true, default_value_t = 0)]
    pub reserve: u64,
}

/// `pull`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow pull Qwen/Qwen3-8B-GGUF
  emberflow pull Qwen/Qwen3-8B-GGUF:Q8_0
  emberflow pull unsloth/Qwen3-30B-A3B-GGUF --memory 8GiB

Without a file, the one in Q4_K_M or nearest to it that runs in --memory.
A download that stopped goes on; a model that is here is updated.

Models go to $EMBERFLOW_MODELS, else ~/.local/share/emberflow/models.
HF_ENDPOINT names another hub, HF_TOKEN is for models that need an account,
HF_HUB_OFFLINE=1 forbids downloads.")]
pub struct PullArgs {
    /// OWNER/NAME, or OWNER/NAME:FILE with a file's name or what is special in it, such as Q4_K_M.
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Memory budget that the model is chosen for.
    #[arg(long, value_name = "SIZE|auto", default_value = "auto", value_parser = parse_budget)]
    pub memory: Budget,
    /// Print one JSON object, with the model's path.
    #[arg(long)]
    pub json: bool,
    /// Internal: end when the process that started this one ends.
    #[arg(long, hide = true)]
    pub with_parent: bool,
    /// Internal: context length in tokens.
    #[arg(long, value_name = "N", hide = true, default_value_t = PLAN_CONTEXT)]
    pub context: u32,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub served: ServedArgs,
}

/// `list`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow list
  emberflow list --json

Each line has a name for 'emberflow run', the size, whose model it is, and its path.")]
pub struct ListArgs {
    /// Print one JSON array.
    #[arg(long)]
    pub json: bool,
}

/// `remove`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow remove Qwen/Qwen3-8B-GGUF
  emberflow remove Qwen/Qwen3-8B-GGUF:Q8_0

Only files that 'emberflow pull' downloaded are deleted; models of other programs are not touched.")]
pub struct RemoveArgs {
    /// OWNER/NAME for all of its files, or OWNER/NAME:FILE for one model.
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}
