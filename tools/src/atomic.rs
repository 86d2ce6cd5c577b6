//! Output files: checks before any work, atomic replacement after it.
//!
//! All output options follow one rule. If the file exists, the command stops with exit code 2 unless `--force` is
//! given. If it cannot be written (a probe file is created to find out), the command stops with exit code 1. Devices
//! and pipes are written in place. A command never writes to a file that it reads, even through links.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use emberflow_models::files_of;
use emberflow_storage::durable;

use crate::Failure;
use crate::interrupt::{Unfinished, with_suffix};

/// Files that every command reads, with the name used in messages.
const ALWAYS_READ: [(&str, &str); 4] = [
    ("/proc/self/exe", "this program"),
    ("/proc/self/fd/0", "standard input"),
    ("/proc/self/fd/1", "standard output"),
    ("/proc/self/fd/2", "standard error"),
];

/// Suffixes of the temporary files that a writer of `path` may create.
const GROWING: [&str; 4] = ["", ".partial", ".partial.journal", ".checkpoint"];

/// Checks that `path` can be written and may be replaced. `reads` lists the files and checkpoints that the command
/// reads.
///
/// # Errors
/// A usage error for a folder, a missing parent folder, a file that is also read, or an existing file without
/// `force`; an I/O error if the probe file cannot be created.
pub fn may_write(path: &Path, force: bool, reads: &[Option<&Path>]) -> Result<(), Failure> {
    not_dash(path, ", /dev/stdout for standard output")?;
    if path.is_dir() {
        return Err(Failure::usage(format!(
            "{} is a folder; name a file in it",
            path.display()
        )));
    }
    has_folder(path)?;
    check_not_read(path, reads)?;
    may_replace(path, force)?;
    can_write(path, folder_of(path))
}

/// Refuses `-`, which some programs take for standard output; `instead` names what else there is.
fn not_dash(path: &Path, instead: &str) -> Result<(), Failure> {
    match path == Path::new("-") {
        false => Ok(()),
        true => Err(Failure::usage(format!(
            "- is not the name of an output here: name a file{instead}, or ./- for one of this name"
        ))),
    }
}

/// Device and inode of a regular file, which identify it independently of its path.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let meta = path.metadata().ok().filter(std::fs::Metadata::is_file)?;
    Some((meta.dev(), meta.ino()))
}

/// Fails if `path`, or a temporary file of its writer, is one of `reads`.
fn check_not_read(path: &Path, reads: &[Option<&Path>]) -> Result<(), Failure> {
    for written in GROWING.map(|ending| with_suffix(path, ending)) {
        let Some(written_to) = identity(&written) else {
            continue;
        };
        let is_it = |read: &Path| identity(read) == Some(written_to);
        let always = ALWAYS_READ.iter().find(|(read, _)| is_it(Path::new(read)));
        let mut given = reads.iter().flatten().flat_map(|read| files_of(read));
        let read = match always {
            Some((_, name)) => Some((*name).to_owned()),
            None => given
                .find(|read| is_it(read))
                .map(|read| read.display().to_string()),
        };
        if let Some(read) = read {
            let written = written.display();
            return Err(Failure::usage(format!(
                "{written} is the same file as {read}, which this command reads; name another \
                 output file"
            )));
        }
    }
    Ok(())
}

/// Parent folder of `path`.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Checks that files can be created in `folder` by creating and removing one whose name is a little longer than that
/// of `path`. Permissions alone are not enough: quotas and read-only mounts matter too.
fn can_write(path: &Path, folder: &Path) -> Result<(), Failure> {
    if is_stream(path) {
        return Ok(());
    }
    let Some(name) = path.file_name() else {
        return Err(Failure::usage(format!(
            "{} is not a file name",
            path.display()
        )));
    };
    let probe = with_suffix(&folder.join(name), &format!(".try{}", std::process::id()));
    File::create_new(&probe)
        .and_then(|_| std::fs::remove_file(&probe))
        .map_err(Failure::file(path))
}

/// Calls [`may_write`] for each option that was given.
///
/// # Errors
/// As [`may_write`], and a usage error if two options name the same file.
pub fn may_write_each<'a>(
    paths: impl IntoIterator<Item = &'a Option<PathBuf>>,
    force: bool,
    reads: &[Option<&Path>],
) -> Result<(), Failure> {
    let given: Vec<&PathBuf> = paths.into_iter().flatten().collect();
    for (i, path) in given.iter().enumerate() {
        may_write(path, force, reads)?;
        let place = |path: &Path| {
            Some((
                folder_of(path).canonicalize().ok()?,
                path.file_name()?.to_owned(),
            ))
        };
        let same = |other: &&&PathBuf| {
            let linked = identity(path).is_some_and(|it| identity(other) == Some(it));
            !is_stream(path) && (linked || place(path).is_some_and(|it| place(other) == Some(it)))
        };
        if let Some(other) = given[..i].iter().find(same) {
            let [path, other] = [path.display(), other.display()];
            return Err(Failure::usage(format!(
                "{path} and {other} are the same file; name two different output files"
            )));
        }
    }
    Ok(())
}

/// As [`may_write`], but missing parent folders are allowed, since they will be created.
///
/// # Errors
/// As [`may_write`].
pub fn may_write_below(path: &Path, force: bool, reads: &[Option<&Path>]) -> Result<(), Failure> {
    check_not_read(path, reads)?;
    may_replace(path, force)?;
    // Find the outermost folder that has to be created.
    let mut first = path;
    for above in path.ancestors().skip(1) {
        if above.as_os_str().is_empty() || above.exists() {
            break;
        }
        first = above;
    }
    can_write(first, folder_of(first))
}

/// Fails if `path` exists and must not be replaced.
fn may_replace(path: &Path, force: bool) -> Result<(), Failure> {
    // A dangling link counts as existing.
    if path.symlink_metadata().is_ok() && !is_stream(path) && !force {
        return Err(Failure::usage(format!(
            "{} already exists; use --force to replace it",
            path.display()
        )));
    }
    Ok(())
}

/// As [`may_write`], for a file that is written elsewhere and renamed to `path` at the end.
///
/// # Errors
/// As [`may_write`], and a usage error for a device or pipe, which the rename would replace, or a temporary file of
/// something else.
pub fn may_create(path: &Path, force: bool, reads: &[Option<&Path>]) -> Result<(), Failure> {
    not_dash(path, "")?;
    if is_stream(path) {
        return Err(Failure::usage(format!(
            "{} is a device or a pipe; name a file",
            path.display()
        )));
    }
    may_write(path, force, reads)?;
    // With a journal it is resumed.
    let [partial, journal] =
        [".partial", ".partial.journal"].map(|ending| with_suffix(path, ending));
    if partial.symlink_metadata().is_ok() && journal.symlink_metadata().is_err() {
        return Err(Failure::usage(format!(
            "{} exists: another run writes it, or it is of something else; delete it or move it away if none is running",
            partial.display()
        )));
    }
    Ok(())
}

/// As [`may_create`], for a folder. Existing folders are never replaced, so that nothing in them is lost.
///
/// # Errors
/// As [`may_create`].
pub fn may_create_folder(path: &Path) -> Result<(), Failure> {
    not_dash(path, "")?;
    if path.symlink_metadata().is_ok() {
        return Err(Failure::usage(format!(
            "{} already exists; choose another name or delete it first",
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

/// Whether `path` is a device or a pipe, such as `/dev/stdout`.
fn is_stream(path: &Path) -> bool {
    path.metadata().is_ok_and(|m| !m.is_file() && !m.is_dir())
}

/// Writes `bytes` to a temporary file next to `path`, flushes it to disk and renames it to `path`.
///
/// # Errors
/// I/O errors; an existing file is then unchanged.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let file = Partial::create(path)?;
    file.get().write_all(bytes).map_err(Failure::file(path))?;
    file.publish()
}

/// What follows a file's name in that of its temporary file.
const UNFINISHED: &str = ".partial";

/// Time after which no process writes a temporary file of a server any more.
const STALE: Duration = Duration::from_secs(3600);

/// Removes the temporary file `path` of a server that was killed: if it is old, and of a file that is `ours`.
pub fn remove_stale(path: &Path, ours: impl Fn(&str) -> bool) {
    let name = path.file_name().and_then(|name| name.to_str());
    let whole = name.and_then(|name| name.rsplit_once(UNFINISHED));
    let written = path.metadata().and_then(|facts| facts.modified());
    let old = written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > STALE));
    if old && whole.is_some_and(|(whole, _)| ours(whole)) {
        let _ = std::fs::remove_file(path);
    }
}

/// A file that gets its name once it is complete. If it is dropped earlier, or on Ctrl-C, the temporary file
/// is removed.
pub struct Partial {
    path: PathBuf,
    /// The temporary file; `None` for a device or pipe, which is written in place.
    partial: Option<PathBuf>,
    file: File,
    _unfinished: Option<Unfinished>,
}

impl Partial {
    /// Creates the temporary file for `path`.
    ///
    /// # Errors
    /// I/O errors.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        if is_stream(path) {
            return Ok(Self {
                path: path.to_owned(),
                partial: None,
                file: File::create(path).map_err(Failure::file(path))?,
                _unfinished: None,
            });
        }
        // The process id avoids overwriting another process's temporary file.
        let own = format!(".partial{}", std::process::id());
        let named = |ending: &str| {
            let partial = with_suffix(path, ending);
            // before the file exists, so that Ctrl-C never leaves it behind
            let unfinished = Unfinished::planned(&partial);
            File::create_new(&partial).map(|file| (file, partial, unfinished))
        };
        let created = named(".partial").or_else(|e| match e.kind() {
            ErrorKind::AlreadyExists => named(&own),
            _ => Err(e),
        });
        let (file, partial, unfinished) = created.map_err(Failure::file(path))?;
        Ok(Self {
            path: path.to_owned(),
            _unfinished: Some(unfinished),
            partial: Some(partial),
            file,
        })
    }

    /// As [`create`](Self::create), for a server, which ends by itself on Ctrl-C. The temporary file's name is unique.
    ///
    /// # Errors
    /// I/O errors.
    pub fn of_server(path: &Path) -> Result<Self, Failure> {
        let random = getrandom::u64().map_err(|e| std::io::Error::other(e.to_string()))?;
        let partial = with_suffix(path, &format!("{UNFINISHED}{random:016x}"));
        Ok(Self {
            path: path.to_owned(),
            file: File::create_new(&partial).map_err(Failure::file(path))?,
            partial: Some(partial),
            _unfinished: None,
        })
    }

    /// The file to write to.
    pub fn get(&self) -> &File {
        &self.file
    }

    /// Flushes the file to disk and renames it to its final name.
    ///
    /// # Errors
    /// I/O errors.
    pub fn publish(mut self) -> Result<(), Failure> {
        let Some(partial) = &self.partial else {
            return Ok(());
        };
        let named = durable::sync_all(&self.file, partial);
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
            // Keep the error that led here.
            let _ = std::fs::remove_file(partial);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An existing file with the temporary name is not touched, and links are not followed.
    #[test]
    fn unfinished_files_of_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("a.partial"), "precious").unwrap();
        std::os::unix::fs::symlink(at("a.partial"), at("b.partial")).unwrap();
        for name in ["a", "b"] {
            write(&at(name), b"new").unwrap();
            assert_eq!(std::fs::read(at(name)).unwrap(), b"new");
            assert!(!at(name).is_symlink());
        }
        assert_eq!(std::fs::read(at("a.partial")).unwrap(), b"precious");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4);
    }

    #[test]
    fn what_exists_is_refused_unless_forced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "precious").unwrap();
        std::os::unix::fs::symlink(at("nowhere"), at("link")).unwrap();
        for name in ["file", "link"] {
            assert!(may_write(&at(name), false, &[]).is_err(), "{name}");
            assert!(may_write(&at(name), true, &[]).is_ok(), "{name}");
        }
        // --force does not help with these.
        for path in [dir.path().to_owned(), at("no/file"), at("file/file")] {
            assert!(may_write(&path, true, &[]).is_err(), "{}", path.display());
        }
        assert!(may_create_folder(&at("file")).is_err());
        assert!(may_create_folder(&at("new")).is_ok());
        assert!(may_write_each([&None, &Some(at("new"))], false, &[]).is_ok());
        assert!(may_write_each([&None, &Some(at("file"))], false, &[]).is_err());
    }

    /// A temporary file without a journal is of something else; with one, the writer resumes it.
    #[test]
    fn what_a_writer_would_refuse_at_the_end_is_refused_before_any_work() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for (name, allowed) in [
            ("m.partial", false),
            ("m.partial.journal", true),
            ("n.partial.journal", true),
        ] {
            std::fs::write(at(name), "").unwrap();
            let found = may_create(&at(&name[..1]), true, &[]);
            assert_eq!(found.is_ok(), allowed, "{name}");
        }
        let dash = Path::new("-");
        for (refused, stdout) in [
            (may_write(dash, true, &[]), true),
            (may_create(dash, true, &[]), false),
            (may_create_folder(dash), false),
        ] {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains("./-"), "{message}");
            assert_eq!(message.contains("/dev/stdout"), stdout, "{message}");
        }
    }

    #[test]
    fn what_is_read_is_never_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("folder")).unwrap();
        std::fs::write(at("folder/config.json"), "read").unwrap();
        std::fs::write(at("folder/model.safetensors"), "read").unwrap();
        std::fs::write(at("m-00001-of-00002.gguf"), "read").unwrap();
        std::fs::write(at("m-00002-of-00002.gguf"), "read").unwrap();
        std::fs::write(at("out.partial"), "read").unwrap();
        std::os::unix::fs::symlink(at("folder"), at("link")).unwrap();
        std::fs::hard_link(at("folder/config.json"), at("hard")).unwrap();
        let folder = at("folder");
        let (single, part) = (at("folder/model.safetensors"), at("m-00002-of-00002.gguf"));
        let refused = |written: &str, read: &Path| {
            let tried = may_write(&at(written), true, &[None, Some(read)]);
            let below = may_write_below(&at(written), true, &[Some(read)]);
            let (message, below) = (
                tried.unwrap_err().to_string(),
                below.unwrap_err().to_string(),
            );
            assert!(message.contains("the same file as"), "{message}");
            assert_eq!(message, below);
        };
        for name in [
            "folder/config.json",
            "folder/model.safetensors",
            "link/config.json",
            "hard",
        ] {
            refused(name, &folder);
            refused(name, &single);
        }
        for name in [
            "m-00001-of-00002.gguf",
            "m-00002-of-00002.gguf",
            "link/../m-00001-of-00002.gguf",
        ] {
            refused(name, &part);
        }
        refused("out", &at("out.partial"));
        may_write(&at("folder/new"), true, &[Some(&folder)]).unwrap();
        may_write(&at("hard"), true, &[Some(&part)]).unwrap();
        may_write(
            Path::new("/dev/null"),
            true,
            &[Some(Path::new("/dev/null"))],
        )
        .unwrap();

        let program = std::env::current_exe().unwrap();
        let message = may_write(&program, true, &[]).unwrap_err().to_string();
        assert!(message.contains("this program"), "{message}");
        for [a, b] in [
            ["new", "new"],
            ["new", "link/../new"],
            ["hard", "folder/config.json"],
        ] {
            let both = [&Some(at(a)), &Some(at(b))];
            let message = may_write_each(both, true, &[]).unwrap_err().to_string();
            assert!(message.contains("are the same file"), "{message}");
        }
        let null = Some(PathBuf::from("/dev/null"));
        may_write_each([&null, &null], true, &[]).unwrap();
    }

    /// Not even root can write to these folders.
    #[test]
    fn what_cannot_be_written_is_refused_before_any_work() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("x".repeat(300));
        for path in [Path::new("/proc/file"), &long] {
            for tried in [
                may_write(path, true, &[]),
                may_create(path, true, &[]),
                may_create_folder(path),
                may_write_below(path, true, &[]),
                may_write_below(&path.join("in/folders"), true, &[]),
            ] {
                let error = tried.unwrap_err();
                assert!(matches!(error, Failure::File { .. }), "{error}");
                assert!(error.to_string().contains(path.to_str().unwrap()));
            }
        }
        for path in ["new", "folders/on/the/way/new"] {
            may_write_below(&dir.path().join(path), false, &[]).unwrap();
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_device_is_written_to_and_stays_one() {
        let null = Path::new("/dev/null");
        assert!(may_write(null, false, &[]).is_ok());
        assert!(may_create(null, true, &[]).is_err());
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
