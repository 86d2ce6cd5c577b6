//! `emberflow pull`: downloads a model.

use std::io::Write;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::choice::{self, Candidate, candidates, choose, sum};
use super::client::Hub;
use super::download::{Arrived, DOWNLOADING, Source, check_space};
use super::name::ModelName;
use super::preview::Previews;
use super::repo::RemoteFile;
use super::stores::{DownloadedFile, OwnStore, modified};
use super::workload::Workload;
use crate::cli::PullArgs;
use crate::interrupt::AtStop;
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
    /// The hub; `None` if it could not be asked.
    pub hub: Option<String>,
    /// The commit of the hub.
    pub commit: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// Not a name, no such model, no connection and no model of this name here, a full disk, or damaged files.
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
    let listed = Hub::from_env().and_then(|hub| {
        let repo = hub.repo(&name)?;
        Ok((hub, repo))
    });
    let workload = Workload::of_pull(args);
    let pulled = match listed {
        Ok((hub, repo)) => {
            let source = Source {
                hub: &hub,
                name: &name,
                repo: &repo,
            };
            pull(&source, &store, workload, args.with_parent)?
        }
        Err(Failure::Unreachable(why)) => on_this_machine(&name, workload, why)?,
        Err(other) => return Err(other),
    };
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

/// A model that is here, when the hub cannot be asked for a newer version.
fn on_this_machine(name: &ModelName, workload: Workload, why: String) -> Result<Pulled, Failure> {
    let Some(found) = choice::here(name, Some(workload))? else {
        return Err(Failure::Unreachable(why));
    };
    tell(format_args!(
        "emberflow: {name}: {} is on this machine ({}); it was not compared with the hub: {why}",
        found.file, found.store
    ));
    Ok(Pulled {
        name: found.name,
        file: found.file,
        path: found.path,
        bytes: found.bytes,
        hub: None,
        commit: None,
    })
}

/// Downloads a model into a store. With `now` it is to run in its budget.
///
/// # Errors
/// No such file, nothing that runs, no connection, a full disk, or damaged files.
pub fn pull(
    source: &Source<'_>,
    store: &OwnStore,
    workload: Workload,
    now: bool,
) -> Result<Pulled, Failure> {
    let Source { hub, name, repo } = *source;
    let named = name
        .file
        .is_some()
        .then(|| candidates(name, repo))
        .transpose()?;
    let only = named.and_then(|mut all| all.pop());
    let left = only
        .as_ref()
        .map(|one| missing(store, source, one))
        .transpose()?;
    // Nothing has to be chosen if it is here.
    let (chosen, smaller) = match only.filter(|_| left.is_some_and(|left| left.is_empty())) {
        Some(one) => (one, None),
        None => choose(
            name,
            source,
            &Previews::create(store.root())?,
            workload,
            now,
        )?,
    };
    let left = missing(store, source, &chosen)?;
    if left.is_empty() {
        if store.is_unfinished(name) {
            store.publish(name, Vec::new(), |_| false, |_| Ok(()))?;
        }
        tell(format_args!(
            "emberflow: {}: {} is already downloaded",
            name.repo(),
            chosen.variant.label
        ));
    } else {
        describe(name, &chosen, smaller.as_ref());
        download(store, source, &chosen, &left)?;
    }
    let folder = store.folder_of(name);
    Ok(Pulled {
        name: name.repo(),
        path: match chosen.variant.folder {
            true => folder,
            false => folder.join(&repo.files[chosen.variant.files[0]].path),
        },
        file: chosen.variant.label,
        bytes: chosen.bytes,
        hub: Some(hub.endpoint().to_owned()),
        commit: Some(repo.commit.clone()),
    })
}

/// Tells what was chosen, and why.
fn describe(name: &ModelName, one: &Candidate, smaller: Option<&Candidate>) {
    tell(format_args!(
        "emberflow: {}: {} ({}) {}",
        name.repo(),
        one.variant.label,
        size::show(one.bytes),
        one.forecast_text()
    ));
    if let Some(other) = smaller {
        tell(format_args!(
            "emberflow: a smaller file: {}:{} ({}) {}",
            name.repo(),
            other.variant.label,
            size::show(other.bytes),
            other.forecast_text()
        ));
    }
}

/// The files of a model that are not here as the hub has them.
fn missing<'a>(
    store: &OwnStore,
    source: &Source<'a>,
    one: &Candidate,
) -> Result<Vec<&'a RemoteFile>, Failure> {
    let downloaded = store.downloaded(source.name)?;
    let folder = store.folder_of(source.name);
    let is_here = |file: &RemoteFile| {
        let checksum = file.checksum.to_string();
        let same = |other: &&DownloadedFile| other.path == file.path && other.checksum == checksum;
        downloaded
            .iter()
            .filter(same)
            .any(|other| other.is_in(&folder))
    };
    let files = one.variant.files.iter().map(|at| &source.repo.files[*at]);
    Ok(files.filter(|file| !is_here(file)).collect())
}

/// Bytes of unfinished downloads.
fn held(partials: &[PathBuf]) -> u64 {
    sum(partials
        .iter()
        .map(|path| path.metadata().map_or(0, |facts| facts.len())))
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
    let partials: Vec<PathBuf> = files.iter().map(|file| partial(file)).collect();
    let have = held(&partials);
    check_space(&folder, bytes.saturating_sub(have))?;
    let bar = progress::resumed_bytes(DOWNLOADING, bytes, have);
    if bar.is_hidden() {
        let there = match have {
            0 => String::new(),
            _ => format!("; {} are here", size::show(have)),
        };
        tell(format_args!(
            "emberflow: downloading {} from {} to {}{there}",
            size::show(bytes.saturating_sub(have)),
            source.hub.host(),
            folder.display()
        ));
    }
    let goes_on = move || {
        let have = size::show(held(&partials));
        let bytes = size::show(bytes);
        format!("{have} of {bytes} are here; the same command goes on from there")
    };
    let at_stop = AtStop::new({
        let (bar, goes_on) = (bar.clone(), goes_on.clone());
        move || {
            bar.finish_and_clear();
            tell(format_args!("emberflow: stopped; {}", goes_on()));
        }
    });
    let arrived = files
        .iter()
        .map(|file| Ok((*file, source.download(file, &partial(file), &bar)?)));
    let pairs: Result<Vec<(&RemoteFile, Arrived)>, Failure> = arrived.collect();
    drop(at_stop);
    bar.finish_and_clear();
    let pairs = pairs.map_err(|failure| match failure {
        Failure::Unreachable(why) => Failure::Unreachable(format!("{why}; {}", goes_on())),
        other => other,
    })?;
    let new = pairs.iter().map(|(file, arrived)| {
        Ok(DownloadedFile {
            path: file.path.clone(),
            bytes: file.bytes,
            modified: modified(&arrived.facts()?),
            checksum: file.checksum.to_string(),
            hub: source.hub.endpoint().to_owned(),
            commit: source.repo.commit.clone(),
        })
    });
    let new: Vec<DownloadedFile> = new.collect::<Result<_, Failure>>()?;
    // A file that is no longer in the repository would be taken for a part of the model.
    let is_listed = |path: &str| source.repo.files.iter().any(|file| file.path == path);
    let gone = |file: &DownloadedFile| {
        one.variant.folder && !is_listed(&file.path) && !file.path.ends_with(".gguf")
    };
    store.publish(source.name, new, gone, |folder| {
        pairs
            .into_iter()
            .try_for_each(|(file, arrived)| arrived.publish(&folder.join(&file.path)))
    })
}
