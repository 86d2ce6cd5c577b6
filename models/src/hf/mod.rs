//! Hugging Face folders: `config.json`, safetensors and the files beside them.

use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::error::Error;

/// Opens a folder.
pub(crate) fn open_folder(path: &Path) -> Result<Box<dyn Checkpoint>, Error> {
    Err(Error::NotACheckpoint { path: path.to_owned(), found: "a folder".into() })
}

/// Opens one safetensors file, with the configuration beside it.
pub(crate) fn open_single(path: &Path) -> Result<Box<dyn Checkpoint>, Error> {
    Err(Error::NotACheckpoint { path: path.to_owned(), found: "a file".into() })
}
