//! Files that are replaced whole or not at all, and never unasked.
//!
//! Every file that a command line names obeys one rule: where it exists, the command ends before any
//! work with exit code 2, unless `--force` is given; where it cannot be written, which is tried, with
//! exit code 1. Devices and pipes are written to, not replaced.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::Failure;
use crate::interrupt::{Unfinished, beside};

/// Refuses, before any work, a file that could not be written or must not be replaced.
///
/// # Errors
/// Wrong usage: a folder, no folder to put it in, or a file that exists without `force`. The
/// system's, where nothing can be written there.
pub fn may_write(path: &Path, force: bool) -> Result<(), Failure> {
    if path.is_dir() {
        return Err(Failure::usage(format!(
            "{} is a folder; name a file in it",
            path.display()
        )));
    }
    has_folder(path)?;
    may_replace(path, force)?;
    can_write(path, folder_of(path))
}

/// The folder that `path` is to be in.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Makes a file under the name of `path`, and a little more, in `folder`, and removes it: whether that
/// works depends on more than what can be asked for.
fn can_write(path: &Path, folder: &Path) -> Result<(), Failure> {
    if is_stream(path) {
        return Ok(());
    }
    let Some(name) = path.file_name() else {
        return Err(Failure::usage(format!("{} names no file", path.display())));
    };
    let probe = beside(&folder.join(name), &format!(".try{}", std::process::id()));
    File::create_new(&probe)
        .and_then(|_| std::fs::remove_file(&probe))
        .map_err(Failure::file(path))
}

/// As [`may_write`], for those options that were given.
///
/// # Errors
/// As [`may_write`].
pub fn may_write_each<'a>(
    paths: impl IntoIterator<Item = &'a Option<PathBuf>>,
    force: bool,
) -> Result<(), Failure> {
    let mut given = paths.into_iter().flatten();
    given.try_for_each(|path| may_write(path, force))
}

/// As [`may_write`], where the folders above the file are made when they are missing.
///
/// # Errors
/// As [`may_write`].
pub fn may_write_below(path: &Path, force: bool) -> Result<(), Failure> {
    may_replace(path, force)?;
    // what is to be made first, and where
    let mut first = path;
    for above in path.ancestors().skip(1) {
        if above.as_os_str().is_empty() || above.exists() {
            break;
        }
        first = above;
    }
    can_write(first, folder_of(first))
}

/// Refuses a file that exists, unless it may be replaced.
fn may_replace(path: &Path, force: bool) -> Result<(), Failure> {
    // a link that leads nowhere is there, too
    if path.symlink_metadata().is_ok() && !is_stream(path) && !force {
        return Err(Failure::usage(format!(
            "{} exists; give --force to replace it",
            path.display()
        )));
    }
    Ok(())
}

/// As [`may_write`], for a file that is made elsewhere and takes the name `path` at the end.
///
/// # Errors
/// As [`may_write`], and for a device or pipe, which such a file would displace.
pub fn may_create(path: &Path, force: bool) -> Result<(), Failure> {
    if is_stream(path) {
        return Err(Failure::usage(format!(
            "{} is a device or a pipe; name a file",
            path.display()
        )));
    }
    may_write(path, force)
}

/// As [`may_create`], for a folder. Nothing replaces one: whatever else is in it would be lost.
///
/// # Errors
/// As [`may_create`].
pub fn may_create_folder(path: &Path) -> Result<(), Failure> {
    if path.symlink_metadata().is_ok() {
        return Err(Failure::usage(format!(
            "{} exists; give another name or delete it first",
            path.display()
        )));
    }
    has_folder(path)?;
    can_write(path, folder_of(path))
}

fn has_folder(path: &Path) -> Result<(), Failure> {
    match path.parent().filter(|p| !p.as_os_str().is_empty()) {
        Some(folder) if !folder.is_dir() => Err(Failure::usage(format!(
            "the folder {} does not exist; create it first",
            folder.display()
        ))),
        _ => Ok(()),
    }
}

/// A device or a pipe, such as `/dev/stdout`.
fn is_stream(path: &Path) -> bool {
    path.metadata().is_ok_and(|m| !m.is_file() && !m.is_dir())
}

/// Writes `bytes` to a sibling, flushes it to disk and gives it the name `path`.
///
/// # Errors
/// The system's; what was there is there still.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let file = Partial::create(path)?;
    file.get().write_all(bytes).map_err(Failure::file(path))?;
    file.publish()
}

/// A file that gets its name when it is whole. What is left of it otherwise, be it by Ctrl-C, is
/// removed: it is of no use.
pub struct Partial {
    path: PathBuf,
    /// The sibling; `None` for a device or pipe, which is written to as it is.
    partial: Option<PathBuf>,
    file: File,
    _unfinished: Option<Unfinished>,
}

impl Partial {
    /// Begins the file that will be `path`.
    ///
    /// # Errors
    /// The system's.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let partial = (!is_stream(path)).then(|| beside(path, ".partial"));
        Ok(Self {
            path: path.to_owned(),
            file: File::create(partial.as_deref().unwrap_or(path)).map_err(Failure::file(path))?,
            _unfinished: partial.as_deref().map(Unfinished::at),
            partial,
        })
    }

    /// What to write to.
    pub fn get(&self) -> &File {
        &self.file
    }

    /// Flushes it to disk and gives it its name.
    ///
    /// # Errors
    /// The system's.
    pub fn publish(mut self) -> Result<(), Failure> {
        let Some(partial) = &self.partial else {
            return Ok(());
        };
        let named = self.file.sync_all();
        named
            .and_then(|()| std::fs::rename(partial, &self.path))
            .map_err(Failure::file(&self.path))?;
        self.partial = None;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            // the error that brought us here is the one to tell
            let _ = std::fs::remove_file(partial);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_exists_is_refused_unless_forced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "precious").unwrap();
        std::os::unix::fs::symlink(at("nowhere"), at("link")).unwrap();
        for name in ["file", "link"] {
            assert!(may_write(&at(name), false).is_err(), "{name}");
            assert!(may_write(&at(name), true).is_ok(), "{name}");
        }
        // neither of these gets better by force
        for path in [dir.path().to_owned(), at("no/file"), at("file/file")] {
            assert!(may_write(&path, true).is_err(), "{}", path.display());
        }
        assert!(may_create_folder(&at("file")).is_err());
        assert!(may_create_folder(&at("new")).is_ok());
        assert!(may_write_each([&None, &Some(at("new"))], false).is_ok());
        assert!(may_write_each([&None, &Some(at("file"))], false).is_err());
    }

    /// Nobody may write everywhere, not even root.
    #[test]
    fn what_cannot_be_written_is_refused_before_any_work() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("x".repeat(300));
        for path in [Path::new("/proc/file"), &long] {
            for tried in [
                may_write(path, true),
                may_create(path, true),
                may_create_folder(path),
                may_write_below(path, true),
                may_write_below(&path.join("in/folders"), true),
            ] {
                let error = tried.unwrap_err();
                assert!(matches!(error, Failure::File { .. }), "{error}");
                assert!(error.to_string().contains(path.to_str().unwrap()));
            }
        }
        for path in ["new", "folders/on/the/way/new"] {
            may_write_below(&dir.path().join(path), false).unwrap();
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_device_is_written_to_and_stays_one() {
        let null = Path::new("/dev/null");
        assert!(may_write(null, false).is_ok());
        assert!(may_create(null, true).is_err());
        write(null, b"gone").unwrap();
        assert!(is_stream(null), "/dev/null was replaced");
        let full = write(Path::new("/dev/full"), b"too much").unwrap_err();
        assert!(full.to_string().contains("/dev/full"), "{full}");
    }

    #[test]
    fn an_unfinished_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = Partial::create(&path).unwrap();
        file.get().write_all(b"half").unwrap();
        drop(file);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        write(&path, b"whole").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
