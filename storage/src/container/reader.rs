//! Reading a container: everything is proven before anything is used.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::format::{
    BANK_RECORD, BankEntry, CHECKSUM_RECORD, SUPERBLOCK_LEN, Section, Superblock, SuperblockFault,
    TENSOR_RECORD, TensorEntry, xxh3,
};
use super::geometry::BundleGeometry;
use super::layout::{BankSpec, Counts, Extent, Layout, LayoutError, TensorSpec};
use super::limits::{MAX_BANKS, MAX_TENSORS};
use super::source::Source;
use crate::error::{Error, Part, Result};

/// An open container: directories, metadata and checksums in RAM, data on flash.
///
/// Opening proves that every section, tensor and bank lies where the counts put it, without
/// overlap, inside the file. Data are checked when they are read: dense tensors and scales by
/// their hash, bundles by [`Container::check_gate`] and [`Container::check_rest`] after the
/// caller's own I/O delivered them.
///
/// Offsets count from the container's first byte; [`Container::base`] says where that is in
/// [`Container::file`].
#[derive(Debug)]
pub struct Container {
    file: File,
    path: PathBuf,
    base: u64,
    superblock: Superblock,
    layout: Layout,
    meta: Vec<u8>,
    tensors: Vec<TensorEntry>,
    by_name: HashMap<String, usize>,
    banks: Vec<BankEntry>,
    /// crc32 of Gate part and Up/Down part, all neurons of all banks in order.
    checksums: Vec<[u32; 2]>,
}

/// How the bytes of a section are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SectionSize {
    /// The section.
    pub section: Section,
    /// First byte in the container.
    pub offset: u64,
    /// Bytes, alignment behind the section left out.
    pub len: u64,
    /// Bytes inside that carry data; the rest is padding of bundles or between entries.
    pub payload: u64,
}

impl Container {
    /// Opens the container file `path`.
    ///
    /// # Errors
    /// When the file cannot be read or is not a valid container; the message says where and why.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |what, source| Error::File {
            path: path.to_path_buf(),
            what,
            source,
        };
        let file = File::open(path).map_err(|e| failed("open it", e))?;
        let facts = file.metadata().map_err(|e| failed("inspect it", e))?;
        Self::open_at(file, path, 0, facts.len())
    }

    /// Opens a container that takes the `len` bytes from `base` on of a file, for instance of a
    /// program that carries its model. `label` names the file in messages.
    ///
    /// # Errors
    /// As [`Container::open`]; also when `base` is not a multiple of the container's sector.
    pub fn open_at(file: File, label: &Path, base: u64, len: u64) -> Result<Self> {
        let source = Source {
            file: &file,
            path: label,
            base,
        };
        let path = || label.to_path_buf();
        let superblock = read_superblock(source, len)?;
        let sector = superblock.geometry.sector;
        superblock
            .geometry
            .check()
            .map_err(|source| Error::Layout {
                path: path(),
                source,
            })?;
        if !base.is_multiple_of(sector.into()) || base.checked_add(len).is_none() {
            return Err(Error::Base {
                path: path(),
                base,
                sector,
            });
        }

        // Directories first: with their counts the whole layout is known.
        let tensors = read_tensors(source, &superblock)?;
        let banks = read_banks(source, &superblock)?;
        let layout = prove_layout(label, &superblock, &tensors, &banks)?;

        let meta = read_section(source, &superblock, Section::Meta)?;
        let checksums = read_section(source, &superblock, Section::Checksums)?
            .chunks_exact(CHECKSUM_RECORD)
            .map(|r| {
                [
                    u32::from_le_bytes([r[0], r[1], r[2], r[3]]),
                    u32::from_le_bytes([r[4], r[5], r[6], r[7]]),
                ]
            })
            .collect();
        let by_name = tensors
            .iter()
            .enumerate()
            .map(|(i, t)| (t.name.clone(), i))
            .collect();
        let path = path();
        Ok(Self {
            file,
            path,
            base,
            superblock,
            layout,
            meta,
            tensors,
            by_name,
            banks,
            checksums,
        })
    }

    /// JSON metadata as written.
    #[must_use]
    pub fn meta(&self) -> &[u8] {
        &self.meta
    }

    /// How bundles are cut.
    #[must_use]
    pub fn geometry(&self) -> &BundleGeometry {
        &self.superblock.geometry
    }

    /// Block format of the bundles, as the writer gave it.
    #[must_use]
    pub fn bundle_dtype(&self) -> u32 {
        self.superblock.bundle_dtype
    }

    /// Dense tensors in file order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// Dense tensor by name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.by_name.get(name).and_then(|&i| self.tensors.get(i))
    }

    /// Banks, ascending by (layer, expert).
    #[must_use]
    pub fn banks(&self) -> &[BankEntry] {
        &self.banks
    }

    /// Index of a bank in [`Container::banks`].
    #[must_use]
    pub fn bank(&self, layer: u32, expert: u32) -> Option<usize> {
        self.banks
            .binary_search_by_key(&(layer, expert), |b| (b.layer, b.expert))
            .ok()
    }

    /// First byte of a neuron's bundle, from the container's first byte. A neuron that does not
    /// exist is placed at `u64::MAX`, where no read succeeds.
    #[must_use]
    pub fn neuron_offset(&self, bank: usize, neuron: u32) -> u64 {
        match self.banks.get(bank) {
            Some(b) if neuron < b.neurons => {
                b.offset + u64::from(neuron) * u64::from(self.geometry().stride)
            }
            _ => u64::MAX,
        }
    }

    /// Reads a dense tensor and checks it.
    ///
    /// # Errors
    /// When `dst` does not have the tensor's length, reading fails, or the data are damaged.
    pub fn read_tensor(&self, entry: &TensorEntry, dst: &mut [u8]) -> Result<()> {
        let what = || format!("tensor {}", entry.name);
        self.read_exact_len(
            what,
            Extent {
                offset: entry.offset,
                len: entry.len,
            },
            dst,
        )?;
        let found = xxh3(dst);
        if found != entry.xxh3 {
            return Err(Error::TensorChecksum {
                path: self.path.clone(),
                name: entry.name.clone(),
                offset: entry.offset,
                expected: entry.xxh3,
                found,
            });
        }
        Ok(())
    }

    /// Reads the resident scales of a bank, `neurons × scales_per_neuron` bytes, and checks them.
    ///
    /// # Errors
    /// When `dst` does not have that length, reading fails, or the data are damaged.
    pub fn read_scales(&self, bank: usize, dst: &mut [u8]) -> Result<()> {
        let entry = self.entry(bank)?;
        let place = self
            .layout
            .banks
            .get(bank)
            .map_or(Extent::default(), |b| b.scales);
        let what = || format!("scales of layer {} expert {}", entry.layer, entry.expert);
        self.read_exact_len(what, place, dst)?;
        if place.len == 0 {
            return Ok(());
        }
        self.compare_scales(entry, xxh3(dst))
    }

    pub(super) fn compare_scales(&self, entry: &BankEntry, found: u64) -> Result<()> {
        if found == entry.scales_xxh3 {
            return Ok(());
        }
        Err(Error::ScalesChecksum {
            path: self.path.clone(),
            layer: entry.layer,
            expert: entry.expert,
            offset: entry.scales_offset,
            expected: entry.scales_xxh3,
            found,
        })
    }

    fn read_exact_len(
        &self,
        what: impl Fn() -> String,
        place: Extent,
        dst: &mut [u8],
    ) -> Result<()> {
        if dst.len() as u64 != place.len {
            return Err(Error::Length {
                path: self.path.clone(),
                what: what(),
                expected: place.len,
                found: dst.len() as u64,
            });
        }
        self.source().read(place.offset, dst)
    }

    /// Reads the activation statistics; empty when there are none.
    ///
    /// # Errors
    /// When reading fails or the data are damaged.
    pub fn read_stats(&self) -> Result<Vec<u8>> {
        read_section(self.source(), &self.superblock, Section::Stats)
    }

    /// Reads the predictor section; empty when there is none.
    ///
    /// # Errors
    /// When reading fails or the data are damaged.
    pub fn read_predictor(&self) -> Result<Vec<u8>> {
        read_section(self.source(), &self.superblock, Section::Predictor)
    }

    /// Checks bytes `[0, gate_span)` of a bundle.
    ///
    /// # Errors
    /// When the length is wrong, the neuron does not exist, or the bytes are damaged.
    #[inline]
    pub fn check_gate(&self, bank: usize, neuron: u32, bytes: &[u8]) -> Result<()> {
        self.check(bank, neuron, Part::Gate, bytes)
    }

    /// Checks bytes `[gate_span, stride)` of a bundle, padding included.
    ///
    /// # Errors
    /// When the length is wrong, the neuron does not exist, or the bytes are damaged.
    #[inline]
    pub fn check_rest(&self, bank: usize, neuron: u32, bytes: &[u8]) -> Result<()> {
        self.check(bank, neuron, Part::Rest, bytes)
    }

    /// Checks a whole bundle of `stride` bytes.
    ///
    /// # Errors
    /// When the length is wrong, the neuron does not exist, or the bytes are damaged.
    pub fn check_bundle(&self, bank: usize, neuron: u32, bytes: &[u8]) -> Result<()> {
        let g = self.geometry();
        if bytes.len() != g.stride as usize {
            return Err(self.bundle_length("bundle", g.stride, bytes));
        }
        let (gate, rest) = bytes.split_at(g.gate_span as usize);
        self.check_gate(bank, neuron, gate)?;
        self.check_rest(bank, neuron, rest)
    }

    fn check(&self, bank: usize, neuron: u32, part: Part, bytes: &[u8]) -> Result<()> {
        let entry = self.entry(bank)?;
        let g = self.geometry();
        let (start, len) = match part {
            Part::Gate => (0, g.gate_span),
            Part::Rest => (g.gate_span, g.stride - g.gate_span),
        };
        if bytes.len() != len as usize {
            return Err(self.bundle_length(&part.to_string(), len, bytes));
        }
        let row = entry.first_checksum as usize + neuron as usize;
        let stored = match self.checksums.get(row) {
            Some(sums) if neuron < entry.neurons => sums[part as usize],
            _ => return Err(self.index("neuron", neuron.into(), entry.neurons.into())),
        };
        let found = crc32fast::hash(bytes);
        if found == stored {
            return Ok(());
        }
        Err(Error::BundleChecksum {
            path: self.path.clone(),
            part,
            layer: entry.layer,
            expert: entry.expert,
            neuron,
            offset: self
                .neuron_offset(bank, neuron)
                .saturating_add(start.into()),
            expected: stored,
            found,
        })
    }

    fn entry(&self, bank: usize) -> Result<&BankEntry> {
        let count = self.banks.len() as u64;
        self.banks
            .get(bank)
            .ok_or_else(|| self.index("bank", bank as u64, count))
    }

    fn index(&self, what: &'static str, index: u64, count: u64) -> Error {
        Error::Index {
            path: self.path.clone(),
            what,
            index,
            count,
        }
    }

    fn bundle_length(&self, what: &str, expected: u32, bytes: &[u8]) -> Error {
        Error::Length {
            path: self.path.clone(),
            what: what.to_owned(),
            expected: expected.into(),
            found: bytes.len() as u64,
        }
    }

    /// The open file; may hold more than the container.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Name of the file in messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the container starts in [`Container::file`], a multiple of the sector.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes of the container.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.layout.file_len
    }

    /// Bytes of RAM that directories, metadata and checksums take.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        let records = self.tensors.len() * 2 * TENSOR_RECORD + self.banks.len() * 2 * BANK_RECORD;
        (self.meta.capacity() + records + self.checksums.len() * CHECKSUM_RECORD) as u64
    }

    /// Places of everything.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Sizes of all sections in file order.
    #[must_use]
    pub fn section_sizes(&self) -> [SectionSize; Section::COUNT] {
        let bundles = self.checksums.len() as u64 * u64::from(self.geometry().payload());
        Section::ALL.map(|section| {
            let Extent { offset, len } = self.layout.section(section);
            let payload = match section {
                Section::Dense => self.tensors.iter().map(|t| t.len).sum(),
                Section::Bundles => bundles,
                _ => len,
            };
            SectionSize {
                section,
                offset,
                len,
                payload,
            }
        })
    }

    pub(super) fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    pub(super) fn source(&self) -> Source<'_> {
        Source {
            file: &self.file,
            path: &self.path,
            base: self.base,
        }
    }
}

/// Reads the superblock of a container of `len` bytes.
fn read_superblock(source: Source<'_>, len: u64) -> Result<Superblock> {
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

/// Reads a checksummed section whole. It lies inside the file, so a lying length cannot make us
/// allocate more than the file has.
fn read_section(source: Source<'_>, superblock: &Superblock, section: Section) -> Result<Vec<u8>> {
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

fn read_tensors(source: Source<'_>, superblock: &Superblock) -> Result<Vec<TensorEntry>> {
    let decode = TensorEntry::decode;
    read_records::<TENSOR_RECORD, _>(source, superblock, Section::Tensors, MAX_TENSORS, decode)
}

fn read_banks(source: Source<'_>, superblock: &Superblock) -> Result<Vec<BankEntry>> {
    let decode = BankEntry::decode;
    read_records::<BANK_RECORD, _>(source, superblock, Section::Banks, MAX_BANKS, decode)
}

/// Computes the layout from the counts and proves that all stored offsets equal it.
fn prove_layout(
    path: &Path,
    superblock: &Superblock,
    tensors: &[TensorEntry],
    banks: &[BankEntry],
) -> Result<Layout> {
    let path = || path.to_path_buf();
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
        path: path(),
        source,
    })?;

    for (section, entry) in Section::ALL.into_iter().zip(&superblock.sections) {
        let (e, f) = (layout.section(section), entry.extent);
        if e != f {
            let (expected, found) = ((e.offset, e.len), (f.offset, f.len));
            return Err(Error::SectionPlace {
                path: path(),
                section,
                expected,
                found,
            });
        }
    }
    let (expected, found) = (layout.file_len, superblock.file_len);
    if expected != found {
        return Err(Error::FileLength {
            path: path(),
            expected,
            found,
        });
    }
    for (tensor, place) in tensors.iter().zip(&layout.tensors) {
        let (expected, found) = (place.offset, tensor.offset);
        if expected != found {
            let name = tensor.name.clone();
            return Err(Error::TensorPlace {
                path: path(),
                name,
                expected,
                found,
            });
        }
    }
    for (bank, place) in banks.iter().zip(&layout.banks) {
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
                let (layer, expert) = (bank.layer, bank.expert);
                return Err(Error::BankPlace {
                    path: path(),
                    layer,
                    expert,
                    field,
                    expected,
                    found,
                });
            }
        }
    }
    Ok(layout)
}
