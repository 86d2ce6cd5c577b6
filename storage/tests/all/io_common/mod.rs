//! Shared by the I/O tests: a file whose every byte encodes its position, and arenas to read into.

use std::io::Write;

use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::io::{Completion, FileSource, IoError};

/// Byte at file offset `at`. No period that a wrong offset could hit by chance.
pub fn byte_at(at: u64) -> u8 {
    let x = at.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((x >> 32) ^ (x >> 51)) as u8
}

pub fn expect_bytes(got: &[u8], at: u64) {
    let bad = (at..).zip(got).find(|&(at, &b)| b != byte_at(at));
    if let Some((wrong, b)) = bad {
        panic!("byte at offset {wrong} is {b}, not {}", byte_at(wrong));
    }
}

/// A temporary file of `len` patterned bytes, in the target directory rather than in /tmp, which
/// may be a file system without direct I/O.
pub fn patterned(len: u64) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes: Vec<u8> = (0..len).map(byte_at).collect();
    file.write_all(&bytes).unwrap();
    file.as_file().sync_all().unwrap();
    file
}

pub fn source(file: &tempfile::NamedTempFile) -> FileSource {
    FileSource::open(file.path(), 0).unwrap()
}

pub fn arena(slots: u32, len: usize) -> Arena {
    Arena::new(slots, len, 512, ArenaOptions::default()).unwrap()
}

/// All reads ended because of an earlier one beyond the end of the file, at this offset.
pub fn expect_stopped(done: &[Completion], at: u64) {
    for done in done {
        let stopped = done.result.as_ref().unwrap_err();
        let IoError::Stopped { first } = stopped else {
            panic!("{stopped}")
        };
        assert!(matches!(**first, IoError::Eof { offset, .. } if offset == at));
    }
}
