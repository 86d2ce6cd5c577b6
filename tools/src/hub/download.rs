//! Downloads of files: what has arrived stays, and the next attempt goes on behind it.
//!
//! The bytes go to a file that is named after their checksum, locked for this process. After a break the rest is asked
//! for. Files get their names when the lengths and checksums of all are those of the hub's list and they are on disk.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use emberflow_storage::durable;
use indicatif::ProgressBar;
use rustix::fs::{FlockOperation, flock, statvfs};
use rustix::io::Errno;
use ureq::Body;
use ureq::http::{Response, header};

use super::client::{Hub, Refused};
use super::name::ModelName;
use super::repo::{Hash, RemoteFile, Repo};
use crate::{Failure, size};

/// Bytes read at once.
const BUFFER: usize = 1 << 20;

/// What the progress bar says.
pub const DOWNLOADING: &str = "downloading";

/// Bytes that count as progress.
const PROGRESS: u64 = 64 << 10;

/// Bytes of a disk that downloads leave free, for other programs.
const LEFT_FREE: u64 = 64 << 20;

/// A repository of a hub.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// The hub.
    pub hub: &'a Hub,
    /// The name.
    pub name: &'a ModelName,
    /// The files.
    pub repo: &'a Repo,
}

/// A file that has arrived whole, with the right checksum, and is on disk; it has no name yet.
#[derive(Debug)]
pub struct Arrived {
    partial: PathBuf,
    /// Holds the lock.
    file: File,
}

impl Arrived {
    /// The file's properties, which it keeps when it gets its name.
    ///
    /// # Errors
    /// I/O errors.
    pub fn facts(&self) -> Result<Metadata, Failure> {
        self.file.metadata().map_err(Failure::file(&self.partial))
    }

    /// Gives it its name.
    ///
    /// # Errors
    /// I/O errors; the partial file was removed by another process, for one.
    pub fn publish(self, path: &Path) -> Result<(), Failure> {
        if !is_at(&self.file, &self.partial) {
            return Err(gone(&self.partial));
        }
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(Failure::file(folder))?;
        }
        let named = fs::rename(&self.partial, path);
        named
            .and_then(|()| durable::sync_folder_of(path))
            .map_err(Failure::file(path))
    }
}

impl Source<'_> {
    /// Downloads a file to `partial`, from where it stopped the last time. `bar` counts what is there, and is advanced by
    /// what arrives.
    ///
    /// # Errors
    /// No connection for long, a file that is not the listed one, or a full disk. What has arrived stays for the next
    /// attempt, unless it is wrong.
    pub fn download(
        &self,
        file: &RemoteFile,
        partial: &Path,
        bar: &ProgressBar,
    ) -> Result<Arrived, Failure> {
        if let Some(folder) = partial.parent() {
            fs::create_dir_all(folder).map_err(Failure::file(folder))?;
        }
        let mut arriving = Arriving::open(file, partial, bar)?;
        arriving.complete(self)?;
        // Once more from the beginning: bytes of an earlier attempt may be those of a damaged disk or line.
        if !arriving.is_right() {
            tracing::info!(
                "{}: the checksum is another one: downloaded again",
                file.path
            );
            arriving.restart()?;
            arriving.complete(self)?;
        }
        if !arriving.is_right() {
            if is_at(&arriving.to, partial) {
                fs::remove_file(partial).map_err(Failure::file(partial))?;
            }
            return Err(Failure::Fault(format!(
                "{}: what {} sends does not have the checksum in its list, {}, twice; the download was deleted",
                file.path,
                self.hub.host(),
                file.checksum
            )));
        }
        let written = durable::sync_all(&arriving.to, partial);
        written.map_err(|e| disk_error(e, file))?;
        Ok(Arrived {
            partial: partial.to_owned(),
            file: arriving.to,
        })
    }
}

/// Whether `path` still names the open `file`.
fn is_at(file: &File, path: &Path) -> bool {
    let named = path
        .symlink_metadata()
        .map(|facts| (facts.dev(), facts.ino()));
    let open = file.metadata().map(|facts| (facts.dev(), facts.ino()));
    matches!((named, open), (Ok(named), Ok(open)) if named == open)
}

fn gone(partial: &Path) -> Failure {
    Failure::Network(format!(
        "{} was removed by another process during the download",
        partial.display()
    ))
}

/// Takes the lock of an open file; whether another process has it. File systems without locks have none to take.
pub fn is_locked(file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
}

/// Fails if the files would not fit on the disk of `folder`.
///
/// # Errors
/// The bytes that are missing.
pub fn check_space(folder: &Path, needed: u64) -> Result<(), Failure> {
    let Some(existing) = folder.ancestors().find(|folder| folder.is_dir()) else {
        return Ok(());
    };
    let Ok(facts) = statvfs(existing) else {
        return Ok(());
    };
    let free = facts.f_bavail.saturating_mul(facts.f_frsize);
    if needed.saturating_add(LEFT_FREE) <= free {
        return Ok(());
    }
    Err(Failure::Network(format!(
        "{} to download, but the disk of {} has {} free; free some, or set EMBERFLOW_MODELS to a folder on another disk",
        size::show(needed),
        folder.display(),
        size::show(free)
    )))
}

/// A file of which a part has arrived.
struct Arriving<'a> {
    file: &'a RemoteFile,
    partial: &'a Path,
    bar: &'a ProgressBar,
    to: File,
    /// Bytes that have arrived.
    at: u64,
    /// Of them.
    hash: Hash,
}

impl<'a> Arriving<'a> {
    /// Takes the partial file, and reads what an earlier attempt left.
    fn open(
        file: &'a RemoteFile,
        partial: &'a Path,
        bar: &'a ProgressBar,
    ) -> Result<Self, Failure> {
        let open = || {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(partial)
        };
        let mut to = open().map_err(Failure::file(partial))?;
        if is_locked(&to) {
            return Err(Failure::Network(format!(
                "another process is downloading {}; wait for it",
                file.path
            )));
        }
        // Another process has finished or removed it between the two calls.
        if !is_at(&to, partial) {
            to = open().map_err(Failure::file(partial))?;
            if is_locked(&to) || !is_at(&to, partial) {
                return Err(gone(partial));
            }
        }
        let mut this = Self {
            file,
            partial,
            bar,
            to,
            at: 0,
            hash: file.checksum.start(file.bytes),
        };
        bar.set_message("checking what is here");
        this.read_again()?;
        bar.set_message(DOWNLOADING);
        // Nothing arrived in this time.
        bar.reset_eta();
        Ok(this)
    }

    /// Computes the checksum of the bytes that are there.
    fn read_again(&mut self) -> Result<(), Failure> {
        let mut buffer = vec![0; BUFFER];
        loop {
            let read = match self.to.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(Failure::file(self.partial)(e)),
            };
            self.hash.update(&buffer[..read]);
            self.at += read as u64;
        }
        match self.at <= self.file.bytes {
            true => Ok(()),
            false => self.restart(),
        }
    }

    /// Forgets all bytes.
    fn restart(&mut self) -> Result<(), Failure> {
        let emptied = self
            .to
            .set_len(0)
            .and_then(|()| self.to.seek(SeekFrom::Start(0)));
        emptied.map_err(Failure::file(self.partial))?;
        self.bar
            .set_position(self.bar.position().saturating_sub(self.at));
        (self.at, self.hash) = (0, self.file.checksum.start(self.file.bytes));
        Ok(())
    }

    /// Asks for the missing bytes until they are there.
    fn complete(&mut self, source: &Source<'_>) -> Result<(), Failure> {
        let mut failures = 0;
        let mut furthest = self.at;
        while self.at < self.file.bytes {
            let Err(refused) = self.ask(source) else {
                continue;
            };
            if self.at >= furthest + PROGRESS {
                (failures, furthest) = (0, self.at);
            }
            source.hub.wait(refused, &mut failures)?;
        }
        Ok(())
    }

    /// One request for the missing bytes.
    fn ask(&mut self, source: &Source<'_>) -> Result<(), Refused> {
        let answer = source
            .hub
            .open(source.name, source.repo, self.file, self.at, None)?;
        let host = source.hub.host();
        let begins = begin_of(&answer, self.file.bytes).map_err(|found| {
            // A proxy's page, or a file that was replaced: the same again.
            Refused::Finally(Failure::Fault(format!(
                "{}: {host} lists {} bytes and sends {found}",
                self.file.path, self.file.bytes
            )))
        })?;
        if begins != self.at {
            if begins != 0 {
                let what = format!("{host} sends bytes from {begins} on instead of {}", self.at);
                return Err(Refused::Now(what, None));
            }
            self.restart().map_err(Refused::Finally)?;
        }
        let mut body = answer
            .into_body()
            .into_reader()
            .take(self.file.bytes - self.at);
        let mut buffer = vec![0; BUFFER];
        let mut pace = Pace::new(source.hub.patience.silence);
        loop {
            let read = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(Refused::Now(source.hub.lost(&e), None)),
            };
            let written = self.to.write_all(&buffer[..read]);
            written.map_err(|e| Refused::Finally(disk_error(e, self.file)))?;
            self.hash.update(&buffer[..read]);
            self.at += read as u64;
            self.bar.inc(read as u64);
            if pace.is_too_slow(read) {
                return Err(Refused::Now(format!("{host} sends almost nothing"), None));
            }
        }
        match self.at < self.file.bytes {
            true => Err(Refused::Now(
                format!("the connection to {host} ended early"),
                None,
            )),
            false => Ok(()),
        }
    }

    /// Whether all bytes are there, with the right checksum.
    fn is_right(&self) -> bool {
        self.at == self.file.bytes && self.file.checksum.is_of(self.hash.clone())
    }
}

/// The place in the file where an answer begins; what it has instead, if it is of another file.
fn begin_of(answer: &Response<Body>, bytes: u64) -> Result<u64, String> {
    let text = |name| {
        answer
            .headers()
            .get(name)
            .and_then(|value: &header::HeaderValue| value.to_str().ok())
    };
    if answer.status().as_u16() == 206 {
        let range = text(header::CONTENT_RANGE).unwrap_or("no range");
        let parsed = range
            .strip_prefix("bytes ")
            .and_then(|range| range.split_once('/'));
        let begin = parsed.and_then(|(place, _)| place.split_once('-')?.0.trim().parse().ok());
        return match (begin, parsed) {
            (Some(begin), Some((_, total)))
                if total == "*" || total.trim().parse() == Ok(bytes) =>
            {
                Ok(begin)
            }
            _ => Err(range.to_owned()),
        };
    }
    match text(header::CONTENT_LENGTH) {
        Some(sent) if sent.trim().parse() != Ok(bytes) => Err(sent.to_owned()),
        _ => Ok(0),
    }
}

/// Finds connections that are alive and send almost nothing.
struct Pace {
    within: Duration,
    since: Instant,
    bytes: u64,
}

impl Pace {
    /// At least [`PROGRESS`] bytes in four times `silence`.
    fn new(silence: Duration) -> Self {
        Self {
            within: silence * 4,
            since: Instant::now(),
            bytes: 0,
        }
    }

    fn is_too_slow(&mut self, read: usize) -> bool {
        self.bytes += read as u64;
        if self.since.elapsed() < self.within {
            return false;
        }
        let slow = self.bytes < PROGRESS;
        (self.since, self.bytes) = (Instant::now(), 0);
        slow
    }
}

/// A write that failed.
fn disk_error(error: io::Error, file: &RemoteFile) -> Failure {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Failure::Network(format!(
            "the disk is full: {} has {}; free some space and run the command again, it goes on where it stopped",
            file.path,
            size::show(file.bytes)
        )),
        _ => Failure::file(Path::new(&file.path))(error),
    }
}
