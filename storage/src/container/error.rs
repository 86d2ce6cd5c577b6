//! The error type of the crate: a variant for each kind of invalid container, and for each failure
//! of reading or writing. Offsets count from the first byte of the container.

use std::io;
use std::path::PathBuf;

use super::format::{MAGIC, SUPERBLOCK_LEN, Section, VERSION};
use super::{LayoutError, Unit};
use crate::arena::ArenaError;
use crate::budget::BudgetError;
use crate::io::IoError;

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The two separately checksummed parts of a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Bytes `[0, gate_span)`.
    Gate,
    /// Bytes `[gate_span, stride)`.
    Rest,
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Gate => "gate part",
            Self::Rest => "up/down part",
        })
    }
}

/// Probable type of a file with these first bytes, and a remedy.
fn hint(first: &[u8; 8]) -> &'static str {
    match first {
        b"version " => "; if it is a pointer of git-lfs, run `git lfs pull` in its folder",
        _ => "",
    }
}

/// Errors of the storage layer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // --- an invalid file -----------------------------------------------------------------------
    /// The file is shorter than a superblock.
    #[error("{}: {len} bytes are too few for a container, which has at least {SUPERBLOCK_LEN}", path.display())]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Its length.
        len: u64,
    },
    /// The file does not start with the magic bytes.
    #[error("{}: not an emberflow container: starts with {:?}, expected {:?}{}", path.display(), found.escape_ascii().to_string(), MAGIC.escape_ascii().to_string(), hint(found))]
    Magic {
        /// The file.
        path: PathBuf,
        /// Its first eight bytes.
        found: [u8; 8],
    },
    /// Written by another version of the format.
    #[error("{}: container version {found}, expected {VERSION}; pack the checkpoint again with this program", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Version found.
        found: u32,
    },
    /// The superblock is damaged.
    #[error("{}: the superblock is damaged: its checksum is {found:016x}, stored is {expected:016x}; copy the file again or pack again", path.display())]
    SuperblockChecksum {
        /// The file.
        path: PathBuf,
        /// Checksum stored.
        expected: u64,
        /// Checksum computed.
        found: u64,
    },
    /// The superblock states a length other than the format's.
    #[error("{}: the superblock claims {found} bytes, expected {SUPERBLOCK_LEN}", path.display())]
    SuperblockLength {
        /// The file.
        path: PathBuf,
        /// Length stated.
        found: u32,
    },
    /// A field that must be zero is not.
    #[error("{}: reserved bytes at offset {offset} are not zero; a newer program may have written them", path.display())]
    Reserved {
        /// The file.
        path: PathBuf,
        /// The first such byte.
        offset: u64,
    },
    /// A scale placement that is neither inline nor resident.
    #[error("{}: scale placement is {found}, expected 0 (inline) or 1 (resident)", path.display())]
    ScalePlacement {
        /// The file.
        path: PathBuf,
        /// Value found.
        found: u32,
    },
    /// The file is truncated.
    #[error("{}: truncated: {found} bytes, expected {expected}; copy the file again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Length in the superblock.
        expected: u64,
        /// Length of the file.
        found: u64,
    },
    /// Bytes after the end of the container.
    #[error("{}: {found} bytes, expected {expected}: something was appended", path.display())]
    Trailing {
        /// The file.
        path: PathBuf,
        /// Length in the superblock.
        expected: u64,
        /// Length of the file.
        found: u64,
    },
    /// Sizes or counts that no valid container has.
    #[error("{}: {source}", path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: LayoutError,
    },
    /// The length in the superblock does not follow from the counts.
    #[error("{}: the superblock says {found} bytes, but the sections make {expected}", path.display())]
    FileLength {
        /// The file.
        path: PathBuf,
        /// Length that follows from the counts.
        expected: u64,
        /// Length stored.
        found: u64,
    },
    /// A section that reaches beyond the file.
    #[error("{}: {section} ({len} bytes at offset {offset}) leaves the file of {file_len} bytes", path.display())]
    SectionBounds {
        /// The file.
        path: PathBuf,
        /// The section.
        section: Section,
        /// Stored offset.
        offset: u64,
        /// Stored length.
        len: u64,
        /// Length of the file.
        file_len: u64,
    },
    /// The length of a directory is not a multiple of its record size.
    #[error("{}: {section} has {len} bytes, expected a multiple of {record}", path.display())]
    SectionRecords {
        /// The file.
        path: PathBuf,
        /// The section.
        section: Section,
        /// Stored length.
        len: u64,
        /// Bytes of a record.
        record: usize,
    },
    /// A section is not where the counts put it: a gap, an overlap or a wrong length.
    #[error("{}: {section} is {} bytes at offset {}, expected {} at {}", path.display(), found.1, found.0, expected.1, expected.0)]
    SectionPlace {
        /// The file.
        path: PathBuf,
        /// The section.
        section: Section,
        /// (offset, length) that follow from the counts.
        expected: (u64, u64),
        /// (offset, length) stored.
        found: (u64, u64),
    },
    /// A section is damaged.
    #[error("{}: {section} at offset {offset} is damaged: its checksum is {found:016x}, stored is {expected:016x}; copy the file again or pack again", path.display())]
    SectionChecksum {
        /// The file.
        path: PathBuf,
        /// The section.
        section: Section,
        /// Its first byte.
        offset: u64,
        /// Checksum stored.
        expected: u64,
        /// Checksum computed.
        found: u64,
    },
    /// A malformed directory record.
    #[error("{}: {section}: record {index} is malformed at offset {offset}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The directory.
        section: Section,
        /// Number of the record.
        index: usize,
        /// First bad byte.
        offset: u64,
    },
    /// A tensor's offset does not follow from the sizes.
    #[error("{}: tensor {name} is at offset {found}, expected {expected}", path.display())]
    TensorPlace {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Offset that follows from the sizes.
        expected: u64,
        /// Offset stored.
        found: u64,
    },
    /// A tensor is damaged.
    #[error("{}: tensor {name} at offset {offset} is damaged: its checksum is {found:016x}, stored is {expected:016x}; copy the file again or pack again", path.display())]
    TensorChecksum {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its first byte.
        offset: u64,
        /// Checksum stored.
        expected: u64,
        /// Checksum computed.
        found: u64,
    },
    /// A field of a bank's record does not follow from the counts.
    #[error("{}: layer {layer} expert {expert}: {field} is {found}, expected {expected}", path.display())]
    BankPlace {
        /// The file.
        path: PathBuf,
        /// Layer of the bank.
        layer: u32,
        /// Expert of the bank.
        expert: u32,
        /// Field of the record.
        field: &'static str,
        /// Value that follows from the counts.
        expected: u64,
        /// Value stored.
        found: u64,
    },
    /// A bundle is damaged.
    #[error("{}: {part} of layer {layer} expert {expert} neuron {neuron} at offset {offset} is damaged: its crc32 is {found:08x}, stored is {expected:08x}; copy the file again or pack again", path.display())]
    BundleChecksum {
        /// The file.
        path: PathBuf,
        /// Which part.
        part: Part,
        /// Layer of the bank.
        layer: u32,
        /// Expert of the bank.
        expert: u32,
        /// Neuron in the bank.
        neuron: u32,
        /// First byte of the part.
        offset: u64,
        /// Checksum stored.
        expected: u32,
        /// Checksum computed.
        found: u32,
    },
    /// The resident scales of a bank are damaged.
    #[error("{}: scales of layer {layer} expert {expert} at offset {offset} are damaged: their checksum is {found:016x}, stored is {expected:016x}; copy the file again or pack again", path.display())]
    ScalesChecksum {
        /// The file.
        path: PathBuf,
        /// Layer of the bank.
        layer: u32,
        /// Expert of the bank.
        expert: u32,
        /// First byte of the scales.
        offset: u64,
        /// Checksum stored.
        expected: u64,
        /// Checksum computed.
        found: u64,
    },
    /// Bytes in an alignment gap are not zero.
    #[error("{}: the gap at offset {offset} is not zero", path.display())]
    Gap {
        /// The file.
        path: PathBuf,
        /// First nonzero byte.
        offset: u64,
    },

    // --- an invalid request ---------------------------------------------------------------------
    /// A container inside another file is not aligned to its sector.
    #[error("{}: the container starts at offset {base}, expected a multiple of {sector}", path.display())]
    Base {
        /// The file.
        path: PathBuf,
        /// Start of the container.
        base: u64,
        /// Sector of the container.
        sector: u32,
    },
    /// A buffer or a streamed piece has the wrong length.
    #[error("{}: {what} has {expected} bytes, but {found} were given", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// What to read or write.
        what: String,
        /// Correct length.
        expected: u64,
        /// Length given.
        found: u64,
    },
    /// An index out of range.
    #[error("{}: {what} {index} does not exist, there are {count}", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// What the index refers to.
        what: &'static str,
        /// Index given.
        index: u64,
        /// Number of entries.
        count: u64,
    },
    /// Finished before every unit was written.
    #[error("{}: {unit} was not written", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The first missing unit.
        unit: Unit,
    },

    // --- the operating system ------------------------------------------------------------------
    /// Another process is writing the same container.
    #[error("{}: {} is writing this container; wait for it to end, or stop it", path.display(), pid.map_or("another process".to_owned(), |p| format!("process {p}")))]
    Locked {
        /// The container to be written.
        path: PathBuf,
        /// The process, if known.
        pid: Option<u32>,
    },
    /// The disk is full.
    #[error("{}: no space left on the device: the container takes {needed} bytes; free some space and run the same command again to resume", path.display())]
    NoSpace {
        /// The file being written.
        path: PathBuf,
        /// Bytes of the whole container.
        needed: u64,
    },
    /// A file operation failed.
    #[error("{}: cannot {what}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operation.
        what: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// Reading failed.
    #[error("{}: cannot read {len} bytes at offset {offset}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Error of the system.
        source: io::Error,
    },

    // --- run time -------------------------------------------------------------------------------
    /// A read of the I/O thread failed, or the thread could not start.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The arena could not be created.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The budget is too small.
    #[error(transparent)]
    Budget(#[from] BudgetError),
}
