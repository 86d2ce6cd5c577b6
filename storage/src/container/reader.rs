//! Reading a container: everything is checked before anything is used.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::{Error, Part, Result};
use super::format::{
    BANK_RECORD, BankEntry, CHECKSUM_RECORD, Section, Superblock, TENSOR_RECORD, TensorEntry, xxh3,
};
use super::geometry::BundleGeometry;
use super::layout::{BankSpec, Extent, Layout, Spec, TensorSpec};
use super::outside_tensors::{OutsideFile, OutsideFiles};
use super::prove::{prove_layout, read_banks, read_section, read_superblock, read_tensors};
use super::source::Source;
use super::stripes::{StripeChecksums, Stripes};
use crate::io::FileSource;

/// An open container: directories, metadata and checksums in RAM, data on flash.
///
/// Opening checks that every section, tensor and bank is where the counts put it, inside the file
/// and without overlap. Data are checked when read: dense tensors and scales by their hash, bundles
/// by [`Container::check_gate`] and [`Container::check_rest`] after the caller's own I/O.
///
/// Offsets count from the container's first byte, at [`Container::base`] in [`Container::file`].
#[derive(Debug)]
pub struct Container {
    file: Arc<File>,
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
    /// crc32 of each stripe of all tensors in order.
    stripes: StripeChecksums,
    /// The files of the tensors, if they lie in others.
    outside: Option<OutsideFiles>,
}

/// Use of a section's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SectionSize {
    /// The section.
    pub section: Section,
    /// First byte in the container.
    pub offset: u64,
    /// Bytes, without the alignment gap after the section.
    pub len: u64,
    /// Bytes of data; the rest pads bundles or entries.
    pub payload: u64,
}

impl Container {
    /// Opens the container file `path`.
    ///
    /// # Errors
    /// If the file cannot be read or is not a valid container; the message says where and why.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |what, source| Error::File {
            path: path.to_path_buf(),
            what,
            source,
        };
        // opening a pipe would wait for its writer
        let facts = std::fs::metadata(path).map_err(|e| failed("open it", e))?;
        if !facts.is_file() {
            let reason = "it is not a regular file (a folder, pipe or device)";
            return Err(failed("open it", std::io::Error::other(reason)));
        }
        let file = File::open(path).map_err(|e| failed("open it", e))?;
        let facts = file.metadata().map_err(|e| failed("inspect it", e))?;
        Self::open_at(file, path, 0, facts.len())
    }

    /// Opens a container in the `len` bytes from `base` of a file, for instance of a program that
    /// embeds its model. `label` names the file in messages.
    ///
    /// # Errors
    /// As [`Container::open`], or if `base` is not a multiple of the container's sector.
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
        let checksums = read_section(source, &superblock, Section::Checksums)?;
        let neurons: u64 = banks.iter().map(|bank| u64::from(bank.neurons)).sum();
        // The layout has checked that the section has the checksums of all neurons.
        let (neurons, stripes) = checksums.split_at(neurons as usize * CHECKSUM_RECORD);
        let sums = |bytes: &[u8]| -> Vec<u32> {
            let (sums, _) = bytes.as_chunks();
            sums.iter().map(|sum| u32::from_le_bytes(*sum)).collect()
        };
        let stripes = StripeChecksums::new(sums(stripes));
        let checksums = sums(neurons).as_chunks().0.to_vec();
        let path = path();
        Ok(Self {
            file: Arc::new(file),
            path,
            base,
            superblock,
            layout,
            meta,
            by_name: numbers(&tensors),
            tensors,
            banks,
            checksums,
            stripes,
            outside: None,
        })
    }

    /// A container without banks whose tensors are in the files `outside`.
    pub(super) fn of_parts(
        file: Arc<File>,
        path: PathBuf,
        superblock: Superblock,
        layout: Layout,
        meta: Vec<u8>,
        tensors: Vec<TensorEntry>,
        outside: OutsideFiles,
    ) -> Self {
        Self {
            file,
            path,
            base: 0,
            superblock,
            layout,
            meta,
            by_name: numbers(&tensors),
            tensors,
            banks: Vec::new(),
            checksums: Vec::new(),
            stripes: StripeChecksums::new(Vec::new()),
            outside: Some(outside),
        }
    }

    /// Whether the rows of a tensor can be read one by one: [`Container::rows`].
    #[must_use]
    pub fn has_rows(&self, entry: &TensorEntry) -> bool {
        let number = self.by_name.get(&entry.name);
        let place = |files: &OutsideFiles| files.places.get(*number?).copied().flatten();
        (self.outside.as_ref()).is_none_or(|files| place(files).is_some())
    }

    /// Fails if `offset` is in a file of another format that has been written or cut since it was opened.
    ///
    /// # Errors
    /// [`Error::File`], which names it.
    pub fn check_unchanged(&self, offset: u64) -> Result<()> {
        let files = self.outside.as_ref();
        files.map_or(Ok(()), |files| files.check_unchanged(offset))
    }

    /// The files of the tensors, for reading, if they are of another format. Offsets are those of the directory.
    #[must_use]
    pub fn outside_source(&self) -> Option<FileSource> {
        let files = self.outside.as_ref();
        files.map(|files| files.source(&self.path))
    }

    /// End of the file in which `offset` is, if it is of another format. A container's reads end within it.
    #[must_use]
    pub fn end_of_file(&self, offset: u64) -> u64 {
        let files = self.outside.as_ref();
        files.map_or(u64::MAX, |files| files.end_of(offset))
    }

    /// Whether the tensors lie in files of another format, without checksums.
    #[must_use]
    pub fn is_outside(&self) -> bool {
        self.outside.is_some()
    }

    /// Moves the metadata out, to free their memory once they are parsed.
    pub fn take_meta(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.meta)
    }

    /// JSON metadata as written.
    #[must_use]
    pub fn meta(&self) -> &[u8] {
        &self.meta
    }

    /// Bundle geometry.
    #[must_use]
    pub fn geometry(&self) -> &BundleGeometry {
        &self.superblock.geometry
    }

    /// A hash that identifies the content: of the superblock, which holds the length of the file, the geometry and
    /// the hashes of all directories, metadata and checksum tables.
    #[must_use]
    pub fn identity(&self) -> u128 {
        xxhash_rust::xxh3::xxh3_128(&self.superblock.encode())
    }

    /// When the files of a model whose tensors lie in others were last changed; none otherwise.
    pub fn changed(&self) -> Vec<Option<std::time::SystemTime>> {
        let files = self.outside.iter().flat_map(|outside| &outside.files);
        files.map(OutsideFile::changed).collect()
    }

    /// Block format of the bundles, as given to the writer.
    #[must_use]
    pub fn bundle_dtype(&self) -> u32 {
        self.superblock.bundle_dtype
    }

    /// The specification of a container with the same metadata, tensors and banks, without
    /// statistics and predictors; `source` as in [`Spec::source`].
    #[must_use]
    pub fn spec(&self, source: String) -> Spec {
        let tensor = |t: &TensorEntry| TensorSpec {
            name: t.name.clone(),
            dtype: t.dtype,
            dims: t.dims.clone(),
            len: t.len,
        };
        let bank = |b: &BankEntry| BankSpec {
            layer: b.layer,
            expert: b.expert,
            neurons: b.neurons,
            flags: b.flags,
        };
        Spec {
            geometry: *self.geometry(),
            bundle_dtype: self.bundle_dtype(),
            meta: self.meta.clone(),
            stats: Vec::new(),
            predictor_len: 0,
            tensors: self.tensors.iter().map(tensor).collect(),
            banks: self.banks.iter().map(bank).collect(),
            source,
        }
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

    /// First byte of a neuron's bundle, from the container's first byte. `u64::MAX` for a neuron
    /// that does not exist, where every read fails.
    #[must_use]
    pub fn neuron_offset(&self, bank: usize, neuron: u32) -> u64 {
        match self.banks.get(bank) {
            Some(b) if neuron < b.neurons => {
                b.offset + u64::from(neuron) * u64::from(self.geometry().stride)
            }
            _ => u64::MAX,
        }
    }

    /// The stripes of tensor `entry`, to check some of its rows; none if it lies in a file of another format.
    #[must_use]
    pub fn stripes(&self, entry: &TensorEntry) -> Option<Stripes> {
        let number = *self.by_name.get(&entry.name)?;
        self.layout.stripes.get(number).copied()
    }

    /// The checksum of stripe `index` of all tensors.
    pub(super) fn stripe_checksum(&self, index: u64) -> Option<u32> {
        self.stripes.get(index)
    }

    /// Checks `bytes`, which are whole stripes of a tensor, the first of which is number `first`.
    ///
    /// # Errors
    /// The first one that is damaged.
    pub fn check_stripes(&self, stripes: Stripes, first: u64, bytes: &[u8]) -> Result<()> {
        let checked = self.stripes.check(stripes, first, bytes);
        checked.map_err(|damaged| {
            let before = |of: &Stripes| of.first <= stripes.first;
            let number = self.layout.stripes.partition_point(before);
            let entry = number.checked_sub(1).and_then(|n| self.tensors.get(n));
            let (name, begin) = entry.map_or(("", 0), |of| (of.name(), of.offset));
            damaged.of(&self.path, name, begin)
        })
    }

    /// The checksums of stripes, to be used without the container.
    #[must_use]
    pub fn stripe_checksums(&self) -> StripeChecksums {
        self.stripes.clone()
    }

    /// Reads a dense tensor and checks it.
    ///
    /// # Errors
    /// If `dst` does not have the tensor's length, reading fails, or the data are damaged.
    pub fn read_tensor(&self, entry: &TensorEntry, dst: &mut [u8]) -> Result<()> {
        let what = || format!("tensor {}", entry.name);
        if let Some(outside) = &self.outside {
            return match dst.len() as u64 == entry.len {
                true => self.read_outside(outside, entry, 0, dst),
                false => Err(self.tensor_length(entry, dst)),
            };
        }
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

    /// Reads rows of a tensor that lies in a file of another format, from row `first` on.
    ///
    /// # Errors
    /// If it does not have these rows, reading fails, or the file has changed.
    pub fn read_tensor_rows(
        &self,
        entry: &TensorEntry,
        first: usize,
        dst: &mut [u8],
    ) -> Result<()> {
        match &self.outside {
            Some(outside) => self.read_outside(outside, entry, first, dst),
            None => Err(self.tensor_length(entry, dst)),
        }
    }

    fn read_outside(
        &self,
        outside: &OutsideFiles,
        entry: &TensorEntry,
        first: usize,
        dst: &mut [u8],
    ) -> Result<()> {
        let Some(&number) = self.by_name.get(&entry.name) else {
            return Err(self.tensor_length(entry, dst));
        };
        let read = outside.reader.read(number, first, dst);
        read.map_err(|source| Error::File {
            path: self.path.clone(),
            what: "read it",
            source,
        })
    }

    fn tensor_length(&self, entry: &TensorEntry, dst: &[u8]) -> Error {
        Error::Length {
            path: self.path.clone(),
            what: format!("tensor {}", entry.name),
            expected: entry.len,
            found: dst.len() as u64,
        }
    }

    /// Reads the resident scales of a bank, `neurons × scales_per_neuron` bytes, and checks them.
    ///
    /// # Errors
    /// If `dst` does not have that length, reading fails, or the data are damaged.
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
    /// If reading fails or the data are damaged.
    pub fn read_stats(&self) -> Result<Vec<u8>> {
        read_section(self.source(), &self.superblock, Section::Stats)
    }

    /// Reads the predictor section; empty when there is none.
    ///
    /// # Errors
    /// If reading fails or the data are damaged.
    pub fn read_predictor(&self) -> Result<Vec<u8>> {
        read_section(self.source(), &self.superblock, Section::Predictor)
    }

    /// Length of the predictor section; 0 when there is none.
    pub fn predictor_len(&self) -> u64 {
        self.superblock.sections[Section::Predictor as usize]
            .extent
            .len
    }

    /// Reads the first bytes of the predictor section without checking them, to get sizes before
    /// allocating memory for all of it. Read them again before use.
    ///
    /// # Errors
    /// If `dst` is longer than the section, or reading fails.
    pub fn peek_predictor(&self, dst: &mut [u8]) -> Result<()> {
        let place = self.superblock.sections[Section::Predictor as usize].extent;
        let len = place.len.min(dst.len() as u64);
        self.read_exact_len(|| "predictors".into(), Extent { len, ..place }, dst)
    }

    /// [`read_predictor`](Self::read_predictor) into the caller's memory.
    ///
    /// # Errors
    /// If `dst` does not have [`predictor_len`](Self::predictor_len) bytes, reading fails, or the
    /// data are damaged.
    pub fn read_predictor_into(&self, dst: &mut [u8]) -> Result<()> {
        let entry = self.superblock.sections[Section::Predictor as usize];
        self.read_exact_len(|| "predictors".into(), entry.extent, dst)?;
        let found = xxh3(dst);
        if found == entry.xxh3 {
            return Ok(());
        }
        Err(Error::SectionChecksum {
            path: self.path.clone(),
            section: Section::Predictor,
            offset: entry.extent.offset,
            expected: entry.xxh3,
            found,
        })
    }

    /// Checks bytes `[0, gate_span)` of a bundle.
    ///
    /// # Errors
    /// If the length is wrong, the neuron does not exist, or the bytes are damaged.
    #[inline]
    pub fn check_gate(&self, bank: usize, neuron: u32, bytes: &[u8]) -> Result<()> {
        self.check(bank, neuron, Part::Gate, bytes)
    }

    /// Checks bytes `[gate_span, stride)` of a bundle, padding included.
    ///
    /// # Errors
    /// If the length is wrong, the neuron does not exist, or the bytes are damaged.
    #[inline]
    pub fn check_rest(&self, bank: usize, neuron: u32, bytes: &[u8]) -> Result<()> {
        self.check(bank, neuron, Part::Rest, bytes)
    }

    /// Checks a whole bundle of `stride` bytes.
    ///
    /// # Errors
    /// If the length is wrong, the neuron does not exist, or the bytes are damaged.
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
        let row = self.checksum_row(bank, neuron);
        let stored = match row.and_then(|row| self.checksums.get(row)) {
            Some(sums) => sums[part as usize],
            None => return Err(self.index("neuron", neuron.into(), entry.neurons.into())),
        };
        let found = super::checksum(bytes);
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

    /// Rows of the checksum table: one per neuron of every bank.
    pub(super) fn checksum_rows(&self) -> usize {
        self.checksums.len()
    }

    /// Row of a neuron in the checksum table.
    #[inline]
    pub(super) fn checksum_row(&self, bank: usize, neuron: u32) -> Option<usize> {
        let entry = self.banks.get(bank).filter(|b| neuron < b.neurons)?;
        Some(entry.first_checksum as usize + neuron as usize)
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

    /// The open file. It may contain more than the container.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Name of the file in error messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the container starts in [`Container::file`], a multiple of the sector.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes of the container, or of all files if the tensors lie in others.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        let outside = self.outside.as_ref();
        outside.map_or(self.layout.file_len, |_| self.superblock.file_len)
    }

    /// Bytes of RAM for directories, metadata and checksums.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        let records = self.tensors.len() * 2 * TENSOR_RECORD + self.banks.len() * 2 * BANK_RECORD;
        let checksums = self.checksums.len() * CHECKSUM_RECORD + self.stripes.bytes();
        let places = size_of_val(&*self.layout.tensors) + size_of_val(&*self.layout.stripes);
        (self.meta.capacity() + records + checksums + places) as u64
    }

    /// The layout.
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
            // In files of another format: there is no such section, and what lies between tensors is unknown.
            let len = if self.is_outside() { payload } else { len };
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

/// Indices of the tensors by name.
fn numbers(tensors: &[TensorEntry]) -> HashMap<String, usize> {
    let named = tensors.iter().enumerate();
    named.map(|(i, t)| (t.name.clone(), i)).collect()
}
