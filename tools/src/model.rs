//! Opens models and engines from command-line arguments.

use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use emberflow_engine::lane::OpenLane;
use emberflow_engine::memory::MemoryPlan;
use emberflow_engine::planner::rates::Rates;
use emberflow_engine::{Budget, Engine, Model, Options, demo_container, open_with_heads, unpacked};
use emberflow_models::Bands;
use emberflow_storage::Error;
use emberflow_storage::container::Container;
use emberflow_storage::io::IoChoice;

use crate::cli::{DeviceArg, DraftArgs, EngineArgs, ModelArg, Named};
use crate::progress::Loading;
use crate::{Failure, budget, machine, small_model};

/// Opens the container that `arg` names, an unpacked checkpoint, or a bundled container.
pub fn open_container(arg: &ModelArg) -> Result<Container, Failure> {
    match arg.named() {
        Named::File(path) => {
            if looks_like_checkpoint(path) {
                return Ok(unpacked(path, Bands::Small)?);
            }
            let no_model = |kind, why: &str| Failure::File {
                path: path.to_owned(),
                source: std::io::Error::new(kind, format!("{why}; {MODELS}")),
            };
            if !path.exists() {
                return Err(no_model(ErrorKind::NotFound, "it does not exist"));
            }
            if path.is_dir() {
                let why = "it is a folder without a config.json";
                return Err(no_model(ErrorKind::IsADirectory, why));
            }
            Container::open(path).map_err(|error| match error {
                Error::TooShort { .. } | Error::Magic { .. } => {
                    no_model(ErrorKind::InvalidData, &what_else(path))
                }
                other => other.into(),
            })
        }
        Named::Bundled(demo) => Ok(demo_container(demo)?),
    }
}

/// What can be run.
const MODELS: &str = "a model is a GGUF file, a Hugging Face folder, a packed model, a name such as Qwen/Qwen3-8B-GGUF, or \
                      a bundled one: demo or demo-moe";

/// What a file is that is no model.
fn what_else(path: &Path) -> String {
    const SHOWN: u64 = 64;
    let mut first = Vec::new();
    // Of a file that cannot be read, nothing.
    let _ = File::open(path).and_then(|file| file.take(SHOWN).read_to_end(&mut first));
    let start = first.trim_ascii_start().to_ascii_lowercase();
    let begins = |with: &str| start.starts_with(with.as_bytes());
    // A character may be cut at the end.
    let is_text = std::str::from_utf8(&first).map_or_else(|e| e.error_len().is_none(), |_| true)
        && !first.contains(&0);
    let what = if first.is_empty() {
        "it is empty"
    } else if begins("<!doctype html") || begins("<html") {
        "it is a web page, which a failed download may leave"
    } else if begins("version https://git-lfs") {
        "it is a pointer of git-lfs, not the file itself: run `git lfs pull` in its folder"
    } else if is_text {
        "it is a text, which -f takes as the prompt"
    } else {
        let first = first[..first.len().min(8)].escape_ascii();
        return format!(
            "it begins with {first:?}, as neither GGUF files nor packed models do",
            first = first.to_string()
        );
    };
    what.to_owned()
}

/// [`open_container`] for a command that converts containers.
pub fn open_packed(arg: &ModelArg) -> Result<Container, Failure> {
    let container = open_container(arg)?;
    if container.is_outside() {
        let how = "this command needs a container: emberflow pack CHECKPOINT -o model.ember";
        let refused = Failure::file(container.path());
        return Err(refused(std::io::Error::other(how)));
    }
    Ok(container)
}

/// [`open_container`] for a command about neurons in bundles.
pub fn open_bundles(arg: &ModelArg) -> Result<Container, Failure> {
    let container = open_container(arg)?;
    if container.banks().is_empty() {
        let (path, what) = (container.path().to_path_buf(), "this command");
        return Err(emberflow_engine::Error::Unpacked { path, what }.into());
    }
    Ok(container)
}

fn looks_like_checkpoint(path: &Path) -> bool {
    let mut magic = [0; 4];
    // Opening a pipe would block until something writes to it.
    let gguf = path.is_file()
        && File::open(path)
            .and_then(|mut f| f.read_exact(&mut magic))
            .is_ok_and(|()| &magic == b"GGUF" || &magic == b"PWRI");
    gguf || path.join("config.json").is_file()
        || path.extension().is_some_and(|e| e == "safetensors")
}

/// Opens the model that `arg` names.
pub fn open_model(arg: &ModelArg) -> Result<Model, Failure> {
    Ok(Model::open(open_container(arg)?)?)
}

/// Opens an engine with room for `context` positions. With `force`, a plan may exceed free memory.
pub fn open_engine(
    model: Model,
    args: &EngineArgs,
    context: usize,
    force: bool,
) -> Result<Engine, Failure> {
    open(model, engine_options(args, context)?, force, false)
}

/// Opens an engine and shows a progress bar, unless `quiet`.
fn open(model: Model, options: Options, force: bool, quiet: bool) -> Result<Engine, Failure> {
    if !quiet {
        measure_for_people(&model, options.lab.io)?;
    }
    let mut bar = None;
    let budget = options.budget;
    // Before a plan is made, NPUs compile graphs.
    let slow = options.lane.as_ref().and_then(|lane| lane.slow_start());
    let mut starting = slow.filter(|_| !quiet).map(|what| Loading::waiting(&what));
    let planned = |plan: &MemoryPlan| {
        starting = None;
        budget::check_free_memory(budget, plan, force)?;
        bar = (!quiet).then(|| Loading::start("loading the model", plan.loaded()));
        Ok::<(), Failure>(())
    };
    let engine = open_with_heads(model, options, planned);
    drop(bar);
    engine
}

/// Measures what a plan needs at the first start, if a person runs the program and the results can be saved.
fn measure_for_people(model: &Model, io: IoChoice) -> Result<(), Failure> {
    if !std::io::stderr().is_terminal() || Rates::default_path().is_none() {
        return Ok(());
    }
    let container = model.container();
    let of_its_own = container.base() == 0 && container.path().is_file();
    let is_read = of_its_own && !matches!(io, IoChoice::Sim(_));
    machine::load_or_measure(model, is_read.then(|| container.path()))
}

/// Requirements of an engine.
pub struct Use {
    /// Positions of the context.
    pub context: usize,
    /// Tokens of the longest prompt; 0 if unknown.
    pub prompt: usize,
    /// Concurrent sequences.
    pub batch: usize,
    /// Trace spans per thread.
    pub spans: usize,
    /// Bytes that the caller will allocate itself.
    pub reserve: u64,
    /// Drafts of next tokens.
    pub drafts: DraftArgs,
    /// Whether the plan may exceed free memory.
    pub force: bool,
}

impl Use {
    /// The file of `--draft`, if it is a head of the model.
    fn head(&self) -> Result<Option<PathBuf>, Failure> {
        match &self.drafts.draft {
            Some(path) if emberflow_models::is_mtp_head(path)? => Ok(Some(path.clone())),
            _ => Ok(None),
        }
    }

    /// The model of `--draft`. It is opened first, so that the plan of the other one knows what it takes.
    fn small_model(
        &self,
        head: Option<&Path>,
        model: &Model,
        args: &EngineArgs,
    ) -> Result<Option<small_model::Opened>, Failure> {
        let Some(path) = self.drafts.draft.as_ref().filter(|_| head.is_none()) else {
            return Ok(None);
        };
        let small = open_model(&ModelArg {
            model: Some(path.clone()),
        })?;
        let text = model.text();
        small_model::open(small, text, self.context, args).map(Some)
    }
}

/// As [`open_engine`], for a given use. `quiet` hides the progress bar.
pub fn open_for(
    model: Model,
    args: &EngineArgs,
    wanted: &Use,
    quiet: bool,
) -> Result<Engine, Failure> {
    let head = wanted.head()?;
    let small = wanted.small_model(head.as_deref(), &model, args)?;
    let mut options = Options {
        prompt: wanted.prompt,
        batch: wanted.batch,
        speculation: wanted.drafts.speculate,
        head,
        reserve: wanted.reserve + small.as_ref().map_or(0, |small| small.reserve),
        ..engine_options(args, wanted.context)?
    };
    options.lab.trace = wanted.spans;
    let engine = open(model, options, wanted.force, quiet)?;
    Ok(with_drafts(engine, small))
}

/// Lets an engine use a small model.
fn with_drafts(mut engine: Engine, small: Option<small_model::Opened>) -> Engine {
    if let Some(small) = small {
        engine.set_draft(small.model);
    }
    engine
}

/// As [`open_for`], for a server, which preempts requests.
pub fn open_serving(model: Model, args: &EngineArgs, wanted: &Use) -> Result<Engine, Failure> {
    let head = wanted.head()?;
    let small = wanted.small_model(head.as_deref(), &model, args)?;
    let of_drafts = small.as_ref().map_or(0, |small| small.reserve);
    let options = Options {
        batch: wanted.batch,
        preemption: true,
        speculation: wanted.drafts.speculate,
        head,
        reserve: wanted.reserve + of_drafts,
        ..engine_options(args, wanted.context)?
    };
    let engine = open(model, options, wanted.force, false)?;
    Ok(with_drafts(engine, small))
}

/// As [`open_engine`], for a command that allocates `reserve` bytes itself.
pub fn open_reserving(
    model: Model,
    args: &EngineArgs,
    context: usize,
    reserve: u64,
    force: bool,
) -> Result<Engine, Failure> {
    open(model, reserving(args, context, reserve)?, force, false)
}

/// As [`open_engine`], with an observer on the FFNs that allocates `reserve` bytes.
pub fn open_observed(
    model: Model,
    args: &EngineArgs,
    context: usize,
    reserve: u64,
    force: bool,
) -> Result<Engine, Failure> {
    let mut options = reserving(args, context, reserve)?;
    options.lab.observe = true;
    open(model, options, force, false)
}

/// As [`open_engine`], with an observer on the routers that allocates `reserve` bytes. If the experts' activations
/// have exact zeros, active neurons of experts are counted too.
pub fn open_routed(
    model: Model,
    args: &EngineArgs,
    context: usize,
    reserve: u64,
    force: bool,
) -> Result<Engine, Failure> {
    let mut options = reserving(args, context, reserve)?;
    options.lab.count_fired = model.text().config().ffn_kind.activation.is_sparse();
    open(model, options, force, false)
}

/// Opens the devices of `--device`; `None` without any.
///
/// # Errors
/// No such device, or the driver's.
#[cfg(feature = "devices")]
pub fn open_lane(arg: &DeviceArg) -> Result<Option<Arc<dyn OpenLane>>, Failure> {
    let mut devices = Vec::new();
    for &choice in &arg.choices.0 {
        let device = crate::probe::open(choice).map_err(emberflow_engine::Error::from)?;
        devices.extend(device.map(|device| device.with_verdicts(choice.verdicts())));
    }
    let outcomes = arg.choices.0.iter().find_map(|choice| choice.verdicts());
    let devices = emberflow_devices::OnDevices::new(devices).saving_to(outcomes);
    Ok(devices.holding(arg.memory).lane())
}

/// Nobody computes beside the CPU: this program was built without devices.
#[cfg(not(feature = "devices"))]
pub fn open_lane(_: &DeviceArg) -> Result<Option<Arc<dyn OpenLane>>, Failure> {
    Ok(None)
}

/// Options of a command that allocates `reserve` bytes itself.
fn reserving(args: &EngineArgs, context: usize, reserve: u64) -> Result<Options, Failure> {
    Ok(Options {
        reserve,
        ..engine_options(args, context)?
    })
}

fn engine_options(args: &EngineArgs, context: usize) -> Result<Options, Failure> {
    Ok(Options {
        budget: match args.ffn_resident {
            Some(share) => Budget::FfnShare(share),
            None => args.memory,
        },
        threads: args.threads.unwrap_or(0).into(),
        sparsity: args.sparsity.into(),
        lock: args.lock,
        context,
        kv: args.kv.into(),
        lane: open_lane(&args.device)?,
        lab: args.lab.clone(),
        ..Options::default()
    })
}
