//! `emberflow serve`: an HTTP server with OpenAI's, Anthropic's, Ollama's and llama.cpp's APIs.
//!
//! ```text
//! HTTP thread (http.rs ─► generate.rs) ── jobs ──► engine thread (worker.rs ─► Stepper)
//!              ◄──────────── text, piece by piece ─────────────┘
//! ```
//!
//! The memory budget includes the KV cache of `--parallel` requests of `--context` positions and the bodies of all
//! requests that may wait; further requests get status 429. The output of a request does not depend on other
//! requests.

mod api;
mod app;
mod bounds;
mod calls;
mod connections;
mod costs;
mod embeddings;
mod error;
pub mod fields;
mod generate;
mod http;
mod idle;
mod infill;
mod input_items;
mod job;
mod lines;
mod log_probs;
mod messages;
mod messages_api;
mod metrics;
mod native;
mod native_api;
mod ollama;
mod ollama_api;
mod openapi;
mod out;
mod page;
mod peer;
mod reply;
mod response_items;
mod response_tools;
mod responses;
mod responses_api;
mod rules;
mod sampling;
pub mod schedule;
pub mod shared;
mod slot_order;
mod slots_api;
mod snapshot;
pub mod spoken;
mod stats;
pub mod stops;
mod stored;
mod submit;
mod thoughts;
mod turn;
mod whole_calls;
pub mod worker;

pub use self::rules::{Compiler, command as check_grammar};
use self::schedule::Scheduling;

use std::io::{IsTerminal, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;
use std::time::Instant;

use emberflow_engine::{Error, Model, Text};
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;

use self::app::App;
use self::calls::{CallFormat, shows_tools};
use self::connections::Routers;
use self::shared::Shared;
use self::stored::{ResponseFolder, ResponseStore};
use self::worker::Work;
use crate::cli::ServeArgs;
use crate::hub::{self, Workload};
use crate::model::{Use, open_model, open_serving};
use crate::states::StateFolder;
use crate::tell::tell;
use crate::template::{self, Renderer};
use crate::{Failure, budget};

/// Default context length.
const CONTEXT: usize = 2048;
/// Maximum bytes of a body: a constant part, and a part per position of the context.
const BODY: usize = 64 << 10;
const BODY_PER_POSITION: usize = 16;
/// Copies of a body in memory while it is read, parsed and tokenized.
const COPIES: u64 = 3;
/// Bodies parsed and tokenized at once. Small values of parsed JSON take up to 80 times their bytes, which fits in
/// the memory reserved for the bodies of waiting requests.
const READERS: usize = 1;
/// Stack size of threads that parse and compile client input; unused pages take no memory.
const STACK: usize = 16 << 20;
/// Additional connections for health checks, metrics and the web UI.
const EXTRA_CONNECTIONS: usize = 32;
/// Memory for finished responses: a constant part, and a part per byte of a body, so that the longest one fits.
const STORE: usize = 1 << 20;
const STORED_BODIES: usize = 2;
/// Responses take one part of so many of `--state-size`.
const RESPONSES: u64 = 16;
/// Bytes of the chat templates of a model that is not here yet: most are shorter.
const TEMPLATE: usize = 16 << 10;
/// Memory of a server when it opens its model, more than that of a plan: threads, and what serves HTTP.
const STARTED: u64 = 2 << 20;
/// Connections that wait until they are accepted, at most.
const BACKLOG: u32 = 1024;
/// Memory of the HTTP side without requests.
const HTTP: u64 = 8 << 20;

/// Runs the command.
///
/// # Errors
/// The model cannot be opened, the address is not available, or a read fails.
pub fn command(mut args: ServeArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine, args.force)?;
    if args.api_key.as_deref() == Some("") {
        return Err(Failure::usage(
            "the API key is empty (--api-key, EMBERFLOW_API_KEY): set one, or unset it for no key",
        ));
    }
    let address = address(&args.host, args.port)?;
    if args.api_key.is_none() && !address.ip().is_loopback() {
        tracing::warn!(
            "no --api-key: anyone who can reach {} can use this server",
            args.host
        );
    }
    // Before a download. Until it listens, connections are refused.
    let socket = bind(address).map_err(cannot_listen(address))?;
    let workload = workload(&args);
    hub::localize_served(&mut args, workload)?;
    let args = &args;
    let model = open_model(&args.model)?;
    let max = model.text().config().max_context as usize;
    let context = args.context.map_or(CONTEXT.min(max), |c| c as usize);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(2)
        .thread_stack_size(STACK)
        .build()?;
    let shared = Arc::new(Shared::default());
    let (sender, jobs) = channel();
    let app = app(args, &model, context, shared.clone(), sender)?;
    let template = app.template.as_ref();
    let template = template.map_or(0, |template| template.memory(app.body_limit));
    let reserve = reserve(args, context, template);
    let listener = runtime
        .block_on(async { socket.listen(BACKLOG) })
        .map_err(cannot_listen(address))?;
    let address = listener.local_addr()?;
    let closing = shared.clone();
    let http = Builder::new().name("ember-http".into());
    let http = http.spawn(move || runtime.block_on(listen(listener, app, closing)))?;
    let wanted = Use {
        context,
        prompt: 0,
        batch: args.parallel.into(),
        spans: 0,
        reserve,
        drafts: args.drafts.clone(),
        force: args.force,
    };
    let mut engine = open_serving(model, &args.engine, &wanted).inspect_err(|e| {
        if matches!(e, Failure::Engine(Error::BudgetTooSmall { .. })) {
            tracing::warn!(
                "smaller --parallel, --context, --queue and --grammars need less memory"
            );
        }
    })?;
    let size = args.state_size - args.state_size / RESPONSES;
    let states = (args.state_dir.as_ref())
        .map(|path| StateFolder::open(path, size, &engine))
        .transpose()?;
    if let Some(states) = &states {
        tracing::info!(positions = states.positions(), "saved state");
    }
    worker::work(
        &mut engine,
        &jobs,
        &shared,
        Scheduling::Classes,
        states,
        || {
            // Standard output may be closed.
            let _ = writeln!(std::io::stdout(), "http://{address}");
            if std::io::stderr().is_terminal() {
                tell("emberflow: open this address in a browser to chat; Ctrl-C stops the server");
            }
        },
    )?;
    match http.join() {
        Ok(served) => Ok(served?),
        Err(_) => Err(Failure::Fault("the HTTP thread panicked".to_owned())),
    }
}

/// Takes an address before the model is read. Of two servers that start at once, the second learns only when it listens that
/// the address is in use.
fn bind(address: SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    // Connections of a server that has just ended do not matter.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

fn cannot_listen(address: SocketAddr) -> impl FnOnce(std::io::Error) -> Failure {
    move |e| {
        Failure::usage(format!(
            "cannot listen on {address}: {e}; choose another --port"
        ))
    }
}

/// What a model that is not here yet has to run for.
fn workload(args: &ServeArgs) -> Workload {
    let context = args.context.map_or(CONTEXT, |c| c as usize);
    let template = template::memory((body_limit(context) + TEMPLATE) as u64);
    Workload {
        memory: args.engine.memory,
        context: u32::try_from(context).unwrap_or(u32::MAX),
        requests: Some(args.parallel),
        reserve: reserve(args, context, template) + STARTED,
    }
}

/// Maximum bytes of a body.
const fn body_limit(context: usize) -> usize {
    BODY + BODY_PER_POSITION * context
}

/// Bytes of the store of responses.
const fn response_limit(context: usize) -> usize {
    STORE + STORED_BODIES * body_limit(context)
}

/// Memory of the HTTP side, if chat templates take `template` bytes.
fn reserve(args: &ServeArgs, context: usize, template: u64) -> u64 {
    let requests = usize::from(args.parallel) + usize::from(args.queue);
    let responses = response_limit(context) as u64;
    let log_probs = u64::from(args.parallel) * submit::RESULT_BYTES as u64;
    let grammars = match u64::from(args.grammars) {
        0 => 0,
        texts => rules::COMPILE_BYTES + texts * rules::TEXT_BYTES,
    };
    let states = args.state_dir.as_ref().map_or(0, |_| {
        // A response that is written: its copy, its JSON and its text.
        StateFolder::MEMORY + 5 * responses
    });
    HTTP + responses
        + states
        + log_probs
        + template
        + grammars
        + (requests + EXTRA_CONNECTIONS + connections::SPARE) as u64 * connections::MEMORY
        + requests as u64 * COPIES * body_limit(context) as u64
}

/// Resolves a host; prefers IPv4, which clients try first.
fn address(host: &str, port: u16) -> Result<SocketAddr, Failure> {
    let plain = host.trim_matches(['[', ']']);
    let none = |why: String| Failure::usage(format!("--host {host}: {why}"));
    let found = (plain, port).to_socket_addrs();
    let found: Vec<SocketAddr> = found.map_err(|e| none(e.to_string()))?.collect();
    let first = found.iter().find(|address| address.is_ipv4());
    let first = first.or(found.first()).copied();
    first.ok_or_else(|| none("the name does not resolve".to_owned()))
}

/// What compiles grammars of at most `texts` requests at once. It holds the vocabulary in a form of its own.
///
/// # Errors
/// A vocabulary that grammars cannot use.
pub fn compiler(text: &Text, texts: usize) -> Result<Compiler, Failure> {
    let made = Compiler::new(rules::Vocabulary::of(text), texts);
    made.map_err(|why| Failure::usage(format!("{why}; use --grammars 0 to disable grammars")))
}

fn app(
    args: &ServeArgs,
    model: &Model,
    context: usize,
    shared: Arc<Shared>,
    jobs: Sender<Work>,
) -> Result<Arc<App>, Failure> {
    let (parallel, queue) = (usize::from(args.parallel), usize::from(args.queue));
    let text = model.text().clone();
    let compiler = match args.grammars {
        0 => None,
        texts => Some(Arc::new(compiler(&text, texts.into())?)),
    };
    let template = text.chat_template()?.map(Renderer::new);
    if template.as_ref().is_some_and(|of| !shows_tools(of)) {
        tracing::warn!(
            "the model's chat template has no tools: requests with `tools` get an answer, but the model does not see them \
             (docs/serve.md)"
        );
    }
    let stem = |path: &Path| path.file_stem().map(|s| s.to_string_lossy().into_owned());
    let file = args.model.model.as_deref().and_then(stem);
    let responses = (args.state_dir.as_ref())
        .map(|path| ResponseFolder::open(&path.join("responses"), args.state_size / RESPONSES))
        .transpose()?;
    Ok(Arc::new(App {
        shared,
        jobs,
        saves_state: args.state_dir.is_some(),
        calls: (template.as_ref())
            .map_or_else(CallFormat::default, |of| CallFormat::of_model(&text, of)),
        template,
        text,
        model: (args.alias.clone().or(file)).unwrap_or_else(|| "demo".to_owned()),
        size: model.container().file_len(),
        format: ollama_api::format(model.container()),
        context,
        parallel,
        queue,
        compiler,
        permits: Arc::new(Semaphore::new(parallel + queue)),
        readers: Arc::new(Semaphore::new(READERS)),
        body_limit: body_limit(context),
        responses: Arc::new(ResponseStore::new(response_limit(context)).saving(responses)),
        digest: ollama_api::digest(model.container().identity()),
        key: args.api_key.clone(),
        origin: args.allow_origin.clone(),
        hosts: args
            .allow_host
            .iter()
            .chain([&args.host])
            .cloned()
            .collect(),
        strict_model: args.strict_model,
        created: app::now(),
        started: Instant::now(),
        count: AtomicU64::new(0),
    }))
}

/// Serves until a stop signal.
async fn listen(
    listener: TcpListener,
    app: Arc<App>,
    shared: Arc<Shared>,
) -> Result<(), std::io::Error> {
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        shared.close();
    };
    let doors = Routers {
        most: connections(&app),
        crowded: http::crowded(app.clone()),
        router: http::router(app, routes()),
    };
    connections::serve(listener, doors, stop).await;
    Ok(())
}

/// Routes besides OpenAI's API.
fn routes() -> axum::Router<Arc<App>> {
    let others = [
        embeddings::routes(),
        input_items::routes(),
        messages_api::routes(),
        native_api::routes(),
        responses_api::routes(),
        slots_api::routes(),
    ];
    (others.into_iter()).fold(ollama_api::routes(), axum::Router::merge)
}

/// Maximum connections: one per request, plus [`EXTRA_CONNECTIONS`].
fn connections(app: &App) -> usize {
    app.parallel + app.queue + EXTRA_CONNECTIONS
}
