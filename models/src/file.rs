//! Positioned file reads, with the file's name in every error.
//!
//! Only regular files are opened: opening a pipe would wait for its writer.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use crate::error::Error;

/// An open file and its length at opening.
#[derive(Debug)]
pub(crate) struct DataFile {
    pub(crate) path: PathBuf,
    pub(crate) len: u64,
    /// Time of the last change at opening, if the file system has it.
    changed: Option<SystemTime>,
    file: Arc<File>,
}

/// First bytes of a git-lfs pointer in place of a file.
const LFS_POINTER: &str = "version https://git-lfs.github.com/spec/";
/// Upper bound of the length of such a pointer, in bytes.
const LFS_LIMIT: u64 = 1024;

/// Opens a regular file.
fn open_regular(path: &Path) -> std::io::Result<File> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::other(
            "it is not a regular file (a folder, pipe or device)",
        ));
    }
    File::open(path)
}

/// Refuses a git-lfs pointer in place of a file that was not downloaded.
fn refuse_pointer(path: &Path, first: &[u8], len: u64) -> Result<(), Error> {
    if len >= LFS_LIMIT || !first.starts_with(LFS_POINTER.as_bytes()) {
        return Ok(());
    }
    let text = String::from_utf8_lossy(first);
    let size = text.lines().find_map(|line| line.strip_prefix("size "));
    Err(Error::LfsPointer {
        path: path.to_owned(),
        bytes: size.and_then(|size| size.trim().parse().ok()),
    })
}

impl DataFile {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let file = open_regular(path).map_err(Error::io("open", path))?;
        let meta = file.metadata().map_err(Error::io("open", path))?;
        let this = Self {
            path: path.to_owned(),
            len: meta.len(),
            changed: meta.modified().ok(),
            file: Arc::new(file),
        };
        if this.len < LFS_LIMIT {
            let mut bytes = vec![0; this.len as usize];
            this.read_at(&mut bytes, 0, &|| "the file".into())?;
            refuse_pointer(path, &bytes, this.len)?;
        }
        Ok(this)
    }

    /// The file, for reading once from its start.
    pub(crate) fn reader(&self) -> &File {
        &self.file
    }

    /// The file, to share.
    pub(crate) fn handle(&self) -> &Arc<File> {
        &self.file
    }

    /// Fails if the file has been written or cut since it was opened. One that was replaced by another of its name is
    /// still the open one.
    pub(crate) fn check_unchanged(&self) -> Result<(), Error> {
        let now = self.file.metadata();
        let now = now.map_err(Error::io("inspect", &self.path))?;
        match now.len() == self.len && now.modified().ok() == self.changed {
            true => Ok(()),
            false => Err(Error::Changed {
                path: self.path.clone(),
            }),
        }
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

/// Flushes a file or folder to disk, if its file system supports it: network and user-space ones may
/// refuse, and then durability is up to them.
pub(crate) fn flush(file: &File, path: &Path) -> Result<(), Error> {
    match file.sync_all() {
        Err(e) if matches!(e.kind(), ErrorKind::Unsupported | ErrorKind::InvalidInput) => Ok(()),
        done => done.map_err(Error::io("flush", path)),
    }
}

/// Flushes the folder of `path`, so that a new name in it is durable.
pub(crate) fn flush_folder_of(path: &Path) -> Result<(), Error> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    match File::open(folder) {
        // an unreadable folder cannot be flushed either
        Err(e) if e.kind() == ErrorKind::PermissionDenied => Ok(()),
        Err(e) => Err(Error::io("open", folder)(e)),
        Ok(open) => flush(&open, folder),
    }
}

/// Reads a whole text file of at most `limit` bytes; `None` if it does not exist.
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<Option<String>, Error> {
    let file = match open_regular(path) {
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
    refuse_pointer(path, &bytes, found)?;
    match String::from_utf8(bytes) {
        Ok(text) => Ok(Some(text)),
        Err(error) => Err(Error::NotUtf8 {
            path: path.to_owned(),
            offset: error.utf8_error().valid_up_to() as u64,
        }),
    }
}

/// A required text file.
pub(crate) fn need_text(path: &Path, limit: u64, why: &str) -> Result<String, Error> {
    read_text(path, limit)?.ok_or_else(|| Error::MissingFile {
        path: path.to_owned(),
        why: why.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in the specification of git-lfs (its docs/spec.md).
    const POINTER: &str = "version https://git-lfs.github.com/spec/v1\n\
        oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n\
        size 12345\n";

    #[test]
    fn a_pointer_of_git_lfs_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["model.gguf", "model.safetensors", "noextension"] {
            let path = dir.path().join(name);
            std::fs::write(&path, POINTER).unwrap();
            std::fs::write(dir.path().join("config.json"), "{}").unwrap();
            let error = DataFile::open(&path).unwrap_err();
            assert!(matches!(
                error,
                Error::LfsPointer {
                    bytes: Some(12345),
                    ..
                }
            ));
            let message = crate::open(&path).err().unwrap().to_string();
            // a folder's configuration is read before its tensors
            assert!(
                message.contains("git lfs pull") || name.ends_with("safetensors"),
                "{message}"
            );
        }
        let text = dir.path().join("tokenizer.json");
        std::fs::write(&text, POINTER).unwrap();
        let error = read_text(&text, 1 << 20).unwrap_err();
        assert!(matches!(error, Error::LfsPointer { .. }), "{error}");
        std::fs::write(&text, format!("{POINTER}{}", " ".repeat(1024))).unwrap();
        assert!(read_text(&text, 1 << 20).is_ok());
    }

    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        for path in ["/dev/zero", "/proc"] {
            let error = DataFile::open(Path::new(path)).unwrap_err().to_string();
            assert!(error.contains("not a regular file"), "{error}");
            assert!(read_text(Path::new(path), 10).is_err());
        }
        assert!(read_text(Path::new("/proc/nowhere"), 10).unwrap().is_none());
    }
}
