//! A sequence and a conversation in one file, for `run --session`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use emberflow_engine::{Engine, Restored, Sequence};

use super::file::{self, CHUNK, Header, Saved, is_saved};
use crate::tell::tell;
use crate::{Failure, atomic};

/// The file of a session.
#[derive(Debug)]
pub struct SessionFile {
    path: PathBuf,
    positions: usize,
}

impl SessionFile {
    /// Bytes of memory that it takes: a chunk, and what a header of usual length takes.
    pub const MEMORY: u64 = 4 * CHUNK as u64;

    /// A session in `path`, which is a saved session or does not exist. `model` is read and never written to.
    ///
    /// # Errors
    /// A usage error for a file that is something else, or that cannot be written.
    pub fn new(path: &Path, model: Option<&Path>) -> Result<Self, Failure> {
        atomic::may_create(path, true, &[model])?;
        if path.exists() && !is_saved(path) {
            return Err(Failure::usage(format!(
                "{} exists and is not a saved session: name another file with --session",
                path.display()
            )));
        }
        let saved = Saved::open(path).ok();
        Ok(Self {
            path: path.to_owned(),
            positions: saved.map_or(0, |saved| saved.tokens.len()),
        })
    }

    /// Positions of the saved state.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Reads the state into `empty`, and the note saved with it. A file that does not exist, or is damaged, gives an empty
    /// sequence.
    ///
    /// # Errors
    /// A session of another model.
    pub fn restore(&self, engine: &Engine, empty: Sequence) -> Result<(Sequence, String), Failure> {
        let mut restored = Restored::new(empty);
        let saved = match Saved::open(&self.path) {
            Err(why) if why.kind() == ErrorKind::NotFound => {
                return Ok((restored.finish(), String::new()));
            }
            opened => opened,
        };
        let identity = identity(engine);
        let note = match &saved {
            Ok(saved) if saved.header.identity != identity => {
                return Err(Failure::usage(format!(
                    "the session {} was saved with another model or version: name another file with --session",
                    self.path.display()
                )));
            }
            Ok(saved) => saved.header.note.clone(),
            Err(_) => String::new(),
        };
        let read = saved.and_then(|saved| saved.read(&mut restored));
        if let Err(why) = read {
            tell(format_args!(
                "emberflow: the state in {} is not usable ({why}); it is computed again",
                self.path.display()
            ));
        }
        Ok((restored.finish(), note))
    }

    /// Replaces the file by the state of `sequence` and a note.
    ///
    /// # Errors
    /// I/O errors, after which the file is what it was.
    pub fn save(&self, engine: &Engine, sequence: &Sequence, note: String) -> Result<(), Failure> {
        if !sequence.can_be_saved() {
            return Ok(());
        }
        let snapshots: Vec<_> = sequence.snapshots().collect();
        let positions = match sequence.goes_back() {
            true => sequence.len(),
            false => snapshots.last().copied().unwrap_or(0),
        };
        let header = Header {
            identity: identity(engine),
            parent: String::new(),
            first: 0,
            positions,
            snapshots,
            note,
        };
        file::write(&self.path, &header, sequence)?;
        Ok(())
    }
}

fn identity(engine: &Engine) -> String {
    format!("{:032x}", engine.state_identity())
}
