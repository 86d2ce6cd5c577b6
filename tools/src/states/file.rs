//! A file with the state of some positions of a sequence.
//!
//! ```text
//! magic, version u32, length of the header u32, header (JSON), tokens u32 each, crc32 of all this
//! chunks of up to 1 MiB: length u32, crc32, bytes
//!     keys, values and pool vectors of the positions; then each snapshot of recurrent state
//! ```
//!
//! All numbers are little-endian. A chunk's bytes are used after its checksum is checked. A file gets its name when it is
//! complete and flushed; what fails is removed.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;

use emberflow_engine::{Restored, Sequence};
use emberflow_storage::container::checksum;
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::atomic::Partial;

const MAGIC: &[u8; 8] = b"EMBSTATE";
const VERSION: u32 = 1;
/// Bytes of a chunk, at most. Of this length reads are near the sequential rate of flash.
pub const CHUNK: usize = 1 << 20;
/// Bytes of a header, at most: with the messages of a long conversation.
pub const HEADER: usize = 4 << 20;

/// What a file holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// What the state was computed with: [`emberflow_engine::Engine::state_identity`].
    pub identity: String,
    /// The model: [`emberflow_engine::Engine::model_identity`].
    pub model: String,
    /// Key of the tokens before the first position.
    pub parent: String,
    /// First position.
    pub first: usize,
    /// Number of positions.
    pub positions: usize,
    /// Lengths of the sequence whose recurrent state is in the file, from the shortest on.
    pub snapshots: Vec<usize>,
    /// Text of the caller.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

/// Writes the state of `header`'s positions and snapshots of `sequence` to the file that gets the name `path`. Returns
/// the bytes of the file.
///
/// # Errors
/// I/O errors, after which `path` is what it was.
pub fn write(
    path: &Path,
    partial: Partial,
    header: &Header,
    sequence: &Sequence,
) -> Result<u64, Failure> {
    let written = write_to(partial.get(), header, sequence).map_err(Failure::file(path))?;
    partial.publish()?;
    Ok(written)
}

fn write_to(file: &File, header: &Header, sequence: &Sequence) -> io::Result<u64> {
    let positions = header.first..header.first + header.positions;
    let json = serde_json::to_vec(header)?;
    if json.len() > HEADER {
        return Err(io::Error::other("the conversation is too long to be saved"));
    }
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.extend((json.len() as u32).to_le_bytes());
    head.extend(json);
    let tokens = &sequence.tokens()[positions.clone()];
    head.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    head.extend(checksum(&head).to_le_bytes());
    let mut file = file;
    file.write_all(&head)?;
    let mut chunks = ChunkWriter {
        to: file,
        buffer: Vec::with_capacity(CHUNK),
        written: head.len() as u64,
    };
    sequence.write_positions(positions, &mut chunks)?;
    for &len in &header.snapshots {
        match sequence.snapshot(len) {
            Some(block) => chunks.write_all(block)?,
            None => return Err(io::Error::other("it has no state at that length")),
        }
    }
    chunks.flush()?;
    Ok(chunks.written)
}

/// The largest header that is read.
#[derive(Debug, Clone, Copy)]
pub struct Most {
    /// Its bytes.
    pub header: usize,
    /// Its positions.
    pub positions: usize,
}

/// An open file whose header was checked.
#[derive(Debug)]
pub struct Saved {
    /// Its header.
    pub header: Header,
    /// Tokens of its positions.
    pub tokens: Vec<u32>,
    file: File,
}

/// An error of a file's content.
pub fn damaged(what: &str) -> io::Error {
    io::Error::new(
        ErrorKind::InvalidData,
        format!("it is not a whole saved state: {what}"),
    )
}

/// Whether `path` begins as files of this kind do.
pub fn is_saved(path: &Path) -> bool {
    // Opening a pipe would wait for its writer.
    if !path.is_file() {
        return false;
    }
    let mut magic = [0; MAGIC.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && magic == *MAGIC
}

impl Saved {
    /// Opens `path` and checks its header, which has at most `most` bytes, and as many positions.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] for anything but a whole header of this version; other I/O errors.
    pub fn open(path: &Path, most: Most) -> io::Result<Self> {
        let facts = path.metadata()?;
        if !facts.is_file() {
            return Err(damaged("it is not a file"));
        }
        let (mut file, len) = (File::open(path)?, facts.len());
        let mut head = vec![0; 16];
        let more = |bytes: usize, head: &mut Vec<u8>, file: &mut File| {
            let at = head.len();
            // Nothing is allocated for what the file does not have.
            if (at as u64).saturating_add(bytes as u64) > len {
                return Err(damaged("its end is missing"));
            }
            head.resize(at + bytes, 0);
            file.read_exact(&mut head[at..])
        };
        if len < 16 {
            return Err(damaged("its end is missing"));
        }
        file.read_exact(&mut head)?;
        let number =
            |at: usize, of: &[u8]| u32::from_le_bytes([of[at], of[at + 1], of[at + 2], of[at + 3]]);
        let json = number(12, &head) as usize;
        if head[..8] != *MAGIC || number(8, &head) != VERSION || json > most.header {
            return Err(damaged("it begins differently"));
        }
        more(json, &mut head, &mut file)?;
        let header: Header =
            serde_json::from_slice(&head[16..]).map_err(|_| damaged("its header"))?;
        if header.positions > most.positions {
            return Err(damaged("it is longer than any"));
        }
        more(4 * header.positions, &mut head, &mut file)?;
        let sum = checksum(&head);
        more(4, &mut head, &mut file)?;
        if number(head.len() - 4, &head) != sum {
            return Err(damaged("the checksum of its header differs"));
        }
        let tokens = head[16 + json..head.len() - 4].chunks_exact(4);
        let tokens = tokens.map(|token| number(0, token)).collect();
        Ok(Self {
            header,
            tokens,
            file,
        })
    }

    /// Reads the state into `to`, whose tokens are those before this file's.
    ///
    /// # Errors
    /// As [`Saved::open`], and more positions than `to` has room for.
    pub fn read(self, to: &mut Restored) -> io::Result<()> {
        if to.len() != self.header.first {
            return Err(damaged("it continues another text"));
        }
        let mut chunks = ChunkReader {
            from: self.file,
            buffer: Vec::new(),
            at: 0,
        };
        to.positions(&self.tokens, &mut chunks)?;
        (self.header.snapshots.iter()).try_for_each(|&len| to.snapshot(len, &mut chunks))?;
        match chunks.at == chunks.buffer.len() && chunks.ends()? {
            true => Ok(()),
            false => Err(damaged("it has more bytes than its header says")),
        }
    }
}

/// Collects bytes into chunks with checksums.
struct ChunkWriter<W> {
    to: W,
    buffer: Vec<u8>,
    written: u64,
}

impl<W: Write> Write for ChunkWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(CHUNK - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..count]);
        if self.buffer.len() == CHUNK {
            self.flush()?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.to
            .write_all(&(self.buffer.len() as u32).to_le_bytes())?;
        self.to.write_all(&checksum(&self.buffer).to_le_bytes())?;
        self.to.write_all(&self.buffer)?;
        self.written += self.buffer.len() as u64 + 8;
        self.buffer.clear();
        Ok(())
    }
}

/// Reads chunks and checks them.
struct ChunkReader<R> {
    from: R,
    buffer: Vec<u8>,
    at: usize,
}

impl<R: Read> ChunkReader<R> {
    /// Whether there are no more bytes.
    fn ends(&mut self) -> io::Result<bool> {
        Ok(self.from.read(&mut [0])? == 0)
    }
}

impl<R: Read> Read for ChunkReader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.at == self.buffer.len() {
            let mut head = [0; 8];
            self.from.read_exact(&mut head)?;
            let [a, b, c, d, sum @ ..] = head;
            let len = u32::from_le_bytes([a, b, c, d]) as usize;
            if !(1..=CHUNK).contains(&len) {
                return Err(damaged("a chunk's length"));
            }
            self.buffer.resize(len, 0);
            // Not usable before its checksum is checked.
            self.at = len;
            self.from.read_exact(&mut self.buffer)?;
            if checksum(&self.buffer) != u32::from_le_bytes(sum) {
                return Err(damaged("a checksum differs"));
            }
            self.at = 0;
        }
        let count = to.len().min(self.buffer.len() - self.at);
        to[..count].copy_from_slice(&self.buffer[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}
