//! `emberflow plan OWNER/NAME`: what the models of a repository need, before one is downloaded.

use std::io::Write;

use serde::Serialize;

use super::choice::{Candidate, candidates, plan_for};
use super::client::Hub;
use super::download::Source;
use super::name::ModelName;
use super::preview::Previews;
use super::pull::no_folder;
use super::stores::OwnStore;
use super::workload::Workload;
use crate::{Failure, print_json, size};

/// Models of fewer bits that are planned after the first one that runs.
const MORE: usize = 2;

/// Output of `plan OWNER/NAME --json`.
#[derive(Serialize)]
struct RepoPlan {
    name: String,
    hub: String,
    commit: String,
    /// The one that `pull` chooses.
    chosen: Option<String>,
    models: Vec<Candidate>,
}

/// Plans for the models of a repository.
///
/// # Errors
/// No such model, no connection.
pub fn plan(name: &ModelName, workload: Workload, json: bool) -> Result<(), Failure> {
    let store = OwnStore::open().ok_or_else(no_folder)?;
    let hub = &Hub::from_env()?;
    let repo = &hub.repo(name)?;
    let source = Source { hub, name, repo };
    let mut all = candidates(name, repo)?;
    let previews = Previews::create(store.root())?;
    let found = plan_for(&mut all, &source, &previews, workload, |_| MORE)?;
    let chosen = found.map(|at| all[at].variant.label.clone());
    if json {
        return print_json(&RepoPlan {
            name: name.repo(),
            hub: hub.endpoint().to_owned(),
            commit: repo.commit.clone(),
            chosen,
            models: all,
        });
    }
    let width = all
        .iter()
        .map(|one| one.variant.label.chars().count())
        .max()
        .unwrap_or(0);
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{}, not on this machine ('emberflow pull' downloads the one with *):\n",
        name.repo()
    )?;
    for one in &all {
        let mark = if chosen.as_ref() == Some(&one.variant.label) {
            '*'
        } else {
            ' '
        };
        let line = format!(
            "{mark} {:<width$}  {:>10}  {}",
            one.variant.label,
            size::show(one.bytes),
            one.forecast_text()
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}
