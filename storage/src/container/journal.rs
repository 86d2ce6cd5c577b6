//! Journal of a pack in progress: which units of the partial file are complete.
//!
//! One line per entry. A line truncated by a crash lacks its newline and is dropped; other damage
//! shows when the units are read back and compared. The first line identifies the specification.
//! The journal is also the lock: the writer of the container holds an exclusive lock on it until it
//! deletes it. If the file system has no locks, a second writer cannot be prevented; a warning says
//! so.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::error::{Error, Result};
use super::unit::Unit;
use crate::durable;

/// A journal has a few bytes per unit; a larger file is not a journal.
const MAX_JOURNAL: u64 = 64 << 20;

/// Checksums of a complete unit: xxh3 of its data, and of a bank's scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sums {
    pub data: u64,
    pub scales: u64,
}

pub(super) struct Journal {
    file: File,
    path: PathBuf,
}

impl Journal {
    /// Opens or creates the journal and locks it. Returns the units it records for the
    /// specification `spec`; none if it is new, damaged, or for another specification.
    pub fn open(path: PathBuf, target: &Path, spec: u128) -> Result<(Self, Vec<(Unit, Sums)>)> {
        let file = lock(&path, target)?;
        let mut journal = Self { file, path };
        let text = journal.read()?;
        let head = format!("emberflow-journal 1 {spec:032x}\n");
        let mut units = Vec::new();
        let mut good = 0;
        for entry in text.split_inclusive('\n') {
            let Some(fields) = entry.strip_suffix('\n') else {
                break;
            };
            if good == 0 {
                if entry != head {
                    break;
                }
            } else if let Some(unit) = parse(fields) {
                units.push(unit);
            } else if !fields.starts_with("pid ") {
                break;
            }
            good += entry.len();
        }
        journal.cut(good as u64)?;
        if good == 0 {
            journal.append(&head)?;
        }
        journal.append(&format!("pid {}\n", std::process::id()))?;
        Ok((journal, units))
    }

    fn read(&mut self) -> Result<String> {
        let mut bytes = Vec::new();
        let path = &self.path;
        Read::by_ref(&mut self.file)
            .take(MAX_JOURNAL)
            .read_to_end(&mut bytes)
            .map_err(|source| Error::File {
                path: path.clone(),
                what: "read it",
                source,
            })?;
        // Invalid UTF-8 ends the valid part, like any other damage.
        if let Err(error) = std::str::from_utf8(&bytes) {
            bytes.truncate(error.valid_up_to());
        }
        Ok(String::from_utf8(bytes).unwrap_or_default())
    }

    fn cut(&mut self, len: u64) -> Result<()> {
        let done = self
            .file
            .set_len(len)
            .and_then(|()| self.file.seek(SeekFrom::Start(len)));
        done.map(drop).map_err(|source| Error::File {
            path: self.path.clone(),
            what: "shorten it",
            source,
        })
    }

    fn append(&mut self, text: &str) -> Result<()> {
        self.file
            .write_all(text.as_bytes())
            .map_err(|source| Error::File {
                path: self.path.clone(),
                what: "write to it",
                source,
            })
    }

    /// Records complete units. Their bytes must already be on disk.
    pub fn record(&mut self, units: &[(Unit, Sums)]) -> Result<()> {
        let text: String = units
            .iter()
            .map(|(unit, Sums { data, scales })| {
                let (kind, index) = match unit {
                    Unit::Predictor => ("predictor", 0),
                    Unit::Tensor(i) => ("tensor", *i),
                    Unit::Bank(i) => ("bank", *i),
                };
                format!("{kind} {index} {data:016x} {scales:016x}\n")
            })
            .collect();
        self.append(&text)?;
        durable::sync_data(&self.file, &self.path).map_err(|source| Error::File {
            path: self.path.clone(),
            what: "flush it to disk",
            source,
        })
    }

    /// Deletes the journal; the lock ends with the file.
    pub fn remove(self) -> Result<()> {
        std::fs::remove_file(&self.path).map_err(|source| Error::File {
            path: self.path.clone(),
            what: "delete it",
            source,
        })
    }
}

/// Opens `path` and locks the file at that path *after* locking: between opening and locking, the
/// previous holder may have deleted it.
fn lock(path: &Path, target: &Path) -> Result<File> {
    let failed = |what, source| Error::File {
        path: path.to_path_buf(),
        what,
        source,
    };
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|e| failed("create it", e))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Locked {
                    path: target.to_path_buf(),
                    pid: holder(path),
                });
            }
            Err(TryLockError::Error(reason)) if durable::is_unsupported(&reason) => {
                tracing::warn!(
                    path = %target.display(), %reason,
                    "this file system has no locks; do not write this container twice at the same time"
                );
            }
            Err(TryLockError::Error(e)) => return Err(failed("lock it", e)),
        }
        let ours = file.metadata().map_err(|e| failed("inspect it", e))?;
        if let Ok(there) = std::fs::metadata(path)
            && (there.dev(), there.ino()) == (ours.dev(), ours.ino())
        {
            return Ok(file);
        }
    }
}

/// The last process that recorded its id, for the error message only.
fn holder(path: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(path).ok()?;
    let fields = text.lines().rev().find_map(|l| l.strip_prefix("pid "))?;
    fields.parse().ok()
}

fn parse(fields: &str) -> Option<(Unit, Sums)> {
    let mut words = fields.split(' ');
    let (kind, index) = (words.next()?, words.next()?.parse().ok()?);
    let unit = match kind {
        "predictor" => Unit::Predictor,
        "tensor" => Unit::Tensor(index),
        "bank" => Unit::Bank(index),
        _ => return None,
    };
    let data = u64::from_str_radix(words.next()?, 16).ok()?;
    let scales = u64::from_str_radix(words.next()?, 16).ok()?;
    Some((unit, Sums { data, scales }))
}
