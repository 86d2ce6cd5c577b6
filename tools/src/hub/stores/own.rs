//! This program's folder of models: `OWNER/NAME/FILE`, with a list of what was downloaded.
//!
//! ```text
//! .lock                          held while a list is read and written
//! OWNER/NAME/emberflow.json      the files that `pull` downloaded, with their checksums
//! OWNER/NAME/.partial/CHECKSUM-. downloads that go on
//! OWNER/NAME/.partial/naming     exists while files get their names: the folder has files of two versions
//! ```
//!
//! A listed file is the program's own as long as its length and time of modification are those of the download.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use xxhash_rust::xxh3::xxh3_64;

use super::super::download::is_locked;
use super::super::name::ModelName;
use super::super::variant::{self, variants};
use super::{Local, Store, by_owner_and_name, entries, folder, path_in};
use crate::{Failure, atomic};

/// Name of the list of a repository's files.
const LIST: &str = "emberflow.json";

/// Folder of unfinished downloads.
const PARTIAL: &str = ".partial";

/// Exists in it while files get their names.
const NAMING: &str = "naming";

/// A file that was downloaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DownloadedFile {
    /// Its path in the repository, and here.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// When it was written, in nanoseconds since 1970: a file of this name with another time is somebody's.
    pub modified: i128,
    /// Its checksum, as the hub has it: `sha256:...`, or `git:...`, SHA-1 of git's blob.
    pub checksum: String,
    /// The hub.
    pub hub: String,
    /// The commit.
    pub commit: String,
}

/// When a file was written, in nanoseconds since 1970.
pub fn modified(facts: &Metadata) -> i128 {
    i128::from(facts.mtime()) * 1_000_000_000 + i128::from(facts.mtime_nsec())
}

impl DownloadedFile {
    /// Whether the file is in `folder` as it was downloaded.
    pub fn is_in(&self, folder: &Path) -> bool {
        let facts = folder.join(&self.path).symlink_metadata();
        facts.is_ok_and(|facts| {
            facts.is_file() && facts.len() == self.bytes && modified(&facts) == self.modified
        })
    }
}

/// What `remove` did.
#[derive(Debug, Default, Serialize)]
pub struct Removed {
    /// Files that are gone.
    pub files: Vec<PathBuf>,
    /// Their bytes.
    pub bytes: u64,
    /// Files of the list that have changed since, and stay.
    pub changed: Vec<PathBuf>,
}

/// The folder of models that this program downloaded.
#[derive(Debug, Clone)]
pub struct OwnStore {
    root: PathBuf,
}

impl OwnStore {
    /// `$EMBERFLOW_MODELS`, or `emberflow/models` in `$XDG_DATA_HOME`; `None` without a home folder.
    pub fn open() -> Option<Self> {
        let root = match path_in("EMBERFLOW_MODELS") {
            Some(root) => root,
            None => folder("XDG_DATA_HOME", ".local/share")?.join("emberflow/models"),
        };
        Some(Self { root })
    }

    /// In another folder.
    pub fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of a repository. Owners and names are the same in capital and small letters.
    pub fn folder_of(&self, name: &ModelName) -> PathBuf {
        let existing = |folder: &Path, wanted: &str| {
            let mut names = entries(folder).into_iter();
            let same = names.find(|name| name.eq_ignore_ascii_case(wanted));
            folder.join(same.as_deref().unwrap_or(wanted))
        };
        existing(&existing(&self.root, &name.owner), &name.name)
    }

    /// The file of an unfinished download, in which the next attempt goes on. Versions of a file differ in it.
    pub fn partial(&self, name: &ModelName, path: &str, checksum: &str) -> PathBuf {
        let plain = format!(
            "{}-{:016x}",
            checksum.replace(':', "-"),
            xxh3_64(path.as_bytes())
        );
        self.folder_of(name).join(PARTIAL).join(plain)
    }

    /// The files of a repository that were downloaded.
    ///
    /// # Errors
    /// A list that cannot be read.
    pub fn downloaded(&self, name: &ModelName) -> Result<Vec<DownloadedFile>, Failure> {
        let path = self.folder_of(name).join(LIST);
        let text = match fs::read(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            read => read.map_err(Failure::file(&path))?,
        };
        let broken = |e: serde_json::Error| {
            std::io::Error::new(ErrorKind::InvalidData, format!("{e}; move it away"))
        };
        serde_json::from_slice(&text)
            .map_err(broken)
            .map_err(Failure::file(&path))
    }

    /// Gives downloaded files their names with `publish`, and lists them. Until the end, the folder is no model.
    ///
    /// # Errors
    /// I/O errors, and a file in the way that was not downloaded.
    pub fn publish(
        &self,
        name: &ModelName,
        new: Vec<DownloadedFile>,
        gone: impl Fn(&DownloadedFile) -> bool,
        publish: impl FnOnce(&Path) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let _locked = self.lock()?;
        let folder = self.folder_of(name);
        let old = self.downloaded(name)?;
        for file in &new {
            let path = folder.join(&file.path);
            let ours = || {
                old.iter()
                    .any(|old| old.path == file.path && old.is_in(&folder))
            };
            if path.symlink_metadata().is_ok() && !ours() {
                return Err(Failure::usage(format!(
                    "{} exists and is not as 'emberflow pull' downloaded it; move it away first",
                    path.display()
                )));
            }
        }
        let naming = folder.join(PARTIAL).join(NAMING);
        fs::create_dir_all(folder.join(PARTIAL))
            .and_then(|()| File::create(&naming)?.sync_all())
            .map_err(Failure::file(&naming))?;
        // Both versions, of which the one with the right time counts if this ends here.
        let both: Vec<DownloadedFile> = old.iter().chain(&new).cloned().collect();
        self.write(name, &both)?;
        publish(&folder)?;
        let is_new = |file: &DownloadedFile| new.iter().any(|new| new.path == file.path);
        for file in old
            .iter()
            .filter(|file| !is_new(file) && gone(file) && file.is_in(&folder))
        {
            let path = folder.join(&file.path);
            fs::remove_file(&path).map_err(Failure::file(&path))?;
        }
        let replaced = |file: &DownloadedFile| !new.contains(file) && (is_new(file) || gone(file));
        // Of an update that stopped, entries of files that never got their names.
        let others = |file: &DownloadedFile| {
            both.iter()
                .any(|other| other.path == file.path && other.is_in(&folder))
        };
        let stays =
            |file: &&DownloadedFile| !replaced(file) && (file.is_in(&folder) || !others(file));
        let now: Vec<DownloadedFile> = both.iter().filter(stays).cloned().collect();
        self.write(name, &now)?;
        fs::remove_file(&naming).map_err(Failure::file(&naming))?;
        // fails where something is left
        let _ = fs::remove_dir(folder.join(PARTIAL));
        Ok(())
    }

    /// Whether the last update of a repository stopped while files got their names.
    pub fn is_unfinished(&self, name: &ModelName) -> bool {
        self.folder_of(name).join(PARTIAL).join(NAMING).exists()
    }

    /// Keeps other processes from the lists. A file system without locks has none.
    fn lock(&self) -> Result<File, Failure> {
        let path = self.root.join(".lock");
        let open = fs::create_dir_all(&self.root).and_then(|()| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
        });
        let file = open.map_err(Failure::file(&path))?;
        let _ = flock(&file, FlockOperation::LockExclusive);
        Ok(file)
    }

    fn write(&self, name: &ModelName, all: &[DownloadedFile]) -> Result<(), Failure> {
        let folder = self.folder_of(name);
        for left in entries(&folder) {
            // Of a process that was killed: the list is locked.
            if left
                .strip_prefix(LIST)
                .is_some_and(|rest| rest.starts_with(".partial"))
            {
                let _ = fs::remove_file(folder.join(left));
            }
        }
        let text = serde_json::to_vec_pretty(all).map_err(std::io::Error::from)?;
        atomic::write(&folder.join(LIST), &text)
    }

    /// Deletes the files of a model that were downloaded, and unfinished downloads of it; nothing else. A file that was
    /// written or replaced since stays, and so does one that another process is downloading.
    ///
    /// # Errors
    /// I/O errors, and a file that names several models.
    pub fn remove(&self, name: &ModelName) -> Result<Removed, Failure> {
        let folder = self.folder_of(name);
        if !folder.is_dir() {
            return Ok(Removed::default());
        }
        let _locked = self.lock()?;
        let all = self.downloaded(name)?;
        let paths: Vec<String> = all.iter().map(|file| file.path.clone()).collect();
        let gone: Vec<usize> = match &name.file {
            None => (0..all.len()).collect(),
            Some(file) => match variant::named(&variants(&paths), file)[..] {
                [] => Vec::new(),
                [one] => one.files.clone(),
                ref several => {
                    return Err(ambiguous(
                        name,
                        several.iter().map(|one| one.label.as_str()),
                    ));
                }
            },
        };
        let mut removed = Removed::default();
        for file in gone.iter().map(|at| &all[*at]) {
            let path = folder.join(&file.path);
            if file.is_in(&folder) {
                fs::remove_file(&path).map_err(Failure::file(&path))?;
                removed.bytes += file.bytes;
                removed.files.push(path);
            } else if path.symlink_metadata().is_ok() {
                removed.changed.push(path);
            }
        }
        if name.file.is_none() {
            remove_partial(&folder.join(PARTIAL), &mut removed)?;
        }
        let rest = all.iter().enumerate().filter(|(at, _)| !gone.contains(at));
        let rest: Vec<DownloadedFile> = rest.map(|(_, file)| file.clone()).collect();
        if !gone.is_empty() && rest.is_empty() {
            let list = folder.join(LIST);
            fs::remove_file(&list).map_err(Failure::file(&list))?;
        } else if !gone.is_empty() {
            self.write(name, &rest)?;
        }
        self.remove_empty(&folder, removed.files.iter());
        Ok(removed)
    }

    /// Removes folders in which nothing is left.
    fn remove_empty<'a>(&self, folder: &Path, files: impl Iterator<Item = &'a PathBuf>) {
        let inside = files.flat_map(|file| file.ancestors().skip(1));
        let above = folder.ancestors();
        let below = |path: &&Path| path.starts_with(&self.root) && *path != self.root;
        let mut folders: Vec<&Path> = inside.chain(above).filter(below).collect();
        folders.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
        folders.dedup();
        for path in folders {
            // fails where something is left
            let _ = fs::remove_dir(path);
        }
    }
}

/// Removes unfinished downloads that no process goes on with.
fn remove_partial(partial: &Path, removed: &mut Removed) -> Result<(), Failure> {
    for name in entries(partial) {
        let path = partial.join(name);
        let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else {
            continue;
        };
        if is_locked(&file) {
            continue;
        }
        removed.bytes += file.metadata().map_or(0, |facts| facts.len());
        fs::remove_file(&path).map_err(Failure::file(&path))?;
        removed.files.push(path);
    }
    Ok(())
}

/// A name that several models have.
pub fn ambiguous<'a>(name: &ModelName, labels: impl Iterator<Item = &'a str>) -> Failure {
    let labels: Vec<&str> = labels.collect();
    Failure::usage(format!(
        "{name} names several models: {}",
        labels.join(", ")
    ))
}

impl Store for OwnStore {
    fn models(&self) -> Vec<Local> {
        let mut all = by_owner_and_name(&self.root, "emberflow");
        all.retain(|model| {
            !self
                .root
                .join(&model.name)
                .join(PARTIAL)
                .join(NAMING)
                .exists()
        });
        all
    }
}
