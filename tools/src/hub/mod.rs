//! Models by name: `OWNER/NAME[:FILE]`.
//!
//! A name is looked up in the [stores] on this machine. If none has it, `run` and `serve` download it: the files of the
//! repository are listed ([client], [repo]), grouped into models ([variant]), and the one that suits the budget is chosen
//! ([choice]) by a plan made of its header ([preview]). [download] brings it into this program's store.
//!
//! A path that exists is never taken for a name.

pub mod choice;
pub mod client;
pub mod download;
mod local;
pub mod name;
mod plan;
pub mod preview;
pub mod pull;
pub mod repo;
pub mod stores;
pub mod variant;
mod workload;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use emberflow_models::demo::Demo;
use rustix::process::{Pid, Signal, kill_process};

pub use self::local::{list, remove};
use self::name::ModelName;
pub use self::plan::plan;
pub use self::pull::command as pull;
pub use self::workload::Workload;
use crate::Failure;
use crate::child::this_program;
use crate::cli::{BenchCommand, Command, ServeArgs};
use crate::interrupt::AtStop;

/// Longest wait for the end of a download that was stopped.
const TO_STOP: Duration = Duration::from_secs(5);

/// What to do for a model that is in no store.
#[derive(Debug, Clone, Copy)]
enum Otherwise {
    /// Download it, to run for this.
    Download(Workload),
    /// Say how to.
    Refuse,
    /// Go on with the name.
    Pass,
}

/// Puts paths in place of the names of models in a command, except `serve`, which does it after it has its address.
///
/// # Errors
/// A model that is in no store, or errors of its download.
pub fn localize(command: &mut Command) -> Result<(), Failure> {
    use Otherwise::{Download, Pass, Refuse};
    let (model, otherwise) = match command {
        Command::Run(args) => {
            if let Some(draft) = &mut args.drafts.draft {
                replace(draft, Refuse)?;
            }
            let workload = Workload::text(args.engine.memory, args.context);
            (&mut args.model.model, Download(workload))
        }
        Command::Inspect(args) => (&mut args.model.model, Refuse),
        Command::Verify(args) => (&mut args.model.model, Refuse),
        Command::Perplexity(args) => (&mut args.model.model, Refuse),
        Command::Profile(args) => (&mut args.run.model.model, Refuse),
        Command::TrainPredictor(args) => (&mut args.model.model, Refuse),
        Command::PruneOutliers(args) => (&mut args.model.model, Refuse),
        Command::Export(args) => (&mut args.model.model, Refuse),
        Command::Plan(args) => (&mut args.model, Pass),
        Command::Bench(BenchCommand::Decode(args)) => (&mut args.model.model, Refuse),
        Command::Bench(BenchCommand::Sweep(args)) => (&mut args.bench.model.model, Refuse),
        Command::Pack(args) => return replace(&mut args.checkpoint, Refuse).map(drop),
        _ => return Ok(()),
    };
    match model {
        Some(model) => replace(model, otherwise).map(drop),
        None => Ok(()),
    }
}

/// Puts paths in place of the names of models of a server. Its model is called by its name: a file of ollama has a checksum
/// for one.
///
/// # Errors
/// As [`localize`].
pub fn localize_served(args: &mut ServeArgs, workload: Workload) -> Result<(), Failure> {
    if let Some(draft) = &mut args.drafts.draft {
        replace(draft, Otherwise::Refuse)?;
    }
    if let Some(model) = &mut args.model.model {
        let name = replace(model, Otherwise::Download(workload))?;
        args.alias = args.alias.take().or(name.map(|name| name.to_string()));
    }
    Ok(())
}

/// Puts a path in place of a name; the name, if it was one.
fn replace(model: &mut PathBuf, otherwise: Otherwise) -> Result<Option<ModelName>, Failure> {
    let Some(name) = name_of(model) else {
        return Ok(None);
    };
    let workload = match otherwise {
        Otherwise::Download(workload) => Some(workload),
        _ => None,
    };
    if let Some(found) = choice::here(&name, workload)? {
        tracing::info!("{name}: {} of {}", found.path.display(), found.store);
        *model = found.path;
        return Ok(Some(name));
    }
    // A word without a slash is a file that does not exist.
    match otherwise {
        _ if name.is_of_ollama() => Ok(None),
        Otherwise::Pass => Ok(None),
        Otherwise::Download(workload) => {
            *model = download(model, workload)?;
            Ok(Some(name))
        }
        Otherwise::Refuse => Err(Failure::usage(format!(
            "{name} is neither a file nor a model on this machine; to download it: emberflow pull {name}"
        ))),
    }
}

/// The name in a model argument; `None` for what exists, and for bundled models.
pub fn name_of(model: &Path) -> Option<ModelName> {
    let bundled = || {
        Demo::ALL
            .into_iter()
            .any(|demo| model.as_os_str() == demo.name())
    };
    let is_path = model.symlink_metadata().is_ok() || bundled();
    (!is_path).then(|| ModelName::parse(model))?
}

/// Downloads in a process of its own: the memory of plans does not count as that of a run.
fn download(model: &Path, workload: Workload) -> Result<PathBuf, Failure> {
    let mut child = this_program();
    child
        .args(["pull", "--json", "--with-parent"])
        .args(workload.options(true))
        .arg(model);
    let failed = |e| Failure::Child(format!("cannot download: {e}"));
    let child = child.stdin(Stdio::null()).stdout(Stdio::piped());
    let child = child.spawn().map_err(failed)?;
    let pid = Pid::from_child(&child);
    // It says where the download goes on, and then this process ends, too.
    let at_stop = AtStop::new(move || {
        let _ = kill_process(pid, Signal::INT);
        std::thread::sleep(TO_STOP);
    });
    let output = child.wait_with_output().map_err(failed)?;
    drop(at_stop);
    if !output.status.success() {
        // It has said why.
        let code = output
            .status
            .code()
            .and_then(|code| u8::try_from(code).ok());
        return Err(Failure::Reported(code.unwrap_or(1)));
    }
    let pulled: pull::Pulled =
        serde_json::from_slice(&output.stdout).map_err(std::io::Error::from)?;
    Ok(pulled.path)
}
