//! Which model of a repository to take: the usual format if it runs in the budget, else one with fewer bits.

use emberflow_engine::Budget;
use serde::Serialize;

use super::download::Source;
use super::name::ModelName;
use super::preview::{Outlook, Previews};
use super::repo::Repo;
use super::stores::ambiguous;
use super::variant::{self, Variant, by_preference, variants};
use crate::{Failure, size};

/// Labels that an error lists, at most.
const LISTED: usize = 40;

/// A model of a repository.
#[derive(Debug, Clone, Serialize)]
pub struct Candidate {
    /// Its files.
    #[serde(skip)]
    pub variant: Variant,
    /// Its label.
    pub file: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// Its plan; none if it was not planned.
    pub outlook: Option<Outlook>,
}

impl Candidate {
    fn new(repo: &Repo, variant: Variant) -> Self {
        Self {
            file: variant.label.clone(),
            bytes: sum(variant.files.iter().map(|at| repo.files[*at].bytes)),
            variant,
            outlook: None,
        }
    }

    /// The plan in a few words.
    pub fn outlook_text(&self) -> String {
        match &self.outlook {
            Some(Outlook::Runs {
                budget_bytes,
                tokens_per_s,
                in_memory,
                disk_measured,
            }) => {
                let budget = size::show(*budget_bytes);
                let held = match in_memory {
                    true => format!("fits in {budget}"),
                    false => format!("runs in {budget}, reading weights for each token"),
                };
                let guess = match *in_memory || *disk_measured {
                    true => "",
                    false => " on an assumed disk",
                };
                format!("{held}; {tokens_per_s:.1} tokens/s expected{guess}")
            }
            Some(Outlook::TooLarge { smallest_bytes }) => {
                format!("needs --memory {} or more", size::show(*smallest_bytes))
            }
            Some(Outlook::Unsupported { why }) => format!("does not run: {why}"),
            Some(Outlook::Unknown) => "a packed model; planned once it is here".to_owned(),
            None => String::new(),
        }
    }

    fn runs(&self) -> bool {
        matches!(self.outlook, Some(Outlook::Runs { .. } | Outlook::Unknown))
    }

    fn reads(&self) -> bool {
        matches!(
            self.outlook,
            Some(Outlook::Runs {
                in_memory: false,
                ..
            })
        )
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
    budget: Budget,
    more: impl Fn(&Candidate) -> usize,
) -> Result<Option<usize>, Failure> {
    let mut found: Option<usize> = None;
    let mut left = all.len();
    for (at, one) in all.iter_mut().enumerate() {
        if left == 0 {
            break;
        }
        one.outlook = Some(previews.of(source, &one.variant, budget)?);
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

/// The model to download, with its plan and that of a smaller one if weights have to be read for each token. With `now`
/// it has to run in this budget.
///
/// # Errors
/// None of them runs.
pub fn choose(
    name: &ModelName,
    source: &Source<'_>,
    previews: &Previews,
    budget: Budget,
    now: bool,
) -> Result<(Candidate, Option<Candidate>), Failure> {
    let mut all = candidates(name, source.repo)?;
    let found = plan_for(&mut all, source, previews, budget, |one| {
        usize::from(one.reads())
    })?;
    let Some(at) = found else {
        // The user named it: a budget can be chosen later, unless it is to run now.
        if let ([one], true) = (all.as_slice(), name.file.is_some() && !now)
            && matches!(one.outlook, Some(Outlook::TooLarge { .. }))
        {
            return Ok((one.clone(), None));
        }
        let reasons: Vec<String> = (all.iter().filter(|one| one.outlook.is_some()))
            .map(|one| {
                format!(
                    "\n  {} ({}): {}",
                    one.file,
                    size::show(one.bytes),
                    one.outlook_text()
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
