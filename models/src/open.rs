//! From a path to a checkpoint, by what lies there.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::{gguf, hf};

/// Opens a checkpoint: a folder with `config.json`, a `.safetensors` file beside
/// a `config.json`, or a GGUF file (by its magic, PowerInfer's `PWRI` included).
///
/// # Errors
/// One variant for each way the files can be wrong; see [`Error`].
pub fn open(path: &Path) -> Result<Box<dyn Checkpoint>, Error> {
    let meta = std::fs::metadata(path).map_err(Error::io("open", path))?;
    if meta.is_dir() {
        return hf::open_folder(path);
    }
    if !meta.is_file() {
        return Err(Error::NotACheckpoint {
            path: path.to_owned(),
            found: "neither a file nor a folder".into(),
        });
    }
    let mut magic = [0u8; 4];
    if meta.len() >= 4 {
        File::open(path)
            .map_err(Error::io("open", path))?
            .read_exact_at(&mut magic, 0)
            .map_err(Error::io("read", path))?;
    }
    if gguf::is_magic(magic) {
        gguf::open_file(path)
    } else if path.extension().is_some_and(|e| e == "safetensors") {
        hf::open_single(path)
    } else {
        let found = format!(
            "a file of {} bytes that starts with {:?}",
            meta.len(),
            magic.escape_ascii().to_string()
        );
        Err(Error::NotACheckpoint {
            path: path.to_owned(),
            found,
        })
    }
}
