//! A folder of saved pieces, shared by models and processes, within a size.
//!
//! Files are named after what they hold, `IDENTITY-KEY.state`, and never change; the time of a file is that of its last use.
//! The least recently used ones make room. Files of other names are not touched. What is damaged is removed and computed
//! again. A file is used only if its tokens, and those of the files before it, are the request's.
//!
//! A saved slot, `NAME.slot`, is a list of tokens: its state is that of the pieces.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use emberflow_engine::{Engine, Restored, Sequence};

use super::day::DayCount;
use super::file::{self, CHUNK, Header, Most, Saved};
use super::index::{Found, Index, PIECE, Piece};
use super::slot_file::{self, SlotFileError, SlotName};
use crate::atomic::{Partial, remove_stale};
use crate::{Failure, atomic};

/// Ending of a file's name.
const ENDING: &str = ".state";
/// Tokens of the index, at most.
const TOKENS: usize = 2 << 20;
/// Files, at most.
const FILES: usize = TOKENS / PIECE;
/// Pieces that are read from the device while one is checked and copied.
const AHEAD: usize = 2;
/// What the header of a piece can be.
const MOST: Most = Most {
    header: 4096,
    positions: PIECE,
};

/// A file of the folder.
#[derive(Debug, Clone, Copy)]
struct Facts {
    bytes: u64,
    used: SystemTime,
    /// The position after its last one, if it is of this model.
    end: usize,
}

impl Facts {
    fn of(file: &Metadata) -> Self {
        Self {
            bytes: file.len(),
            used: file.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            end: 0,
        }
    }
}

/// Saved states of one model in a folder.
#[derive(Debug)]
pub struct StateFolder {
    path: PathBuf,
    /// Most bytes of its files.
    limit: u64,
    day: DayCount,
    identity: String,
    model: String,
    recurrent: bool,
    /// Positions of a sequence.
    context: usize,
    index: Index,
    /// By name: all files of saved state, also other models', and saved slots.
    files: HashMap<String, Facts>,
    /// When the folder changed last, as far as it is known.
    changed: Option<SystemTime>,
    /// When a sequence last began to be saved.
    now: SystemTime,
}

/// What saving a sequence came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A piece was written.
    Written,
    /// All of it is saved that can be.
    Whole,
    /// There is no room for more, or too much was written today.
    NoRoom,
}

/// State that is being read, piece by piece.
#[derive(Debug)]
pub struct Restoring {
    found: Found,
    /// Number of pieces that were read.
    at: usize,
    restored: Restored,
    start: Instant,
    /// The time of use of all its pieces.
    now: SystemTime,
}

impl Restoring {
    /// Tokens of what was found.
    pub fn wanted(&self) -> usize {
        self.found.len
    }

    /// The sequence, which is shorter than what was found where files are missing or damaged.
    pub fn finish(self) -> Sequence {
        let mut sequence = self.restored.finish();
        sequence.truncate(self.found.len);
        tracing::info!(tokens = sequence.len(), time = ?self.start.elapsed(), "saved state is read");
        sequence
    }
}

/// A slot in the folder.
#[derive(Debug)]
pub struct SlotState {
    /// Its state.
    pub found: Found,
    /// Bytes of the files that hold it.
    pub bytes: u64,
}

impl StateFolder {
    /// Bytes of memory that a folder takes at most: tokens, chunks, names and facts of files.
    pub const MEMORY: u64 = (4 * TOKENS + 2 * CHUNK + 512 * FILES) as u64;

    /// Opens or creates the folder `path` for states of `engine`; its files take at most `limit` bytes, and as many are
    /// written a day.
    ///
    /// # Errors
    /// A folder that cannot be created, read or written.
    pub fn open(path: &Path, limit: u64, engine: &Engine) -> Result<Self, Failure> {
        std::fs::create_dir_all(path).map_err(Failure::file(path))?;
        let day = DayCount::new(path, limit);
        atomic::may_write(day.path(), true, &[])?;
        let mut folder = Self {
            path: path.to_owned(),
            limit,
            day,
            identity: format!("{:032x}", engine.state_identity()),
            model: format!("{:032x}", engine.model_identity()),
            recurrent: engine.is_recurrent(),
            context: engine.options().context,
            index: Index::default(),
            files: HashMap::new(),
            changed: None,
            now: SystemTime::now(),
        };
        folder.look().map_err(Failure::file(path))?;
        Ok(folder)
    }

    /// Number of positions with saved state of this model.
    pub fn positions(&self) -> usize {
        self.index.tokens()
    }

    /// Looks for files that came and went, if the folder has changed.
    fn look(&mut self) -> io::Result<()> {
        // Before the files, so that later changes are noticed.
        let changed = self.path.metadata()?.modified().ok();
        if changed.is_some() && changed == self.changed {
            return Ok(());
        }
        let mut files = HashMap::new();
        for entry in std::fs::read_dir(&self.path)? {
            let Ok(entry) = entry else { continue };
            let (Ok(name), Ok(facts)) = (entry.file_name().into_string(), entry.metadata()) else {
                continue;
            };
            let Some(key) = key_of(&name) else {
                let ours = |name: &str| key_of(name).is_some() || SlotName::is_file(name);
                if !SlotName::is_file(&name) {
                    remove_stale(&entry.path(), ours);
                } else if files.len() < FILES
                    && (self.files.contains_key(&name) || slot_file::is_saved(&entry.path()))
                {
                    files.insert(name, Facts::of(&facts));
                }
                continue;
            };
            if !facts.is_file() || files.len() == FILES {
                continue;
            }
            let mut found = Facts::of(&facts);
            if let Some(known) = self.files.get(&name) {
                found.end = known.end;
            } else if name.starts_with(&self.identity) {
                match self.learn(key, &entry.path()) {
                    Some(end) => found.end = end,
                    None => continue,
                }
            }
            files.insert(name, found);
        }
        let gone = self.files.keys().filter(|name| !files.contains_key(*name));
        for key in gone
            .filter_map(|name| self.own_key(name))
            .collect::<Vec<_>>()
        {
            self.index.remove(key);
        }
        (self.files, self.changed) = (files, changed);
        Ok(())
    }

    /// Adds the piece in a file of this model to the index. Returns its end. What is damaged is removed.
    fn learn(&mut self, key: u128, path: &Path) -> Option<usize> {
        let saved = match Saved::open(path, MOST) {
            Ok(saved) => saved,
            Err(why) => {
                self.failed(path, &why);
                return None;
            }
        };
        let parent = u128::from_str_radix(&saved.header.parent, 16).ok();
        let piece = Piece {
            parent: parent.unwrap_or_default(),
            first: saved.header.first,
            tokens: saved.tokens.into(),
            snapshot: !saved.header.snapshots.is_empty(),
        };
        if piece.key() != key || saved.header.identity != self.identity {
            self.failed(path, &file::damaged("its name is of another state"));
            return None;
        }
        let end = piece.end();
        if self.index.tokens() + piece.tokens.len() <= TOKENS {
            self.index.add(piece);
        }
        Some(end)
    }

    /// Removes a damaged file. One that cannot be read, or is gone, stays as it is.
    fn failed(&self, path: &Path, why: &io::Error) {
        match why.kind() {
            ErrorKind::InvalidData | ErrorKind::UnexpectedEof => {
                tracing::warn!(path = %path.display(), %why, "a saved state is removed; its text is computed again");
                let _ = std::fs::remove_file(path);
            }
            ErrorKind::NotFound => {}
            _ => tracing::warn!(path = %path.display(), %why, "a saved state cannot be read"),
        }
    }

    fn name(&self, key: u128) -> String {
        format!("{}-{key:032x}{ENDING}", self.identity)
    }

    /// The key in the name of a file of this model.
    fn own_key(&self, name: &str) -> Option<u128> {
        key_of(name).filter(|_| name.starts_with(&self.identity))
    }

    /// The longest saved beginning of `tokens` that fits in a sequence.
    pub fn find(&self, tokens: &[u32]) -> Found {
        self.index.find(tokens, self.recurrent, self.context)
    }

    /// Begins to read what was found into `empty`.
    pub fn restore(&self, found: Found, empty: Sequence) -> Restoring {
        Restoring {
            found,
            at: 0,
            restored: Restored::new(empty),
            start: Instant::now(),
            now: SystemTime::now(),
        }
    }

    /// Reads the next piece. Returns false if there is none, or if it is missing or damaged, so that the rest is of no use.
    pub fn restore_next(&mut self, of: &mut Restoring) -> bool {
        let Some(&key) = of.found.pieces.get(of.at) else {
            return false;
        };
        if let Some(&next) = of.found.pieces.get(of.at + AHEAD) {
            self.read_ahead(next);
        }
        if let Err(why) = self.read(key, &mut of.restored) {
            let name = self.name(key);
            self.failed(&self.path.join(&name), &why);
            self.index.remove(key);
            self.files.remove(&name);
            return false;
        }
        self.touch(key, of.now);
        of.at += 1;
        of.at < of.found.pieces.len()
    }

    /// Tells the system that a piece will be read, so that it comes from the device while others are checked and copied.
    fn read_ahead(&self, key: u128) {
        let file = File::open(self.path.join(self.name(key)));
        // Advice only.
        let _ = file.map(|file| rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed));
    }

    fn read(&self, key: u128, into: &mut Restored) -> io::Result<()> {
        let saved = Saved::open(&self.path.join(self.name(key)), MOST)?;
        let is_it = self.index.get(key).is_some_and(|piece| {
            piece.tokens[..] == saved.tokens[..]
                && piece.first == saved.header.first
                && saved.header.identity == self.identity
        });
        if !is_it {
            return Err(file::damaged("it is of another text"));
        }
        saved.read(into)
    }

    /// Gives a file the time of the current use: that of all pieces of a sequence together.
    fn touch(&mut self, key: u128, now: SystemTime) {
        let name = self.name(key);
        let file = File::options().append(true).open(self.path.join(&name));
        // A folder that cannot be written still gives what it has.
        let _ = file.and_then(|file| file.set_modified(now));
        if let Some(facts) = self.files.get_mut(&name) {
            facts.used = now;
        }
    }

    /// Begins to save a sequence: its pieces that are saved count as used.
    pub fn begin(&mut self, sequence: &Sequence) {
        self.now = SystemTime::now();
        for key in self.find(sequence.tokens()).pieces {
            self.touch(key, self.now);
        }
    }

    /// Whether what is missing of a sequence can be saved: within the folder's size and what may be written today.
    pub fn has_room(&self, sequence: &Sequence) -> bool {
        let known = self.find(sequence.tokens()).len;
        let bytes = sequence.saved_bytes(known..sequence.len());
        bytes <= self.limit && self.day.has(bytes)
    }

    /// Saves the next piece of a sequence that is not saved.
    ///
    /// # Errors
    /// I/O errors.
    pub fn save_next(&mut self, sequence: &Sequence) -> Result<Step, Failure> {
        self.look().map_err(Failure::file(&self.path))?;
        if !sequence.can_be_saved() {
            return Ok(Step::Whole);
        }
        let Some(piece) = self.index.missing(sequence) else {
            return Ok(Step::Whole);
        };
        let end = piece.end();
        let snapshot = piece.snapshot.then_some(end);
        let block = snapshot.and_then(|len| sequence.snapshot(len));
        let rest = (MOST.header + 4 * PIECE) as u64;
        let about =
            sequence.saved_bytes(piece.first..end) + block.map_or(0, <[u8]>::len) as u64 + rest;
        let own = self.find(sequence.tokens()).pieces;
        let own: HashSet<String> = own.into_iter().map(|key| self.name(key)).collect();
        if !self.may_write(about, &own)? {
            return Ok(Step::NoRoom);
        }
        let name = self.name(piece.key());
        let path = self.path.join(&name);
        let header = Header {
            identity: self.identity.clone(),
            model: self.model.clone(),
            parent: format!("{:032x}", piece.parent),
            first: piece.first,
            positions: piece.tokens.len(),
            snapshots: snapshot.into_iter().collect(),
            note: String::new(),
        };
        let bytes = file::write(&path, Partial::of_server(&path)?, &header, sequence)?;
        for replaced in self.index.replaced_by(&piece) {
            self.remove(&self.name(replaced));
        }
        let (key, used) = (piece.key(), self.now);
        self.index.add(piece);
        self.files.insert(name, Facts { bytes, used, end });
        self.touch(key, used);
        Ok(Step::Written)
    }

    /// Lists the tokens of a sequence's saved state in a file of this name. None if there is no room for it, or too much was
    /// written today. Without saved state nothing is written.
    ///
    /// # Errors
    /// I/O errors.
    pub fn save_slot(
        &mut self,
        name: &SlotName,
        sequence: &Sequence,
    ) -> Result<Option<SlotState>, Failure> {
        let found = self.find(sequence.tokens());
        let mut state = self.slot_state(found);
        if state.found.len == 0 {
            return Ok(Some(state));
        }
        let (file, bytes) = (name.file(&self.identity), slot_file::bytes(state.found.len));
        let mut own: HashSet<String> = state
            .found
            .pieces
            .iter()
            .map(|&key| self.name(key))
            .collect();
        own.insert(file.clone());
        if !self.may_write(bytes, &own)? {
            return Ok(None);
        }
        let path = self.path.join(&file);
        if path.exists() && !slot_file::is_saved(&path) {
            let why = io::Error::new(ErrorKind::AlreadyExists, "it is another program's");
            return Err(Failure::file(&path)(why));
        }
        slot_file::write(&path, &self.identity, &sequence.tokens()[..state.found.len])?;
        let used = SystemTime::now();
        // The pieces are as recently used as their list.
        for &key in &state.found.pieces {
            self.touch(key, used);
        }
        self.files.insert(
            file,
            Facts {
                bytes,
                used,
                end: 0,
            },
        );
        state.bytes += bytes;
        Ok(Some(state))
    }

    /// The tokens of a saved slot, and their state as far as it is in the folder.
    ///
    /// # Errors
    /// A file that is missing, damaged, or of another model, and one that is longer than the context.
    pub fn slot(&mut self, name: &SlotName) -> Result<(Vec<u32>, SlotState), SlotFileError> {
        self.look()?;
        let file = name.file(&self.identity);
        let path = self.path.join(&file);
        let tokens = slot_file::read(&path, &self.identity, self.context)?;
        let mut state = self.slot_state(self.find(&tokens));
        state.bytes += slot_file::bytes(tokens.len());
        let whole = state.found.len == tokens.len();
        if let Some(facts) = self.files.get_mut(&file).filter(|_| whole) {
            facts.used = SystemTime::now();
            let file = File::options().append(true).open(&path);
            // A folder that cannot be written still gives what it has.
            let _ = file.and_then(|file| file.set_modified(facts.used));
        }
        Ok((tokens, state))
    }

    fn slot_state(&self, found: Found) -> SlotState {
        let files = found
            .pieces
            .iter()
            .map(|&key| self.files.get(&self.name(key)));
        let bytes = files.flatten().map(|facts| facts.bytes).sum();
        SlotState { found, bytes }
    }

    /// Makes room for `bytes`, and counts them for today. False if there is none, or too much was written today.
    fn may_write(&mut self, bytes: u64, own: &HashSet<String>) -> Result<bool, Failure> {
        Ok(self.day.has(bytes) && self.make_room(bytes, own) && self.day.take(bytes)?)
    }

    /// Removes the least recently used files until there is room for `bytes`, but none of `own`, of the sequence that is being
    /// saved. False if there is not enough.
    fn make_room(&mut self, bytes: u64, own: &HashSet<String>) -> bool {
        let mut taken: u64 = self.files.values().map(|facts| facts.bytes).sum();
        let enough = |taken: u64, folder: &Self| {
            let few = folder.index.tokens() + PIECE <= TOKENS && folder.files.len() < FILES;
            taken.saturating_add(bytes) <= folder.limit && few
        };
        if bytes > self.limit || enough(taken, self) {
            return bytes <= self.limit;
        }
        let others = self.files.iter().filter(|(name, _)| !own.contains(*name));
        // Of pieces last used together, the later ones are of no use without the earlier ones.
        let mut order: Vec<_> = others
            .map(|(name, facts)| (facts.used, Reverse(facts.end), facts.bytes, name.clone()))
            .collect();
        order.sort();
        for (_, _, freed, name) in order {
            if enough(taken, self) {
                break;
            }
            self.remove(&name);
            taken -= freed;
        }
        enough(taken, self)
    }

    fn remove(&mut self, name: &str) {
        // Another process may have removed it.
        let _ = std::fs::remove_file(self.path.join(name));
        self.files.remove(name);
        if let Some(key) = self.own_key(name) {
            self.index.remove(key);
        }
    }
}

/// The key in a name of a saved state.
fn key_of(name: &str) -> Option<u128> {
    let (identity, key) = name.strip_suffix(ENDING)?.split_once('-')?;
    let hex = |text: &str| text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
    match hex(identity) && hex(key) {
        true => u128::from_str_radix(key, 16).ok(),
        false => None,
    }
}
