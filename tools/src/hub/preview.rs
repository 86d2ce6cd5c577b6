//! What a model would need and how fast it would run, before its weights are downloaded.
//!
//! Headers are read by ranges into files with holes that are as long as the real ones, and `plan` plans for these.

use std::fmt;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use emberflow_models::gguf_header_len;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::client::Refused;
use super::download::Source;
use super::repo::RemoteFile;
use super::variant::Variant;
use super::workload::Workload;
use crate::child::this_program;
use crate::interrupt::Unfinished;
use crate::{Failure, size};

/// Bytes of a GGUF file that are asked for first; four times as many each time its header is longer.
const FIRST: u64 = 1 << 20;

/// Bytes of the headers and texts of a model, at most.
const MOST: u64 = 512 << 20;

/// Beginning of the names of folders for previews.
const PREFIX: &str = ".preview";

/// Age of a folder that a killed process left behind.
const STALE: Duration = Duration::from_secs(24 * 3600);

/// What a plan says of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Forecast {
    /// It runs in the budget.
    Runs {
        /// The budget.
        budget_bytes: u64,
        /// Tokens per second of one text.
        tokens_per_s: f64,
        /// Bytes of weights that are read for a token.
        bytes_read: u64,
        /// Whether there are none.
        in_memory: bool,
        /// Whether the disk's speed was measured.
        disk_measured: bool,
    },
    /// The budget is smaller than the smallest one that works.
    TooLarge {
        /// That one.
        smallest_bytes: u64,
    },
    /// It cannot run.
    Unsupported {
        /// The reason.
        why: String,
    },
    /// Files of this kind cannot be planned before they are here.
    Unknown,
}

impl Forecast {
    /// Whether it runs, as far as is known.
    pub fn runs(&self) -> bool {
        matches!(self, Self::Runs { .. } | Self::Unknown)
    }

    /// Bytes of weights that are read for a token; `None` if it does not run, or if that is not known.
    pub fn reads(&self) -> Option<u64> {
        match self {
            Self::Runs { bytes_read, .. } => Some(*bytes_read),
            _ => None,
        }
    }
}

/// In a few words.
impl fmt::Display for Forecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Runs {
                budget_bytes,
                tokens_per_s,
                in_memory,
                disk_measured,
                ..
            } => {
                let budget = size::show(*budget_bytes);
                match in_memory {
                    true => write!(f, "fits in {budget}")?,
                    false => write!(f, "runs in {budget}, reading weights for each token")?,
                }
                write!(f, "; {tokens_per_s:.1} tokens/s expected")?;
                match *in_memory || *disk_measured {
                    true => Ok(()),
                    false => f.write_str(" on an assumed disk"),
                }
            }
            Self::TooLarge { smallest_bytes } => {
                write!(f, "needs --memory {} or more", size::show(*smallest_bytes))
            }
            Self::Unsupported { why } => write!(f, "does not run: {why}"),
            Self::Unknown => f.write_str("a packed model; planned once it is here"),
        }
    }
}

/// The parts of a plan's JSON that are used.
#[derive(Deserialize)]
struct Planned {
    smallest_bytes: u64,
    plans: Vec<Budgeted>,
}

#[derive(Deserialize)]
struct Budgeted {
    memory: Memory,
    decode: Decode,
    basis: Basis,
}

#[derive(Deserialize)]
struct Memory {
    budget_bytes: u64,
}

#[derive(Deserialize)]
struct Decode {
    tokens_per_s: f64,
    bytes_read: f64,
}

#[derive(Deserialize)]
struct Basis {
    device_measured: bool,
}

/// A folder for the files with holes, on the disk where the model will be.
pub struct Previews {
    folder: TempDir,
    _unfinished: Unfinished,
}

impl Previews {
    /// A folder in `root`, which is created.
    ///
    /// # Errors
    /// I/O errors.
    pub fn create(root: &Path) -> Result<Self, Failure> {
        // Relative, it could be taken for an option.
        let root = &std::path::absolute(root).map_err(Failure::file(root))?;
        remove_stale(root);
        let folder = fs::create_dir_all(root)
            .and_then(|()| tempfile::Builder::new().prefix(PREFIX).tempdir_in(root));
        let folder = folder.map_err(Failure::file(root))?;
        Ok(Self {
            _unfinished: Unfinished::at(folder.path()),
            folder,
        })
    }

    /// The plan for a model.
    ///
    /// # Errors
    /// No connection, or a full disk.
    pub fn of(
        &self,
        source: &Source<'_>,
        variant: &Variant,
        workload: Workload,
    ) -> Result<Forecast, Failure> {
        let files: Vec<&RemoteFile> = variant
            .files
            .iter()
            .map(|at| &source.repo.files[*at])
            .collect();
        if files.iter().any(|file| file.path.ends_with(".ember")) {
            return Ok(Forecast::Unknown);
        }
        // Labels may be as long as paths.
        let folder = self.folder.path().join(variant.files[0].to_string());
        // The names matter: those of parts, and of texts in folders.
        let place = |file: &RemoteFile| match variant.folder {
            true => folder.join(&file.path),
            false => folder.join(Path::new(&file.path).file_name().unwrap_or_default()),
        };
        let mut left = MOST;
        for file in &files {
            let path = place(file);
            let parent = path.parent().unwrap_or(&folder);
            fs::create_dir_all(parent).map_err(Failure::file(parent))?;
            if let Some(forecast) = self.header(source, file, &path, &mut left)? {
                return Ok(forecast);
            }
        }
        let model = match variant.folder {
            true => folder,
            false => place(files[0]),
        };
        forecast(&model, workload)
    }

    /// Reads what precedes the weights of a file, and makes it as long as the real one; what hinders a plan, if something
    /// does. `left` counts bytes down.
    fn header(
        &self,
        source: &Source<'_>,
        file: &RemoteFile,
        path: &Path,
        left: &mut u64,
    ) -> Result<Option<Forecast>, Failure> {
        let unsupported = |why: String| {
            Ok(Some(Forecast::Unsupported {
                why: printable(&why),
            }))
        };
        let made = File::create(path);
        let mut to = made.map_err(Failure::file(path))?;
        let mut have = 0;
        let ending = Path::new(&file.path).extension().and_then(|e| e.to_str());
        let mut wanted = match ending {
            Some("gguf") => FIRST,
            Some("safetensors") => 8,
            _ => file.bytes,
        };
        loop {
            wanted = wanted.min(file.bytes);
            let more = wanted - have;
            if more > *left {
                return unsupported(format!(
                    "{}: what precedes the weights is too long",
                    file.path
                ));
            }
            *left -= more;
            let Some(part) = fetch(source, file, have, wanted)? else {
                return Ok(Some(Forecast::Unknown));
            };
            to.write_all(&part).map_err(Failure::file(path))?;
            let at_first = have == 0;
            have = wanted;
            wanted = match ending {
                Some("gguf") => match gguf_header_len(path) {
                    Ok(Some(_)) => break,
                    Ok(None) => have * 4,
                    Err(error) => {
                        return unsupported(
                            error
                                .to_string()
                                .replace(&path.display().to_string(), &file.path),
                        );
                    }
                },
                Some("safetensors") if at_first => match <[u8; 8]>::try_from(part.as_slice()) {
                    Ok(length) => u64::from_le_bytes(length).saturating_add(8),
                    Err(_) => break,
                },
                _ => break,
            };
            if have >= file.bytes {
                return unsupported(format!("{}: its header does not end", file.path));
            }
        }
        match to.set_len(file.bytes) {
            Err(e) if matches!(e.kind(), ErrorKind::FileTooLarge | ErrorKind::InvalidInput) => {
                let bytes = size::show(file.bytes);
                unsupported(format!(
                    "{}: {bytes} are more than the file system takes",
                    file.path
                ))
            }
            done => done.map(|()| None).map_err(Failure::file(path)),
        }
    }
}

/// Removes folders that killed processes left behind.
fn remove_stale(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let written = entry.metadata().and_then(|facts| facts.modified());
        let old = written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > STALE));
        if old && entry.file_name().to_string_lossy().starts_with(PREFIX) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A text of others for a terminal.
fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// The bytes of a file from `from` to `to`; `None` from a hub that does not send parts of files.
fn fetch(
    source: &Source<'_>,
    file: &RemoteFile,
    from: u64,
    to: u64,
) -> Result<Option<Vec<u8>>, Failure> {
    if from == to {
        return Ok(Some(Vec::new()));
    }
    source.hub.again(|| {
        let answer = source
            .hub
            .open(source.name, source.repo, file, from, Some(to))?;
        if answer.status().as_u16() != 206 && from > 0 {
            return Ok(None);
        }
        let part = source.hub.body(answer, to - from)?;
        match part.len() as u64 == to - from {
            true => Ok(Some(part)),
            false => Err(Refused::Now(
                format!("the connection to {} ended early", source.hub.host()),
                None,
            )),
        }
    })
}

/// Plans for a model in a process of its own, so that several plans do not add up to the memory of one.
///
/// # Errors
/// The process cannot be started, or its plan cannot be read.
pub fn forecast(model: &Path, workload: Workload) -> Result<Forecast, Failure> {
    let in_budget = plan(model, &workload.options(true))?;
    let any = match in_budget {
        Ok(_) => None,
        Err(_) => Some(plan(model, &workload.options(false))?),
    };
    Ok(match (in_budget, any) {
        (Ok(planned), _) => match planned.plans.first() {
            Some(plan) => Forecast::Runs {
                budget_bytes: plan.memory.budget_bytes,
                tokens_per_s: plan.decode.tokens_per_s,
                bytes_read: plan.decode.bytes_read as u64,
                in_memory: plan.decode.bytes_read < 1.0,
                disk_measured: plan.basis.device_measured,
            },
            None => Forecast::TooLarge {
                smallest_bytes: planned.smallest_bytes,
            },
        },
        (Err(_), Some(Ok(any))) => Forecast::TooLarge {
            smallest_bytes: any.smallest_bytes,
        },
        (Err(why), _) => Forecast::Unsupported { why },
    })
}

/// The plan of a process, or its message.
fn plan(model: &Path, options: &[String]) -> Result<Result<Planned, String>, Failure> {
    let mut child = this_program();
    let child = child.args(["plan", "--json"]).args(options).arg(model);
    let output = child
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Failure::Child(format!("cannot plan: {e}")))?;
    if output.status.success() {
        let planned = serde_json::from_slice(&output.stdout);
        return planned
            .map(Ok)
            .map_err(|e| Failure::Child(format!("cannot read a plan: {e}")));
    }
    let folder = model.parent().unwrap_or(model).display().to_string();
    let told = String::from_utf8_lossy(&output.stderr);
    let why = told
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix("emberflow: "));
    let why = why
        .unwrap_or("planning failed")
        .replace(&format!("{folder}/"), "");
    Ok(Err(why))
}
