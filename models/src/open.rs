//! Opens a path as a checkpoint, by its contents.

use std::path::{Path, PathBuf};

use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::file::DataFile;
use crate::hf::Description;
use crate::mtp::Part;
use crate::{gguf, hf};

/// Opens a checkpoint: a folder with `config.json`, a `.safetensors` file next to
/// a `config.json`, or a GGUF file (by its magic, PowerInfer's `PWRI` included), which may be any part
/// of a split one.
///
/// # Errors
/// One variant for each kind of invalid file; see [`Error`].
pub fn open(path: &Path) -> Result<Box<dyn Checkpoint>, Error> {
    let opened = open_part(path, Part::Decoder)?;
    opened.ok_or_else(|| Error::NotACheckpoint {
        path: path.to_owned(),
        found: "no decoder".into(),
    })
}

/// Opens a part of a checkpoint; `None` if there is no such part.
fn open_part(path: &Path, part: Part) -> Result<Option<Box<dyn Checkpoint>>, Error> {
    let meta = std::fs::metadata(path).map_err(Error::io("open", path))?;
    if meta.is_dir() {
        return hf::open_folder(path, part);
    }
    if !meta.is_file() {
        return Err(Error::NotACheckpoint {
            path: path.to_owned(),
            found: "neither a file nor a folder".into(),
        });
    }
    let magic = magic_of(path)?;
    if gguf::is_magic(magic) {
        gguf::open_file(path, part)
    } else if path.extension().is_some_and(|e| e == "safetensors") {
        hf::open_single(path, part)
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

/// The first four bytes of a file; zeros if it has fewer.
fn magic_of(path: &Path) -> Result<[u8; 4], Error> {
    let file = DataFile::open(path)?;
    let mut magic = [0; 4];
    if file.len >= 4 {
        file.read_at(&mut magic, 0, &|| "the magic".into())?;
    }
    Ok(magic)
}

/// The first head for multi-token prediction of a checkpoint, as a model of one layer; `None` if the checkpoint has none that
/// is implemented.
///
/// # Errors
/// As [`open`], of the head's tensors.
pub fn open_mtp_head(path: &Path) -> Result<Option<Box<dyn Checkpoint>>, Error> {
    open_part(path, Part::MtpHead)
}

/// Whether a file has a head for multi-token prediction and no model: what llama.cpp's converter writes as `mtp-NAME.gguf`.
///
/// # Errors
/// A GGUF file whose header cannot be read.
pub fn is_mtp_head(path: &Path) -> Result<bool, Error> {
    Ok(path.is_file() && gguf::is_magic(magic_of(path)?) && gguf::is_mtp_head(path)?)
}

/// A file beside the GGUF file `NAME.gguf`, or beside parts of it, that has its head by its name, `mtp-NAME.gguf`.
#[must_use]
pub fn mtp_head_beside(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(".gguf")?;
    let whole = gguf::whole_name(path);
    let names = [Some(name), whole.as_deref()].into_iter().flatten();
    let mut heads = names.map(|name| path.with_file_name(format!("mtp-{name}.gguf")));
    heads.find(|head| head.is_file())
}

/// The model described by a Hugging Face `config.json`, without weights and texts.
///
/// # Errors
/// As [`open`], of the configuration.
pub fn describe(config: &Path) -> Result<Description, Error> {
    hf::describe(config)
}

/// The same for the text of a `config.json`; `name` is the model's, and replaces the path in errors.
///
/// # Errors
/// As [`describe`].
pub fn describe_text(text: &str, name: &str) -> Result<Description, Error> {
    hf::describe_text(Path::new(name), text, name.to_owned())
}

/// The files that [`open`] may read for `path`: those of a folder, a `.safetensors` file and the texts
/// next to it, all parts of a split GGUF file, or the file itself.
#[must_use]
pub fn files_of(path: &Path) -> Vec<PathBuf> {
    /// Endings of the texts of a Hugging Face folder.
    const TEXTS: [&str; 4] = ["json", "jinja", "model", "txt"];
    if path.is_dir() {
        // templates may be in a separate folder
        let (folders, mut files): (Vec<PathBuf>, Vec<PathBuf>) =
            entries(path).into_iter().partition(|entry| entry.is_dir());
        files.extend(folders.iter().flat_map(|folder| entries(folder)));
        return files;
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    let here = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    let companions: Vec<PathBuf> = match path.extension().and_then(|ending| ending.to_str()) {
        Some("safetensors") => (entries(here).into_iter())
            .filter(|file| {
                file.extension()
                    .is_some_and(|e| TEXTS.iter().any(|text| e == *text))
            })
            .collect(),
        Some("gguf") => gguf::parts_of(path),
        _ => Vec::new(),
    };
    let others = companions
        .into_iter()
        .filter(|file| file.file_name() != path.file_name());
    std::iter::once(path.to_owned()).chain(others).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}
