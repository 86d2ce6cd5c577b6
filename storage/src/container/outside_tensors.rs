//! Tensors that lie in files of another format.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use super::error::{Error, Result};

/// Reads tensors that lie in other files.
pub trait OutsideTensors: std::fmt::Debug + Send + Sync {
    /// Fills `dst` with tensor number `tensor`.
    ///
    /// # Errors
    /// If the files cannot be read, or have changed.
    fn read(&self, tensor: usize, dst: &mut [u8]) -> io::Result<()>;
}

/// What a container knows of such files.
#[derive(Debug)]
pub(super) struct OutsideFiles {
    pub reader: Arc<dyn OutsideTensors>,
    /// First byte of each tensor in the container's file; `None` if its rows are not stored there one after another.
    pub places: Vec<Option<u64>>,
    /// Bytes of all files.
    pub len: u64,
    /// Length and last change of the container's file when it was opened.
    state: (u64, Option<SystemTime>),
}

impl OutsideFiles {
    pub fn new(
        reader: Arc<dyn OutsideTensors>,
        places: Vec<Option<u64>>,
        len: u64,
        file: &File,
    ) -> io::Result<Self> {
        Ok(Self {
            reader,
            places,
            len,
            state: state(file)?,
        })
    }

    /// Fails if `file`, named `path`, has been written or cut since it was opened.
    pub fn check_unchanged(&self, file: &File, path: &Path) -> Result<()> {
        let failed = |source| Error::File {
            path: path.to_path_buf(),
            what: "read it",
            source,
        };
        match state(file).map_err(failed)? == self.state {
            true => Ok(()),
            false => Err(failed(io::Error::other(
                "it has changed since it was opened: start again when it is complete",
            ))),
        }
    }
}

fn state(file: &File) -> io::Result<(u64, Option<SystemTime>)> {
    let facts = file.metadata()?;
    Ok((facts.len(), facts.modified().ok()))
}
