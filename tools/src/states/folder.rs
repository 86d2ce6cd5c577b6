//! A folder of saved pieces, shared by models and processes, within a size.
//!
//! Files are named after what they hold, `IDENTITY-KEY.state`, and never change; the time of a file is that of its last use.
//! The least recently used ones make room. Files of other names are not touched. What is damaged is removed and computed
//! again. Each file says which tokens it is of, so a key that two texts share costs time and no text.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use emberflow_engine::{Engine, Restored, Sequence};

use super::file::{self, CHUNK, Header, Saved};
use super::index::{Found, Index, PIECE, Piece};
use crate::{Failure, atomic};

/// Ending of a file's name.
const ENDING: &str = "state";
/// The file that counts the bytes of a day.
const DAY: &str = "written-today";
/// Tokens of the index, at most.
const TOKENS: usize = 2 << 20;
/// Files, at most.
const FILES: usize = TOKENS / PIECE;
/// Pieces that are read from the device while one is checked and copied.
const AHEAD: usize = 2;
/// Time after which an unfinished file belongs to no process.
const STALE: Duration = Duration::from_secs(3600);

/// A file of the folder.
#[derive(Debug, Clone, Copy)]
struct Facts {
    bytes: u64,
    used: SystemTime,
    /// Last position, if it is of this model.
    end: usize,
}

/// Saved states of one model in a folder.
#[derive(Debug)]
pub struct StateFolder {
    path: PathBuf,
    /// Most bytes of its files, and most that are written a day.
    limit: u64,
    identity: String,
    recurrent: bool,
    index: Index,
    /// By name: all files of saved state, also other models'.
    files: HashMap<String, Facts>,
    today: Today,
}

/// Bytes written on a day.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Today {
    day: u64,
    bytes: u64,
}

impl Today {
    fn day() -> u64 {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        since.unwrap_or_default().as_secs() / (24 * 3600)
    }

    /// What a process on this folder has counted.
    fn read(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let mut numbers = text.split_whitespace().map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(day)), Some(Ok(bytes))) if day == Self::day() => Self { day, bytes },
            _ => Self {
                day: Self::day(),
                bytes: 0,
            },
        }
    }
}

impl StateFolder {
    /// Bytes of memory that a folder takes at most: tokens, chunks, names and facts of files.
    pub const MEMORY: u64 = (4 * TOKENS + 2 * CHUNK + 512 * FILES) as u64;

    /// Opens or creates the folder `path` for states of `engine`; its files take at most `limit` bytes.
    ///
    /// # Errors
    /// A folder that cannot be created, read or written.
    pub fn open(path: &Path, limit: u64, engine: &Engine) -> Result<Self, Failure> {
        std::fs::create_dir_all(path).map_err(Failure::file(path))?;
        atomic::may_write(&path.join(DAY), true, &[])?;
        let mut folder = Self {
            path: path.to_owned(),
            limit,
            identity: format!("{:032x}", engine.state_identity()),
            recurrent: engine.is_recurrent(),
            index: Index::default(),
            files: HashMap::new(),
            today: Today::default(),
        };
        folder.scan().map_err(Failure::file(path))?;
        Ok(folder)
    }

    /// Number of positions with saved state of this model.
    pub fn positions(&self) -> usize {
        self.index.tokens()
    }

    /// Looks for files that came and went.
    fn scan(&mut self) -> io::Result<()> {
        self.today = Today::read(&self.path.join(DAY));
        let mut files = HashMap::new();
        for entry in std::fs::read_dir(&self.path)? {
            let Ok(entry) = entry else { continue };
            let (Ok(name), Ok(facts)) = (entry.file_name().into_string(), entry.metadata()) else {
                continue;
            };
            let used = facts.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let Some(key) = key_of(&name) else {
                remove_if_stale(&entry.path(), &name, used);
                continue;
            };
            if !facts.is_file() {
                continue;
            }
            let mut found = Facts {
                bytes: facts.len(),
                used,
                end: 0,
            };
            if name.starts_with(&self.identity) {
                match self.known(key, &entry.path()) {
                    Some(end) => found.end = end,
                    None => continue,
                }
            }
            files.insert(name, found);
        }
        let gone = |name: &&String| !files.contains_key(*name);
        let gone: Vec<_> = self.files.keys().filter(gone).cloned().collect();
        gone.iter()
            .filter_map(|name| key_of(name))
            .for_each(|key| self.index.remove(key));
        self.files = files;
        Ok(())
    }

    /// Adds the piece in a file of this model to the index, if it is not in it. Returns its end. What is damaged is removed.
    fn known(&mut self, key: u64, path: &Path) -> Option<usize> {
        if let Some(piece) = self.index.get(key) {
            return Some(piece.end());
        }
        let saved = match Saved::open(path) {
            Ok(saved) => saved,
            Err(why) => {
                if why.kind() == ErrorKind::InvalidData {
                    self.discard(path, &why);
                }
                return None;
            }
        };
        let parent = u64::from_str_radix(&saved.header.parent, 16).ok();
        let piece = Piece {
            parent: parent.unwrap_or_default(),
            first: saved.header.first,
            tokens: saved.tokens.into(),
            snapshot: !saved.header.snapshots.is_empty(),
        };
        if piece.key() != key
            || piece.tokens.len() > PIECE
            || saved.header.identity != self.identity
        {
            self.discard(path, &io::Error::other("its name is of another state"));
            return None;
        }
        let end = piece.end();
        if self.index.tokens() + piece.tokens.len() <= TOKENS {
            self.index.add(piece);
        }
        Some(end)
    }

    fn discard(&self, path: &Path, why: &io::Error) {
        tracing::warn!(path = %path.display(), %why, "a saved state is removed; its text is computed again");
        let _ = std::fs::remove_file(path);
    }

    fn name(&self, key: u64) -> String {
        format!("{}-{key:016x}.{ENDING}", self.identity)
    }

    /// The longest saved beginning of `tokens`.
    pub fn find(&self, tokens: &[u32]) -> Found {
        self.index.find(tokens, self.recurrent)
    }

    /// Reads what was found into `empty`. Returns a shorter sequence where files are missing or damaged.
    pub fn restore(&mut self, found: &Found, empty: Sequence) -> Sequence {
        let start = Instant::now();
        let mut restored = Restored::new(empty);
        for (at, &key) in found.pieces.iter().enumerate() {
            if let Some(&next) = found.pieces.get(at + AHEAD) {
                self.read_ahead(next);
            }
            // The last piece may go on beyond what was found.
            let fits =
                (self.index.get(key)).is_some_and(|piece| piece.tokens.len() <= restored.room());
            if !fits {
                break;
            }
            if let Err(why) = self.read(key, &mut restored) {
                let path = self.path.join(self.name(key));
                match why.kind() {
                    ErrorKind::InvalidData | ErrorKind::UnexpectedEof => self.discard(&path, &why),
                    ErrorKind::NotFound => {}
                    _ => {
                        tracing::warn!(path = %path.display(), %why, "a saved state cannot be read")
                    }
                }
                self.index.remove(key);
                self.files.remove(&self.name(key));
                break;
            }
        }
        let mut sequence = restored.finish();
        sequence.truncate(found.len);
        tracing::info!(tokens = sequence.len(), time = ?start.elapsed(), "saved state is read");
        sequence
    }

    /// Tells the system that a piece will be read, so that it comes from the device while others are checked and copied.
    fn read_ahead(&self, key: u64) {
        let file = File::open(self.path.join(self.name(key)));
        // Advice only.
        let _ = file.map(|file| rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed));
    }

    fn read(&mut self, key: u64, into: &mut Restored) -> io::Result<()> {
        let name = self.name(key);
        let path = self.path.join(&name);
        let saved = Saved::open(&path)?;
        let is_it = self.index.get(key).is_some_and(|piece| {
            piece.tokens[..] == saved.tokens[..]
                && piece.first == saved.header.first
                && saved.header.identity == self.identity
        });
        if !is_it {
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                "it is of another text",
            ));
        }
        saved.read(into)?;
        let now = SystemTime::now();
        // So that it is not what makes room next. A folder that cannot be written still gives what it has.
        let _ = File::options()
            .append(true)
            .open(&path)
            .and_then(|file| file.set_modified(now));
        if let Some(facts) = self.files.get_mut(&name) {
            facts.used = now;
        }
        Ok(())
    }

    /// Looks at the folder again, before the pieces of a sequence are saved.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn refresh(&mut self) -> Result<(), Failure> {
        self.scan().map_err(Failure::file(&self.path))
    }

    /// Saves the next piece of a sequence that is not saved. Returns false if there is none, or no room for it today.
    ///
    /// # Errors
    /// I/O errors.
    pub fn save_next(&mut self, sequence: &Sequence) -> Result<bool, Failure> {
        if !sequence.can_be_saved() {
            return Ok(false);
        }
        let Some(piece) = self.index.missing(sequence) else {
            return Ok(false);
        };
        let end = piece.end();
        let snapshot = piece.snapshot.then_some(end);
        let block = snapshot
            .and_then(|len| sequence.snapshot(len))
            .map_or(0, <[u8]>::len);
        let about = sequence.saved_bytes(piece.first..end) + block as u64;
        if self.today.bytes.saturating_add(about) > self.limit || !self.make_room(about) {
            return Ok(false);
        }
        let key = piece.key();
        let name = self.name(key);
        let header = Header {
            identity: self.identity.clone(),
            parent: format!("{:016x}", piece.parent),
            first: piece.first,
            positions: piece.tokens.len(),
            snapshots: snapshot.into_iter().collect(),
            note: String::new(),
        };
        let bytes = file::write(&self.path.join(&name), &header, sequence)?;
        self.count(bytes)?;
        for replaced in self.index.replaced_by(&piece) {
            self.remove(&self.name(replaced));
        }
        let used = SystemTime::now();
        self.index.add(piece);
        self.files.insert(name, Facts { bytes, used, end });
        Ok(true)
    }

    /// Counts bytes of today.
    fn count(&mut self, bytes: u64) -> Result<(), Failure> {
        let path = self.path.join(DAY);
        self.today = Today::read(&path);
        self.today.bytes += bytes;
        let Today { day, bytes } = self.today;
        // A number lost with the power does no harm.
        std::fs::write(&path, format!("{day} {bytes}\n")).map_err(Failure::file(&path))
    }

    /// Removes the least recently used files until there is room for `bytes`. False, and nothing is removed, if there is never
    /// enough.
    fn make_room(&mut self, bytes: u64) -> bool {
        if bytes > self.limit {
            return false;
        }
        loop {
            let taken: u64 = self.files.values().map(|facts| facts.bytes).sum();
            let few = self.index.tokens() + PIECE <= TOKENS && self.files.len() < FILES;
            if taken + bytes <= self.limit && few {
                return true;
            }
            // Of pieces last used together, the later ones are of no use without the earlier ones.
            let oldest = self
                .files
                .iter()
                .min_by_key(|(_, facts)| (facts.used, std::cmp::Reverse(facts.end)));
            let Some(name) = oldest.map(|(name, _)| name.clone()) else {
                return false;
            };
            self.remove(&name);
        }
    }

    fn remove(&mut self, name: &str) {
        // Another process may have removed it.
        let _ = std::fs::remove_file(self.path.join(name));
        self.files.remove(name);
        if name.starts_with(&self.identity)
            && let Some(key) = key_of(name)
        {
            self.index.remove(key);
        }
    }
}

/// The key in a name of a saved state.
fn key_of(name: &str) -> Option<u64> {
    let (identity, rest) = name.split_once('-')?;
    let key = rest.strip_suffix(ENDING)?.strip_suffix('.')?;
    let hex = |text: &str, len| text.len() == len && text.bytes().all(|b| b.is_ascii_hexdigit());
    match hex(identity, 32) && hex(key, 16) {
        true => u64::from_str_radix(key, 16).ok(),
        false => None,
    }
}

/// Removes an unfinished file that nobody writes any more.
fn remove_if_stale(path: &Path, name: &str, used: SystemTime) {
    let whole = name.split_once(".partial").map(|(whole, _)| whole);
    let old = used.elapsed().is_ok_and(|age| age > STALE);
    if old && whole.is_some_and(|whole| key_of(whole).is_some()) {
        let _ = std::fs::remove_file(path);
    }
}
