//! The file that a measurement reads, and the proof that its device was read.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::machine::numbers;
use super::{Conditions, FileFacts, ProfileError};
use crate::io::{FileSource, IoChoice, IoOptions, IoThread};

/// Bytes of the shortest read.
const LEAST: u64 = 4096;

/// Share of the bytes read that the device must have delivered.
const GIVEN: f64 = 0.9;

/// The kernel's read counters of a file's device.
fn counters(meta: &Metadata) -> PathBuf {
    let (major, minor) = numbers(meta.dev());
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}/stat"))
}

/// The file to read.
#[derive(Debug)]
pub struct Target {
    file: File,
    pub(super) facts: FileFacts,
    /// The kernel's counters of its device; may be absent.
    counters: PathBuf,
    /// Bytes of the file that are on the device.
    held: u64,
}

impl Target {
    /// An existing file, opened read-only.
    ///
    /// # Errors
    /// [`ProfileError::File`] if it cannot be opened, [`ProfileError::Small`] below 4 KiB.
    pub fn open(path: &Path) -> Result<Self, ProfileError> {
        // opening a pipe would wait for its writer
        let meta = std::fs::metadata(path).map_err(ProfileError::file(path))?;
        if meta.file_type().is_fifo() {
            let reason = std::io::Error::other("it is a pipe, which has no device");
            return Err(ProfileError::file(path)(reason));
        }
        let file = File::open(path).map_err(ProfileError::file(path))?;
        let facts = FileFacts::of(path)?;
        Self::with(file, facts)
    }

    /// A file that is already open and may be unlinked; `dir` is where it was created.
    ///
    /// # Errors
    /// As [`Target::open`].
    pub fn unnamed(file: File, dir: &Path) -> Result<Self, ProfileError> {
        let meta = file.metadata().map_err(ProfileError::file(dir))?;
        let facts = FileFacts {
            path: PathBuf::from("temporary file"),
            len: meta.len(),
            ..FileFacts::of(dir)?
        };
        Self::with(file, facts)
    }

    fn with(file: File, mut facts: FileFacts) -> Result<Self, ProfileError> {
        let needed = LEAST;
        if facts.len < needed {
            return Err(ProfileError::Small {
                path: facts.path,
                len: facts.len,
                needed,
            });
        }
        let label = facts.path.display().to_string();
        let copy = file.try_clone().map_err(ProfileError::file(&facts.path))?;
        let align = FileSource::from_file(copy, label, 0).dio_align();
        facts.sector = align.map(|a| a.offset);
        facts.memory_align = align.map(|a| a.mem);
        let meta = file.metadata().map_err(ProfileError::file(&facts.path))?;
        Ok(Self {
            file,
            facts,
            counters: counters(&meta),
            held: meta.blocks().saturating_mul(512),
        })
    }

    /// Refuses a file with holes, which are not read from any device.
    ///
    /// # Errors
    /// [`ProfileError::Holes`].
    pub fn filled(&self) -> Result<(), ProfileError> {
        if self.held < self.facts.len / 20 * 19 {
            return Err(ProfileError::Holes {
                path: self.facts.path.clone(),
                len: self.facts.len,
                held: self.held,
            });
        }
        Ok(())
    }

    /// Bytes read from its device since the system started, by any process; `None` if the kernel
    /// does not count them.
    #[must_use]
    pub fn device_bytes(&self) -> Option<u64> {
        let text = std::fs::read_to_string(&self.counters).ok()?;
        let sectors: u64 = text.split_whitespace().nth(2)?.parse().ok()?;
        sectors.checked_mul(512)
    }

    /// Checks that reads reached the device: it delivered the bytes read.
    ///
    /// # Errors
    /// [`ProfileError::NotRead`].
    pub fn proven(&self, read: u64, conditions: &Conditions) -> Result<(), ProfileError> {
        match conditions.device_bytes {
            Some(share) if share < GIVEN => Err(ProfileError::NotRead {
                path: self.facts.path.clone(),
                read,
                given: (share * read as f64) as u64,
            }),
            _ => Ok(()),
        }
    }

    /// Facts about the file.
    #[must_use]
    pub fn facts(&self) -> &FileFacts {
        &self.facts
    }

    /// Whether an engine can be opened on the file.
    ///
    /// # Errors
    /// The reason if it cannot.
    pub fn works(&self, engine: IoChoice) -> Result<(), ProfileError> {
        IoThread::spawn(self.source()?, engine, IoOptions::default())?;
        Ok(())
    }

    pub(super) fn source(&self) -> Result<FileSource, ProfileError> {
        let path = &self.facts.path;
        let file = self.file.try_clone().map_err(ProfileError::file(path))?;
        let label = path.display().to_string();
        Ok(match self.facts.sector {
            Some(_) => FileSource::from_file(file, label, 0),
            None => FileSource::buffered_only(file, label, 0),
        })
    }
}
