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
mod look;
pub mod name;
pub mod preview;
pub mod pull;
pub mod repo;
pub mod stores;
pub mod variant;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use emberflow_engine::Budget;
use emberflow_models::demo::Demo;

pub use self::local::{list, remove};
pub use self::look::look;
use self::name::ModelName;
pub use self::pull::command as pull;
use self::stores::Local;
use crate::child::this_program;
use crate::cli::{BenchCommand, Command};
use crate::tell::tell;
use crate::{Failure, cli};

/// What to do for a model that is in no store.
#[derive(Debug, Clone, Copy)]
enum Otherwise {
    /// Download it, for this budget.
    Download(Budget),
    /// Say how to.
    Refuse,
    /// Go on with the name.
    Pass,
}

/// Puts paths in place of the names of models in a command.
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
            (&mut args.model.model, Download(args.engine.memory))
        }
        Command::Serve(args) => {
            if let Some(draft) = &mut args.drafts.draft {
                replace(draft, Refuse)?;
            }
            if let Some(model) = &mut args.model.model {
                let asked = name_of(model).map(|name| name.to_string());
                let named = replace(model, Download(args.engine.memory))?;
                // A file of ollama has a checksum for a name.
                args.alias = args.alias.take().or(asked.filter(|_| named));
            }
            return Ok(());
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

/// Puts a path in place of a name; whether it was one.
fn replace(model: &mut PathBuf, otherwise: Otherwise) -> Result<bool, Failure> {
    let Some(name) = name_of(model) else {
        return Ok(false);
    };
    if let Some(found) = stores::find(&name) {
        tracing::info!("{name}: {} of {}", found.path.display(), found.store);
        let all = stores::all();
        let same = |other: &&Local| other.store == found.store && other.name == found.name;
        if name.file.is_none() && all.iter().filter(same).count() > 1 {
            tell(format_args!(
                "emberflow: {name}: {}, of several on this machine ('emberflow list')",
                found.file
            ));
        }
        *model = found.path;
        return Ok(true);
    }
    // A word without a slash is a file that does not exist.
    match otherwise {
        _ if name.is_of_ollama() => Ok(false),
        Otherwise::Pass => Ok(false),
        Otherwise::Download(budget) => {
            *model = download(model, budget)?;
            Ok(true)
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
fn download(model: &Path, budget: Budget) -> Result<PathBuf, Failure> {
    let mut child = this_program();
    child
        .args(["pull", "--json", "--with-parent", "--memory"])
        .arg(cli::budget_text(budget))
        .arg(model);
    let output = child.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|e| Failure::Child(format!("cannot download: {e}")))?;
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
