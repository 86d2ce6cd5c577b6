//! Which model of a repository to take: the usual format if it runs in the budget, else one with fewer bits.

use serde::{Serialize, Serializer};

use super::download::Source;
use super::name::ModelName;
use super::preview::{Forecast, Previews, forecast};
use super::repo::Repo;
use super::stores::{self, Local, ambiguous};
use super::variant::{self, Variant, by_preference, variants};
use super::workload::Workload;
use crate::tell::tell;
use crate::{Failure, size};

/// Labels that an error lists, at most.
const LISTED: usize = 40;

/// A model of a repository.
#[derive(Debug, Clone, Serialize)]
pub struct Candidate {
    /// Its files; in JSON, its label.
    #[serde(rename = "file", serialize_with = "label")]
    pub variant: Variant,
    /// Bytes of its files.
    pub bytes: u64,
    /// Its plan; none if it was not planned.
    pub forecast: Option<Forecast>,
}

fn label<S: Serializer>(variant: &Variant, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&variant.label)
}

impl Candidate {
    fn new(repo: &Repo, variant: Variant) -> Self {
        Self {
            bytes: sum(variant.files.iter().map(|at| repo.files[*at].bytes)),
            variant,
            forecast: None,
        }
    }

    /// Its plan in a few words.
    pub fn forecast_text(&self) -> String {
        self.forecast
            .as_ref()
            .map_or_else(String::new, Forecast::to_string)
    }

    fn runs(&self) -> bool {
        self.forecast.as_ref().is_some_and(Forecast::runs)
    }

    fn reads(&self) -> bool {
        let forecast = self.forecast.as_ref();
        forecast
            .and_then(Forecast::reads)
            .is_some_and(|bytes| bytes > 0)
    }
}

/// The sum of lengths that a hub may have made up.
pub fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

/// The models of a repository in order of preference; only the one that a name with a file names.
///
/// # Errors
/// There is none, or none of this name.
pub fn candidates(name: &ModelName, repo: &Repo) -> Result<Vec<Candidate>, Failure> {
    let paths: Vec<String> = repo.files.iter().map(|file| file.path.clone()).collect();
    let found = variants(&paths);
    let (all, broken): (Vec<Variant>, Vec<Variant>) =
        found.into_iter().partition(|variant| variant.complete);
    let labels = |of: &[Variant]| {
        let labels: Vec<&str> = of
            .iter()
            .take(LISTED)
            .map(|one| one.label.as_str())
            .collect();
        labels.join(", ")
    };
    if all.is_empty() {
        let files: Vec<&str> = paths.iter().take(LISTED).map(String::as_str).collect();
        let what = match broken.is_empty() {
            true => format!(
                "has no model that emberflow reads: no GGUF file and no config.json with .safetensors, only {}",
                files.join(", ")
            ),
            false => format!("lacks parts of {}", labels(&broken)),
        };
        return Err(Failure::usage(format!("{} {what}", name.repo())));
    }
    let candidate = |variant: &Variant| Candidate::new(repo, variant.clone());
    let Some(wanted) = &name.file else {
        return Ok(by_preference(&all).into_iter().map(candidate).collect());
    };
    match variant::about(&all, wanted)[..] {
        [one] => Ok(vec![candidate(one)]),
        [] => Err(Failure::usage(format!(
            "{} has no file {wanted}; it has: {}",
            name.repo(),
            labels(&all)
        ))),
        ref several => Err(ambiguous(
            name,
            several.iter().map(|one| one.label.as_str()),
        )),
    }
}

/// Plans for candidates in their order until one runs, and then for `more` of those that follow. Returns the place of the
/// one that runs.
///
/// # Errors
/// No connection, or a full disk.
pub fn plan_for(
    all: &mut [Candidate],
    source: &Source<'_>,
    previews: &Previews,
    workload: Workload,
    more: impl Fn(&Candidate) -> usize,
) -> Result<Option<usize>, Failure> {
    let mut found: Option<usize> = None;
    let mut left = all.len();
    for (at, one) in all.iter_mut().enumerate() {
        if left == 0 {
            break;
        }
        one.forecast = Some(previews.of(source, &one.variant, workload)?);
        match found {
            Some(_) => left -= 1,
            None if one.runs() => {
                found = Some(at);
                left = more(one);
            }
            None => {}
        }
    }
    Ok(found)
}

/// The model of this name on this machine. Of several, the one that suits the workload, or without one the first.
///
/// # Errors
/// A plan's process cannot be started.
pub fn here(name: &ModelName, workload: Option<Workload>) -> Result<Option<Local>, Failure> {
    let mut all = stores::find(name);
    let count = all.len();
    if count < 2 {
        return Ok(all.pop());
    }
    let of_several = |model: &Local, plan: String| {
        tell(format_args!(
            "emberflow: {name}: {}, of {count} on this machine ('emberflow list'){plan}",
            model.file
        ));
    };
    let Some(workload) = workload else {
        let first = all.swap_remove(0);
        of_several(&first, String::new());
        return Ok(Some(first));
    };
    let chosen = choose_local(all, workload)?;
    Ok(chosen.map(|(model, plan)| {
        of_several(&model, format!(": {plan}"));
        model
    }))
}

/// Of models on this machine, in order of preference, the first that runs in memory, else the one that reads least for a
/// token, else the first; with its plan.
///
/// # Errors
/// A plan's process cannot be started.
fn choose_local(all: Vec<Local>, workload: Workload) -> Result<Option<(Local, Forecast)>, Failure> {
    let mut best: Option<(Local, Forecast)> = None;
    for model in all {
        let path = std::path::absolute(&model.path).map_err(Failure::file(&model.path))?;
        let plan = forecast(&path, workload)?;
        let reads = |plan: &Forecast| plan.reads().unwrap_or(u64::MAX);
        if best
            .as_ref()
            .is_none_or(|(_, other)| reads(&plan) < reads(other))
        {
            best = Some((model, plan));
        }
        if best
            .as_ref()
            .is_some_and(|(_, plan)| plan.reads() == Some(0))
        {
            break;
        }
    }
    Ok(best)
}

/// The model to download, with its plan and that of a smaller one if weights have to be read for each token. With `now`
/// it has to run in this budget.
///
/// # Errors
/// None of them runs.
pub fn choose(
    name: &ModelName,
    source: &Source<'_>,
    previews: &Previews,
    workload: Workload,
    now: bool,
) -> Result<(Candidate, Option<Candidate>), Failure> {
    let mut all = candidates(name, source.repo)?;
    let found = plan_for(&mut all, source, previews, workload, |one| {
        usize::from(one.reads())
    })?;
    let Some(at) = found else {
        // The user named it: a budget can be chosen later, unless it is to run now.
        if let ([one], true) = (all.as_slice(), name.file.is_some() && !now)
            && matches!(one.forecast, Some(Forecast::TooLarge { .. }))
        {
            return Ok((one.clone(), None));
        }
        let reasons: Vec<String> = (all.iter().filter(|one| one.forecast.is_some()))
            .map(|one| {
                format!(
                    "\n  {} ({}): {}",
                    one.variant.label,
                    size::show(one.bytes),
                    one.forecast_text()
                )
            })
            .collect();
        return Err(Failure::Network(format!(
            "no model of {} runs here:{}",
            name.repo(),
            reasons.concat()
        )));
    };
    let smaller = all
        .get(at + 1)
        .filter(|other| other.runs() && other.bytes < all[at].bytes);
    Ok((all[at].clone(), smaller.cloned()))
}
