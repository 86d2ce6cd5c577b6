//! Arguments of `serve`.

use std::path::PathBuf;

use clap::Args;

use super::{DraftArgs, EngineArgs, ModelArg};

/// `serve`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow serve
  emberflow serve model.ember --memory 4GiB --parallel 4 --context 4096
  curl http://127.0.0.1:8080/v1/completions -d '{\"prompt\": \"A vector is\", \"max_tokens\": 20}'

Paths: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, Ollama's /api/..., a web UI at
/, and all others that /openapi.json lists. SIGTERM or Ctrl-C ends the server; running requests get 20
seconds to finish.")]
pub struct ServeArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Address to listen on; the default accepts connections from this machine only.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 chooses a free one and prints it.
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// Concurrent requests (OLLAMA_NUM_PARALLEL, --parallel). Memory for all of them is reserved.
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u16).range(1..=emberflow_engine::MAX_BATCH as i64))]
    pub parallel: u16,
    /// Maximum number of waiting requests; further ones get status 429.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub queue: u16,
    /// Concurrent requests with a grammar, a JSON schema or a forced tool call; further ones wait. Each
    /// reserves 4 MiB of the budget. 0 rejects such requests.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub grammars: u16,
    /// Context length of each request in tokens, prompt and answer together (num_ctx, --ctx-size);
    /// default: 2048, or the model's limit.
    #[arg(long, value_name = "N")]
    pub context: Option<u32>,
    /// Folder for the state of conversations (keys, values, recurrent state), created if missing: a conversation that is
    /// continued, or a prompt that begins like an earlier one, is not computed again, also after a restart. Written
    /// while no request runs, and when a slot is saved.
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Most bytes in --state-dir, and most that are written there in a day; the least recently used make room.
    #[arg(long, value_name = "SIZE", default_value = "20GiB", value_parser = crate::size::parse, requires = "state_dir")]
    pub state_size: u64,
    /// API key that clients must send as `Authorization: Bearer KEY`.
    #[arg(
        long,
        value_name = "KEY",
        env = "EMBERFLOW_API_KEY",
        hide_env_values = true
    )]
    pub api_key: Option<String>,
    /// CORS: also allow web pages from this origin, or from any with `*`. Pages served from this machine
    /// are always allowed.
    #[arg(long, value_name = "ORIGIN")]
    pub allow_origin: Option<String>,
    /// Also accept this name in the Host header, or any with `*`. IP addresses, `--host` and names that
    /// cannot be registered (`localhost`, `server`, `server.local`) are always accepted. Repeatable.
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Model name shown to clients; default: the file name.
    #[arg(long, value_name = "NAME")]
    pub alias: Option<String>,
    /// Reject requests that name another model; without it, this model serves them.
    #[arg(long)]
    pub strict_model: bool,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub drafts: DraftArgs,
    /// Allow a --memory that this machine does not have.
    #[arg(long)]
    pub force: bool,
}
