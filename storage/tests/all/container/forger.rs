//! Edits a container byte by byte, including checksums. Numbers are those of the DATA LAYOUT
//! diagram, written out, so that the code under test does not check itself.

use xxhash_rust::xxh3::xxh3_64;

// Sections, as numbered in the table of the superblock.
pub const META: usize = 0;
pub const TENSORS: usize = 1;
pub const BANKS: usize = 2;
pub const CHECKSUMS: usize = 3;
pub const SCALES: usize = 4;
pub const STATS: usize = 5;
pub const PREDICTOR: usize = 6;
pub const DENSE: usize = 7;
pub const BUNDLES: usize = 8;

/// A container's bytes. Offsets are those of the DATA LAYOUT diagram, in plain numbers.
pub struct Forger {
    pub bytes: Vec<u8>,
}

impl Forger {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes }
    }

    pub fn u64_at(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    pub fn put32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    pub fn put64(&mut self, at: usize, value: u64) {
        self.bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    /// Position of a section's table entry: offset, then length, then hash.
    pub fn entry(section: usize) -> usize {
        56 + 24 * section
    }

    pub fn start(&self, section: usize) -> usize {
        self.u64_at(Self::entry(section)) as usize
    }

    /// Repairs every checksum that the file's own offsets refer to.
    pub fn seal(&mut self) {
        for section in [META, TENSORS, BANKS, CHECKSUMS, STATS, PREDICTOR] {
            let at = Self::entry(section);
            let (offset, len) = (self.u64_at(at), self.u64_at(at + 8));
            let Some(end) = offset.checked_add(len) else {
                continue;
            };
            if let Some(bytes) = self.bytes.get(offset as usize..end as usize) {
                let hash = xxh3_64(bytes);
                self.put64(at + 16, hash);
            }
        }
        let hash = xxh3_64(&self.bytes[..4088]);
        self.put64(4088, hash);
    }
}
