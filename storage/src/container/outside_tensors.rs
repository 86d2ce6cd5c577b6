//! Tensors that lie in files of another format.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use super::error::{Error, Result};
use crate::io::FileSource;

/// Reads rows of tensors that lie in other files.
pub trait OutsideTensors: std::fmt::Debug + Send + Sync {
    /// Fills `dst` with rows of tensor number `tensor`, from row `first` on.
    ///
    /// # Errors
    /// If the files cannot be read, or have changed.
    fn read(&self, tensor: usize, first: usize, dst: &mut [u8]) -> io::Result<()>;
}

/// What a container knows of such files.
#[derive(Debug)]
pub(super) struct OutsideFiles {
    pub reader: Arc<dyn OutsideTensors>,
    /// Where each tensor begins, as [`FileSource::offset_of`]; `None` if its rows are not stored one after another.
    pub places: Vec<Option<u64>>,
    pub files: Vec<OutsideFile>,
}

/// A file, and its length and last change when it was opened.
#[derive(Debug)]
pub(super) struct OutsideFile {
    path: PathBuf,
    file: Arc<File>,
    state: (u64, Option<SystemTime>),
}

impl OutsideFile {
    pub fn new(path: PathBuf, file: Arc<File>) -> Result<Self> {
        match state(&file) {
            Ok(state) => Ok(Self { path, file, state }),
            Err(source) => Err(Error::File {
                path,
                what: "inspect it",
                source,
            }),
        }
    }

    /// The file, to share.
    pub fn again(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.state.0
    }

    /// When it was last changed, as far as the system knows.
    pub fn changed(&self) -> Option<SystemTime> {
        self.state.1
    }

    /// Fails if the file has been written or cut since it was opened.
    fn check_unchanged(&self) -> Result<()> {
        let failed = |source| Error::File {
            path: self.path.clone(),
            what: "read it",
            source,
        };
        match state(&self.file).map_err(failed)? == self.state {
            true => Ok(()),
            false => Err(failed(io::Error::other(
                "it has changed since it was opened: start again when it is complete",
            ))),
        }
    }
}

impl OutsideFiles {
    /// The files, for reading.
    pub fn source(&self, label: &Path) -> FileSource {
        let files = self.files.iter();
        let files = files.map(|of| (of.again(), of.path.display().to_string().into()));
        FileSource::of_files(files, label.display().to_string())
    }

    /// The end of the file in which `offset` is.
    pub fn end_of(&self, offset: u64) -> u64 {
        let (number, _) = FileSource::place_of(offset);
        let len = self.files.get(number).map_or(0, OutsideFile::len);
        FileSource::offset_of(number, len).unwrap_or(u64::MAX)
    }

    /// Fails if the file in which `offset` is has been written or cut since it was opened.
    pub fn check_unchanged(&self, offset: u64) -> Result<()> {
        let (number, _) = FileSource::place_of(offset);
        self.files
            .get(number)
            .map_or(Ok(()), OutsideFile::check_unchanged)
    }
}

fn state(file: &File) -> io::Result<(u64, Option<SystemTime>)> {
    let facts = file.metadata()?;
    Ok((facts.len(), facts.modified().ok()))
}
