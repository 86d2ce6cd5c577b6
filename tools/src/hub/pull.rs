//! `emberflow pull`: downloads a model.

use std::io::Write;
use std::path::PathBuf;

use emberflow_engine::Budget;
use serde::{Deserialize, Serialize};

use super::choice::{Candidate, candidates, choose, sum};
use super::client::Hub;
use super::download::{Arrived, Source, check_space};
use super::name::ModelName;
use super::preview::Previews;
use super::repo::RemoteFile;
use super::stores::{Brought, OwnStore, modified};
use crate::cli::PullArgs;
use crate::tell::tell;
use crate::{Failure, print_json, progress, size};

/// Output of `pull --json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Pulled {
    /// The model's name.
    pub name: String,
    /// Which of its files.
    pub file: String,
    /// The file, the first part, or the folder.
    pub path: PathBuf,
    /// Bytes of all files.
    pub bytes: u64,
    /// The hub.
    pub hub: String,
    /// The commit.
    pub commit: String,
}

/// Runs the command.
///
/// # Errors
/// Not a name, no such model, no connection, a full disk, or damaged files.
pub fn command(args: &PullArgs) -> Result<(), Failure> {
    if args.with_parent {
        // Without it, nobody would wait for the model.
        let ended =
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::INT));
        ended.map_err(|e| Failure::Child(e.to_string()))?;
    }
    let name = ModelName::parse(&args.model).filter(|name| !name.is_of_ollama());
    let name = name.ok_or_else(|| {
        Failure::usage(format!(
            "{} is not the name of a model, as in Qwen/Qwen3-8B-GGUF or Qwen/Qwen3-8B-GGUF:Q4_K_M",
            args.model.display()
        ))
    })?;
    let store = OwnStore::open().ok_or_else(no_folder)?;
    let pulled = pull(
        &Hub::from_env()?,
        &store,
        &name,
        args.memory,
        args.with_parent,
    )?;
    if args.json {
        return print_json(&pulled);
    }
    writeln!(std::io::stdout().lock(), "{}", pulled.path.display())?;
    Ok(())
}

/// There is nowhere to put models.
pub fn no_folder() -> Failure {
    Failure::usage(
        "set EMBERFLOW_MODELS to a folder for models: neither XDG_DATA_HOME nor HOME is set",
    )
}

/// Downloads a model into a store. With `now` it is to run in this budget.
///
/// # Errors
/// As [`command`].
pub fn pull(
    hub: &Hub,
    store: &OwnStore,
    name: &ModelName,
    budget: Budget,
    now: bool,
) -> Result<Pulled, Failure> {
    let repo = &hub.repo(name)?;
    let source = Source { hub, name, repo };
    let named = name
        .file
        .is_some()
        .then(|| candidates(name, repo))
        .transpose()?;
    let only = named.and_then(|mut all| all.pop());
    let left = only
        .as_ref()
        .map(|one| missing(store, &source, one))
        .transpose()?;
    // Nothing has to be chosen if it is here.
    let (chosen, smaller) = match only.filter(|_| left.is_some_and(|left| left.is_empty())) {
        Some(one) => (one, None),
        None => choose(name, &source, &Previews::create(store.root())?, budget, now)?,
    };
    let left = missing(store, &source, &chosen)?;
    if left.is_empty() {
        if store.is_unfinished(name) {
            store.publish(name, Vec::new(), |_| false, |_| Ok(()))?;
        }
        tell(format_args!(
            "emberflow: {}: {} is already downloaded",
            name.repo(),
            chosen.file
        ));
    } else {
        describe(name, &chosen, smaller.as_ref());
        download(store, &source, &chosen, &left)?;
    }
    let folder = store.folder_of(name);
    Ok(Pulled {
        name: name.repo(),
        path: match chosen.variant.folder {
            true => folder,
            false => folder.join(&repo.files[chosen.variant.files[0]].path),
        },
        file: chosen.file,
        bytes: chosen.bytes,
        hub: hub.endpoint().to_owned(),
        commit: repo.commit.clone(),
    })
}

/// Tells what was chosen, and why.
fn describe(name: &ModelName, one: &Candidate, smaller: Option<&Candidate>) {
    tell(format_args!(
        "emberflow: {}: {} ({}) {}",
        name.repo(),
        one.file,
        size::show(one.bytes),
        one.outlook_text()
    ));
    if let Some(other) = smaller {
        tell(format_args!(
            "emberflow: a smaller file: {}:{} ({}) {}",
            name.repo(),
            other.file,
            size::show(other.bytes),
            other.outlook_text()
        ));
    }
}

/// The files of a model that are not here as the hub has them.
fn missing<'a>(
    store: &OwnStore,
    source: &Source<'a>,
    one: &Candidate,
) -> Result<Vec<&'a RemoteFile>, Failure> {
    let brought = store.brought(source.name)?;
    let folder = store.folder_of(source.name);
    let is_here = |file: &RemoteFile| {
        let checksum = file.checksum.to_string();
        let same = |other: &&Brought| other.path == file.path && other.checksum == checksum;
        brought
            .iter()
            .filter(same)
            .any(|other| other.is_in(&folder))
    };
    let files = one.variant.files.iter().map(|at| &source.repo.files[*at]);
    Ok(files.filter(|file| !is_here(file)).collect())
}

/// Downloads files; when all have arrived, they get their names.
fn download(
    store: &OwnStore,
    source: &Source<'_>,
    one: &Candidate,
    files: &[&RemoteFile],
) -> Result<(), Failure> {
    let folder = store.folder_of(source.name);
    let partial =
        |file: &RemoteFile| store.partial(source.name, &file.path, &file.checksum.to_string());
    let bytes = sum(files.iter().map(|file| file.bytes));
    let have = sum(files
        .iter()
        .map(|file| partial(file).metadata().map_or(0, |facts| facts.len())));
    check_space(&folder, bytes.saturating_sub(have))?;
    let bar = progress::bytes("downloading", bytes);
    if bar.is_hidden() {
        let left = size::show(bytes.saturating_sub(have));
        tell(format_args!(
            "emberflow: downloading {left} from {} to {}",
            source.hub.host(),
            folder.display()
        ));
    }
    let arrived = files
        .iter()
        .map(|file| Ok((*file, source.download(file, &partial(file), &bar)?)));
    let pairs: Vec<(&RemoteFile, Arrived)> = arrived.collect::<Result<_, Failure>>()?;
    bar.finish_and_clear();
    let new = pairs.iter().map(|(file, arrived)| {
        Ok(Brought {
            path: file.path.clone(),
            bytes: file.bytes,
            modified: modified(&arrived.facts()?),
            checksum: file.checksum.to_string(),
            hub: source.hub.endpoint().to_owned(),
            commit: source.repo.commit.clone(),
        })
    });
    let new: Vec<Brought> = new.collect::<Result<_, Failure>>()?;
    // A file that is no longer in the repository would be taken for a part of the model.
    let is_listed = |path: &str| source.repo.files.iter().any(|file| file.path == path);
    let gone = |file: &Brought| {
        one.variant.folder && !is_listed(&file.path) && !file.path.ends_with(".gguf")
    };
    store.publish(source.name, new, gone, |folder| {
        pairs
            .into_iter()
            .try_for_each(|(file, arrived)| arrived.publish(&folder.join(&file.path)))
    })
}
