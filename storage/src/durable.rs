//! Flushing to disk, as far as the file system supports it.
//!
//! Some network and user-space file systems refuse to flush files or folders. Durability is then up
//! to them; this is logged once and is not an error.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Once;

/// Flushes a file's bytes and the metadata needed to find them. `path` names it in messages.
///
/// # Errors
/// An error of the system, unless the file system does not support flushing.
pub fn sync_data(file: &File, path: &Path) -> io::Result<()> {
    as_far_as_it_can(file.sync_data(), path)
}

/// Flushes a file's bytes and all metadata.
///
/// # Errors
/// As [`sync_data`].
pub fn sync_all(file: &File, path: &Path) -> io::Result<()> {
    as_far_as_it_can(file.sync_all(), path)
}

/// Flushes the folder of `path`, so that a new name in it is durable.
///
/// # Errors
/// As [`sync_data`]; an unreadable folder cannot be flushed either.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    match File::open(folder) {
        Err(e) if e.kind() == ErrorKind::PermissionDenied => Ok(()),
        Err(e) => Err(e),
        Ok(open) => as_far_as_it_can(open.sync_all(), folder),
    }
}

/// Whether the error means that the system does not support the operation, which is not a failure.
pub(crate) fn is_unsupported(error: &io::Error) -> bool {
    let no_locks = error.raw_os_error() == Some(libc::ENOLCK);
    no_locks
        || matches!(
            error.kind(),
            ErrorKind::Unsupported | ErrorKind::InvalidInput
        )
}

fn as_far_as_it_can(flushed: io::Result<()>, path: &Path) -> io::Result<()> {
    static TOLD: Once = Once::new();
    match flushed {
        Err(reason) if is_unsupported(&reason) => {
            TOLD.call_once(|| {
                tracing::warn!(
                    path = %path.display(), %reason,
                    "this file system does not flush to disk on request; a power failure may lose what \
                     was written last"
                );
            });
            Ok(())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_file_system_cannot_do_is_passed_over() {
        let path = Path::new("model.ember");
        let of = |number| as_far_as_it_can(Err(io::Error::from_raw_os_error(number)), path);
        for number in [libc::ENOSYS, libc::EOPNOTSUPP, libc::EINVAL, libc::ENOLCK] {
            of(number).unwrap();
        }
        for number in [
            libc::EIO,
            libc::ENOSPC,
            libc::EDQUOT,
            libc::EROFS,
            libc::EBADF,
        ] {
            assert_eq!(of(number).unwrap_err().raw_os_error(), Some(number));
        }
        as_far_as_it_can(Ok(()), path).unwrap();
        sync_folder_of(Path::new("Cargo.toml")).unwrap();
        assert!(sync_folder_of(Path::new("/no/such/file")).is_err());
    }
}
