//! A named file that lists the tokens of a conversation whose state is in the folder: llama.cpp's saved slots.
//!
//! ```text
//! magic, version u32, identity [32], number of tokens u32, tokens u32 each, crc32 of all this
//! ```
//!
//! All numbers are little-endian. The identity is that of the state's pieces.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use emberflow_storage::container::checksum;

use crate::Failure;
use crate::atomic::Partial;

const MAGIC: &[u8; 8] = b"EMBSLOTS";
const VERSION: u32 = 1;
/// Hexadecimal digits of an identity, and those in a file's name.
const IDENTITY: usize = 32;
const SHORT: usize = 16;
/// Bytes before the tokens.
const HEAD: usize = MAGIC.len() + 4 + IDENTITY + 4;
/// Ending of the file's name in the folder.
const ENDING: &str = ".slot";
/// Bytes of a name, at most: with the identity and the endings of this file and of its temporary one it is a name for every
/// file system.
const NAME: usize = 200;

/// The name of a saved slot, which is not that of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotName(String);

impl SlotName {
    /// Checks a client's name. None for what could be a path, hidden, or no name on some system, as in llama.cpp's server.
    pub fn new(name: &str) -> Option<Self> {
        let wrong = |c: char| {
            let looks_like_another = ['\u{ff0e}', '\u{2215}', '\u{2216}', '\u{fffd}', '\u{feff}'];
            c.is_control() || "/\\:*?\"<>|".contains(c) || looks_like_another.contains(&c)
        };
        let ends = name.starts_with([' ', '.']) || name.ends_with([' ', '.']);
        let len = (1..=NAME).contains(&name.len());
        let valid = len && !ends && !name.contains("..") && !name.contains(wrong);
        valid.then(|| Self(name.to_owned()))
    }

    /// The name of its file in the folder, for states of this identity: servers with other models may share the folder.
    pub fn file(&self, identity: &str) -> String {
        let identity = identity.get(..SHORT).unwrap_or(identity);
        format!("{identity}-{}{ENDING}", self.0)
    }

    /// Whether a file of this name lists tokens.
    pub fn is_file(name: &str) -> bool {
        let name = name.strip_suffix(ENDING);
        name.is_some_and(|name| Self::new(name).is_some())
    }
}

/// Why a saved slot cannot be used.
#[derive(Debug)]
pub enum SlotFileError {
    /// It is of another model, or was computed in another way.
    Foreign,
    /// It has more tokens than are allowed: so many.
    Long(usize),
    /// It is not a whole file of this kind.
    Damaged,
    /// It cannot be read.
    Io(io::Error),
}

impl From<io::Error> for SlotFileError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Bytes of the file of so many tokens.
pub fn bytes(tokens: usize) -> u64 {
    (HEAD + 4 * tokens + 4) as u64
}

/// Writes the list of `tokens` to the file that gets the name `path`.
///
/// # Errors
/// I/O errors, after which `path` is what it was.
pub fn write(path: &Path, identity: &str, tokens: &[u32]) -> Result<(), Failure> {
    let mut all = MAGIC.to_vec();
    all.extend(VERSION.to_le_bytes());
    all.extend(identity.bytes());
    all.extend((tokens.len() as u32).to_le_bytes());
    all.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    all.extend(checksum(&all).to_le_bytes());
    let partial = Partial::of_server(path)?;
    (partial.get().write_all(&all)).map_err(Failure::file(path))?;
    partial.publish()
}

/// Whether a file begins as such a list does.
pub fn is_saved(path: &Path) -> bool {
    let mut magic = [0; MAGIC.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && magic == *MAGIC
}

/// Reads a list of at most `most` tokens, whose state has this identity.
///
/// # Errors
/// A file that is something else, or longer; I/O errors.
pub fn read(path: &Path, identity: &str, most: usize) -> Result<Vec<u32>, SlotFileError> {
    let facts = path.metadata()?;
    if !facts.is_file() || facts.len() < bytes(0) {
        return Err(SlotFileError::Damaged);
    }
    let mut file = File::open(path)?;
    let mut all = vec![0; HEAD];
    file.read_exact(&mut all)?;
    let number =
        |at: usize, of: &[u8]| u32::from_le_bytes([of[at], of[at + 1], of[at + 2], of[at + 3]]);
    let count = number(HEAD - 4, &all) as usize;
    let begins = all.starts_with(MAGIC) && number(MAGIC.len(), &all) == VERSION;
    // Nothing is allocated for what the file does not have.
    if !begins || facts.len() != bytes(count) {
        return Err(SlotFileError::Damaged);
    }
    if all[MAGIC.len() + 4..][..IDENTITY] != *identity.as_bytes() {
        return Err(SlotFileError::Foreign);
    }
    if count > most {
        return Err(SlotFileError::Long(count));
    }
    all.resize(bytes(count) as usize, 0);
    file.read_exact(&mut all[HEAD..])?;
    let (listed, sum) = all.split_at(all.len() - 4);
    if number(0, sum) != checksum(listed) {
        return Err(SlotFileError::Damaged);
    }
    let tokens = listed[HEAD..].chunks_exact(4);
    Ok(tokens.map(|token| number(0, token)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_no_paths() {
        for name in ["a", "slot 1.bin", "Übung-2", "x.y.z"] {
            assert!(SlotName::new(name).is_some(), "{name}");
        }
        let long = "x".repeat(NAME + 1);
        let bad = [
            "",
            ".",
            "..",
            ".hidden",
            "a/b",
            "../a",
            "a..b",
            "a\\b",
            "C:",
            "a\0",
            "a\n",
            " a",
            "a ",
            "a.",
            "a*",
            "a\u{2215}b",
            "\u{ff0e}a",
            &long,
        ];
        for name in bad {
            assert!(SlotName::new(name).is_none(), "{name:?}");
        }
        assert!(SlotName::is_file("a.slot") && !SlotName::is_file(".slot"));
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.slot");
        let identity = "0123456789abcdef0123456789abcdef";
        write(&path, identity, &[7, 8, 9]).unwrap();
        assert_eq!(read(&path, identity, 3).unwrap(), [7, 8, 9]);
        assert!(matches!(
            read(&path, identity, 2),
            Err(SlotFileError::Long(3))
        ));
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 4;
            std::fs::write(&path, changed).unwrap();
            assert!(read(&path, identity, 3).is_err(), "{at}");
            std::fs::write(&path, &whole[..at]).unwrap();
            assert!(read(&path, identity, 3).is_err(), "{at}");
        }
    }
}
