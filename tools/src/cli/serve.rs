//! Arguments of `serve`.

use clap::Args;

use super::{EngineArgs, ModelArg};

/// `serve`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow serve
  emberflow serve model.ember --memory 4GiB --parallel 4 --context 4096
  curl http://127.0.0.1:8080/v1/completions -d '{\"prompt\": \"A vector is\", \"max_tokens\": 20}'

Paths: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, Ollama's /api/..., a page at
/, and what /openapi.json lists. SIGTERM or Ctrl-C ends the server: running requests have 20 seconds.")]
pub struct ServeArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// Address or name of this machine to listen on; the default is reachable from this machine only.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one, which is printed.
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// Requests that run at once (OLLAMA_NUM_PARALLEL, --parallel); the memory plan has room for all
    /// of them.
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u16).range(1..=emberflow_engine::MAX_BATCH as i64))]
    pub parallel: u16,
    /// Requests that may wait beside those that run; more are refused with status 429.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub queue: u16,
    /// Texts at once that a grammar, a JSON schema or a forced tool may hold; each takes 4 MiB of the
    /// budget, others wait. 0 refuses them.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub grammars: u16,
    /// Context length of each request in tokens, prompt and answer (num_ctx, --ctx-size); default: 2048
    /// or the model's limit.
    #[arg(long, value_name = "N")]
    pub context: Option<u32>,
    /// Key that clients must send as `Authorization: Bearer KEY`.
    #[arg(
        long,
        value_name = "KEY",
        env = "EMBERFLOW_API_KEY",
        hide_env_values = true
    )]
    pub api_key: Option<String>,
    /// Also answer web pages from this origin, or from all with `*`; pages of this machine may
    /// always ask.
    #[arg(long, value_name = "ORIGIN")]
    pub allow_origin: Option<String>,
    /// Also answer requests to this name, or to all with `*`; addresses, `--host` and names that nobody
    /// can register (`localhost`, `server`, `server.local`) are always answered. May be repeated.
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Name of the model for clients; default: its file's name.
    #[arg(long, value_name = "NAME")]
    pub alias: Option<String>,
    /// Refuse requests that name another model; without it the only model serves them.
    #[arg(long)]
    pub strict_model: bool,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    /// Take a --memory that this machine does not have.
    #[arg(long)]
    pub force: bool,
}
