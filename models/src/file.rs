//! Positioned file reads, with the file's name in every error.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// An open file and its length at opening.
#[derive(Debug)]
pub(crate) struct DataFile {
    pub(crate) path: PathBuf,
    pub(crate) len: u64,
    file: File,
}

impl DataFile {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let meta = file.metadata().map_err(Error::io("open", path))?;
        if !meta.is_file() {
            return Err(Error::NotACheckpoint {
                path: path.to_owned(),
                found: "not a regular file".into(),
            });
        }
        Ok(Self {
            path: path.to_owned(),
            len: meta.len(),
            file,
        })
    }

    /// The file itself, to be read once from its start.
    pub(crate) fn reader(&self) -> &File {
        &self.file
    }

    /// Fills `out` from byte `offset`; `what` names the bytes in errors.
    pub(crate) fn read_at(
        &self,
        out: &mut [u8],
        offset: u64,
        what: &dyn Fn() -> String,
    ) -> Result<(), Error> {
        self.file
            .read_exact_at(out, offset)
            .map_err(|source| match source.kind() {
                ErrorKind::UnexpectedEof => Error::Truncated {
                    path: self.path.clone(),
                    what: what(),
                    needed: offset.saturating_add(out.len() as u64),
                    len: self.file.metadata().map_or(self.len, |meta| meta.len()),
                },
                _ => Error::Io {
                    path: self.path.clone(),
                    op: "read",
                    source,
                },
            })
    }
}

/// Reads a whole text file of at most `limit` bytes; `None` if it does not exist.
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<Option<String>, Error> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("open", path)(error)),
    };
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(Error::io("read", path))?;
    let found = bytes.len() as u64;
    if found > limit {
        return Err(Error::TooLarge {
            path: path.to_owned(),
            what: "the file".into(),
            found,
            limit,
        });
    }
    match String::from_utf8(bytes) {
        Ok(text) => Ok(Some(text)),
        Err(error) => Err(Error::NotUtf8 {
            path: path.to_owned(),
            offset: error.utf8_error().valid_up_to() as u64,
        }),
    }
}

/// A text file that must be there.
pub(crate) fn need_text(path: &Path, limit: u64, why: &str) -> Result<String, Error> {
    read_text(path, limit)?.ok_or_else(|| Error::MissingFile {
        path: path.to_owned(),
        why: why.into(),
    })
}
