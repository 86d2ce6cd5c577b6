//! Checks, before anything is used, that a file's layout matches its counts.

use std::path::Path;

use super::error::{Error, Result};
use super::format::{
    BANK_RECORD, BankEntry, SUPERBLOCK_LEN, Section, Superblock, SuperblockFault, TENSOR_RECORD,
    TensorEntry, xxh3,
};
use super::layout::{BankPlace, BankSpec, Counts, Extent, Layout, LayoutError, TensorSpec};
use super::limits::{MAX_BANKS, MAX_TENSORS};
use super::source::Source;

/// Reads the superblock of a container of `len` bytes.
pub(super) fn read_superblock(source: Source<'_>, len: u64) -> Result<Superblock> {
    let path = source.path.to_path_buf();
    if len < SUPERBLOCK_LEN as u64 {
        return Err(Error::TooShort { path, len });
    }
    let mut bytes = [0; SUPERBLOCK_LEN];
    source.read(0, &mut bytes)?;
    let superblock = Superblock::decode(&bytes).map_err(|fault| superblock_error(&path, fault))?;
    let expected = superblock.file_len;
    if len < expected {
        return Err(Error::Truncated {
            path,
            expected,
            found: len,
        });
    }
    if len > expected {
        return Err(Error::Trailing {
            path,
            expected,
            found: len,
        });
    }
    Ok(superblock)
}

pub(super) fn superblock_error(path: &Path, fault: SuperblockFault) -> Error {
    let path = path.to_path_buf();
    match fault {
        SuperblockFault::Magic(found) => Error::Magic { path, found },
        SuperblockFault::Version(found) => Error::Version { path, found },
        SuperblockFault::Checksum { expected, found } => Error::SuperblockChecksum {
            path,
            expected,
            found,
        },
        SuperblockFault::Length(found) => Error::SuperblockLength { path, found },
        SuperblockFault::Placement(found) => Error::ScalePlacement { path, found },
        SuperblockFault::Reserved(offset) => Error::Reserved {
            path,
            offset: offset as u64,
        },
    }
}

/// Reads a whole checksummed section. It must be inside the file, so a forged length cannot cause
/// an allocation larger than the file size.
pub(super) fn read_section(
    source: Source<'_>,
    superblock: &Superblock,
    section: Section,
) -> Result<Vec<u8>> {
    let path = || source.path.to_path_buf();
    let entry = superblock.sections[section as usize];
    let Extent { offset, len } = entry.extent;
    let file_len = superblock.file_len;
    if offset.checked_add(len).is_none_or(|end| end > file_len) {
        return Err(Error::SectionBounds {
            path: path(),
            section,
            offset,
            len,
            file_len,
        });
    }
    let size = usize::try_from(len).map_err(|_| Error::Layout {
        path: path(),
        source: LayoutError::Overflow {
            what: section.name(),
        },
    })?;
    let mut bytes = vec![0; size];
    source.read(offset, &mut bytes)?;
    let (expected, found) = (entry.xxh3, xxh3(&bytes));
    if expected != found {
        return Err(Error::SectionChecksum {
            path: path(),
            section,
            offset,
            expected,
            found,
        });
    }
    Ok(bytes)
}

/// Reads a directory of fixed-size records, at most `most` of them.
fn read_records<const N: usize, T>(
    source: Source<'_>,
    superblock: &Superblock,
    section: Section,
    most: u64,
    decode: impl Fn(&[u8; N]) -> Result<T, usize>,
) -> Result<Vec<T>> {
    let path = || source.path.to_path_buf();
    let Extent { offset, len } = superblock.sections[section as usize].extent;
    if !len.is_multiple_of(N as u64) {
        return Err(Error::SectionRecords {
            path: path(),
            section,
            len,
            record: N,
        });
    }
    if len / N as u64 > most {
        let (what, found) = (section.name(), len / N as u64);
        let source = LayoutError::Limit {
            what,
            found,
            limit: most,
        };
        return Err(Error::Layout {
            path: path(),
            source,
        });
    }
    let bytes = read_section(source, superblock, section)?;
    let (records, _) = bytes.as_chunks::<N>();
    let decode_one = |(index, record)| {
        decode(record).map_err(|at| {
            let offset = offset + (index * N + at) as u64;
            Error::Record {
                path: path(),
                section,
                index,
                offset,
            }
        })
    };
    records.iter().enumerate().map(decode_one).collect()
}

pub(super) fn read_tensors(
    source: Source<'_>,
    superblock: &Superblock,
) -> Result<Vec<TensorEntry>> {
    let decode = TensorEntry::decode;
    read_records::<TENSOR_RECORD, _>(source, superblock, Section::Tensors, MAX_TENSORS, decode)
}

pub(super) fn read_banks(source: Source<'_>, superblock: &Superblock) -> Result<Vec<BankEntry>> {
    let decode = BankEntry::decode;
    read_records::<BANK_RECORD, _>(source, superblock, Section::Banks, MAX_BANKS, decode)
}

/// Recomputes the layout from the counts and checks all stored offsets against it.
pub(super) fn prove_layout(
    path: &Path,
    superblock: &Superblock,
    tensors: &[TensorEntry],
    banks: &[BankEntry],
) -> Result<Layout> {
    let stored = |s: Section| superblock.sections[s as usize].extent;
    let meta_len = stored(Section::Meta).len;
    let counts = Counts {
        geometry: &superblock.geometry,
        meta_len,
        stats_len: stored(Section::Stats).len,
        predictor_len: stored(Section::Predictor).len,
        tensors: &tensors
            .iter()
            .map(TensorEntry::spec)
            .collect::<Vec<TensorSpec>>(),
        banks: &banks.iter().map(BankEntry::spec).collect::<Vec<BankSpec>>(),
    };
    let layout = Layout::compute(counts).map_err(|source| Error::Layout {
        path: path.to_path_buf(),
        source,
    })?;
    prove_sections(path, superblock, &layout)?;
    prove_tensors(path, tensors, &layout)?;
    for (bank, place) in banks.iter().zip(&layout.banks) {
        prove_bank(path, bank, place)?;
    }
    Ok(layout)
}

/// Checks that every section and the end of the file are where the layout puts them.
fn prove_sections(path: &Path, superblock: &Superblock, layout: &Layout) -> Result<()> {
    for (section, entry) in Section::ALL.into_iter().zip(&superblock.sections) {
        let (e, f) = (layout.section(section), entry.extent);
        if e != f {
            let (expected, found) = ((e.offset, e.len), (f.offset, f.len));
            return Err(Error::SectionPlace {
                path: path.to_path_buf(),
                section,
                expected,
                found,
            });
        }
    }
    let (expected, found) = (layout.file_len, superblock.file_len);
    if expected != found {
        return Err(Error::FileLength {
            path: path.to_path_buf(),
            expected,
            found,
        });
    }
    Ok(())
}

/// Checks that every dense tensor is where the layout puts it.
fn prove_tensors(path: &Path, tensors: &[TensorEntry], layout: &Layout) -> Result<()> {
    for (tensor, place) in tensors.iter().zip(&layout.tensors) {
        let (expected, found) = (place.offset, tensor.offset);
        if expected != found {
            return Err(Error::TensorPlace {
                path: path.to_path_buf(),
                name: tensor.name.clone(),
                expected,
                found,
            });
        }
    }
    Ok(())
}

/// Checks that a bank's bundles, checksums and scales are where the layout puts them.
fn prove_bank(path: &Path, bank: &BankEntry, place: &BankPlace) -> Result<()> {
    let unhashed = if place.scales.len == 0 {
        0
    } else {
        bank.scales_xxh3
    };
    for (field, expected, found) in [
        ("offset", place.data.offset, bank.offset),
        ("length", place.data.len, bank.len),
        ("first checksum", place.first_checksum, bank.first_checksum),
        ("scales offset", place.scales.offset, bank.scales_offset),
        ("scales checksum", unhashed, bank.scales_xxh3),
    ] {
        if expected != found {
            return Err(Error::BankPlace {
                path: path.to_path_buf(),
                layer: bank.layer,
                expert: bank.expert,
                field,
                expected,
                found,
            });
        }
    }
    Ok(())
}
