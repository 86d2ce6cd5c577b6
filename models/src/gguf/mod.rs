//! GGUF files, PowerInfer's among them.

pub(crate) mod dequant;

use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::error::Error;

/// Whether a file starts like a GGUF (or PowerInfer) file.
pub(crate) fn is_magic(first: [u8; 4]) -> bool {
    matches!(&first, b"GGUF" | b"PWRI")
}

/// Opens a GGUF file.
pub(crate) fn open_file(path: &Path) -> Result<Box<dyn Checkpoint>, Error> {
    Err(Error::NotACheckpoint {
        path: path.to_owned(),
        found: "a gguf file".into(),
    })
}
