//! A sequence and a conversation in one file, for `run --session`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use emberflow_engine::{Engine, Restored, Sequence};

use super::file::{self, CHUNK, HEADER, Header, Most, Saved, is_saved};
use crate::atomic::Partial;
use crate::interrupt::with_suffix;
use crate::tell::tell;
use crate::{Failure, atomic};

/// What the header of a session can be.
const MOST: Most = Most {
    header: HEADER,
    positions: 4 << 20,
};

/// The file of a session.
#[derive(Debug)]
pub struct SessionFile {
    path: PathBuf,
    positions: usize,
    /// What a chat has saved of its messages; empty for other texts.
    note: String,
}

impl SessionFile {
    /// Bytes of memory that it takes: chunks, tokens, and copies of the note.
    pub const MEMORY: u64 = (2 * CHUNK + 4 * HEADER) as u64;

    /// A session in `path`, which is a saved session or does not exist. `model` is read and never written to.
    ///
    /// # Errors
    /// A usage error for a file that is something else; a file that cannot be read or written.
    pub fn new(path: &Path, model: Option<&Path>) -> Result<Self, Failure> {
        atomic::may_write(path, true, &[model])?;
        if path.exists() && !is_saved(path) {
            return Err(Failure::usage(format!(
                "{} exists and is not a saved session: name another file with --session",
                path.display()
            )));
        }
        let mut session = Self {
            path: path.to_owned(),
            positions: 0,
            note: String::new(),
        };
        match Saved::open(path, MOST) {
            Ok(saved) => {
                session.positions = saved.tokens.len();
                session.note = saved.header.note;
            }
            Err(why) if why.kind() == ErrorKind::NotFound => {}
            Err(why) if why.kind() == ErrorKind::InvalidData => session.put_aside(&why)?,
            Err(why) => return Err(Failure::file(path)(why)),
        }
        Ok(session)
    }

    /// Renames a damaged session: its messages are lost, but not by this program.
    fn put_aside(&self, why: &std::io::Error) -> Result<(), Failure> {
        let aside = with_suffix(&self.path, ".damaged");
        atomic::may_write(&aside, false, &[])?;
        std::fs::rename(&self.path, &aside).map_err(Failure::file(&aside))?;
        tell(format_args!(
            "emberflow: the session {} is damaged ({why}): it is now {}, and a new one begins",
            self.path.display(),
            aside.display()
        ));
        Ok(())
    }

    /// Positions of the saved state.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// What was saved with the state.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// Refuses the session of a chat, whose messages another text would replace.
    ///
    /// # Errors
    /// A usage error.
    pub fn without_note(self) -> Result<Self, Failure> {
        match self.note.is_empty() {
            true => Ok(self),
            false => Err(Failure::usage(format!(
                "{} is the session of a chat: use --chat, or name another file",
                self.path.display()
            ))),
        }
    }

    /// Reads the state into `empty`. State that is not usable, of another way of computing for example, gives a shorter
    /// sequence, or an empty one.
    ///
    /// # Errors
    /// A session of another model.
    pub fn restore(&self, engine: &Engine, empty: Sequence) -> Result<Sequence, Failure> {
        let mut restored = Restored::new(empty);
        let saved = match Saved::open(&self.path, MOST) {
            Err(why) if why.kind() == ErrorKind::NotFound => return Ok(restored.finish()),
            opened => opened.map_err(Failure::file(&self.path))?,
        };
        if saved.header.model != model(engine) {
            return Err(Failure::usage(format!(
                "the session {} is of another model: name another file with --session",
                self.path.display()
            )));
        }
        let why = match saved.header.identity == identity(engine) {
            true => saved.read(&mut restored).err().map(|why| why.to_string()),
            false => Some("it was computed in another way".to_owned()),
        };
        if let Some(why) = why {
            tell(format_args!(
                "emberflow: the state in {} is not usable ({why}): it is computed again",
                self.path.display()
            ));
        }
        Ok(restored.finish())
    }

    /// Replaces the file by the state of `sequence` and a note.
    ///
    /// # Errors
    /// I/O errors, after which the file is what it was.
    pub fn save(&self, engine: &Engine, sequence: &Sequence, note: String) -> Result<(), Failure> {
        let usable = sequence.can_be_saved() && sequence.len() <= MOST.positions;
        let snapshots: Vec<_> = sequence.snapshots().filter(|_| usable).collect();
        let positions = match sequence.goes_back() {
            _ if !usable => 0,
            true => sequence.len(),
            false => snapshots.last().copied().unwrap_or(0),
        };
        let header = Header {
            identity: identity(engine),
            model: model(engine),
            parent: String::new(),
            first: 0,
            positions,
            snapshots,
            note,
        };
        file::write(&self.path, Partial::create(&self.path)?, &header, sequence)?;
        Ok(())
    }
}

fn identity(engine: &Engine) -> String {
    format!("{:032x}", engine.state_identity())
}

fn model(engine: &Engine) -> String {
    format!("{:032x}", engine.model_identity())
}
