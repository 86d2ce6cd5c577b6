//! The bytes of the superblock and the table records, all little endian.
//!
//! # DATA LAYOUT
//!
//! ```text
//! file                    every section starts at a multiple of 4096, gaps are zero
//!   superblock            4096 bytes, below
//!   META                  JSON
//!   TENSORS               tensor records
//!   BANKS                 bank records
//!   CHECKSUMS             per neuron, banks in order: crc32 of [0, gate_span) u32,
//!                         crc32 of [gate_span, stride) u32, padding included;
//!                         per stripe, tensors in order: crc32 of its bytes u32
//!   SCALES                per bank: neurons × scales_per_neuron bytes; empty when inline
//!   STATS                 opaque, may be empty
//!   PREDICTOR             opaque, may be empty
//!   DENSE                 tensors, each at a multiple of 64: rows; in a table, which is read
//!                         row by row, each row is followed by its crc32 u32
//!   BUNDLES               banks, each at a multiple of 4096: neurons × stride bytes
//!   (zeros up to a multiple of 4096, the end of the file)
//!
//! superblock
//!    0    8  magic                 "EMBRFLOW"
//!    8    4  version               2
//!   12    4  superblock_len        4096
//!   16    8  file_len              bytes of the whole file
//!   24    4  sector                512, 1024, 2048 or 4096
//!   28    4  scale_placement       0 inline, 1 resident
//!   32    4  gate_len              payload of the Gate part
//!   36    4  rest_len              payload of the Up and Down part
//!   40    4  gate_span             bytes reserved for the Gate part
//!   44    4  stride                bytes of a bundle, a multiple of sector
//!   48    4  scales_per_neuron     bytes of a neuron in SCALES, 0 when inline
//!   52    4  bundle_dtype          block format; opaque
//!   56  216  section table         9 × {offset u64, len u64, xxh3 u64}, sections as above;
//!                                  xxh3 is 0 for SCALES, DENSE and BUNDLES, whose entries
//!                                  carry their own checksums
//!  272 3816  reserved              zero
//! 4088    8  xxh3                  of bytes 0 to 4087
//!
//! tensor record, 128 bytes         bank record, 64 bytes
//!    0   64  name, zero padded        0    4  layer
//!   64    4  dtype                    4    4  expert
//!   68    4  ndim                     8    4  neurons
//!   72   32  dims, unused ones 0     12    4  flags
//!  104    8  offset                  16    8  offset of the bundles
//!  112    8  len                     24    8  len of the bundles
//!  120    8  xxh3                    32    8  first_checksum, index in CHECKSUMS
//!                                    40    8  offset of the scales
//!                                    48    8  xxh3 of the scales, 0 when inline
//!                                    56    8  reserved, zero
//! ```
//!
//! Offsets count from the first byte of the container, which may itself lie inside another file.

use super::geometry::{BundleGeometry, Placement};
use super::limits::{MAX_DIMS, MAX_NAME};
use super::parts::{BankPlace, BankSpec, Extent, TensorSpec};

/// First eight bytes of every container.
pub const MAGIC: [u8; 8] = *b"EMBRFLOW";
/// Version of the format that this code writes and reads.
pub const VERSION: u32 = 2;
/// Bytes of the superblock.
pub const SUPERBLOCK_LEN: usize = 4096;
/// Bytes of a tensor record.
pub const TENSOR_RECORD: usize = 128;
/// Bytes of a bank record.
pub const BANK_RECORD: usize = 64;
/// Bytes of the two checksums of a neuron.
pub const CHECKSUM_RECORD: usize = 8;

const SB_MAGIC: usize = 0;
const SB_VERSION: usize = SB_MAGIC + 8;
const SB_SUPERBLOCK_LEN: usize = SB_VERSION + 4;
const SB_FILE_LEN: usize = SB_SUPERBLOCK_LEN + 4;
const SB_SECTOR: usize = SB_FILE_LEN + 8;
const SB_PLACEMENT: usize = SB_SECTOR + 4;
const SB_GATE_LEN: usize = SB_PLACEMENT + 4;
const SB_REST_LEN: usize = SB_GATE_LEN + 4;
const SB_GATE_SPAN: usize = SB_REST_LEN + 4;
const SB_STRIDE: usize = SB_GATE_SPAN + 4;
const SB_SCALES: usize = SB_STRIDE + 4;
const SB_DTYPE: usize = SB_SCALES + 4;
const SB_SECTIONS: usize = SB_DTYPE + 4;
const SECTION_RECORD: usize = 24;
const SB_RESERVED: usize = SB_SECTIONS + Section::COUNT * SECTION_RECORD;
const SB_XXH3: usize = SUPERBLOCK_LEN - 8;

const T_NAME: usize = 0;
const T_DTYPE: usize = T_NAME + MAX_NAME;
const T_NDIM: usize = T_DTYPE + 4;
const T_DIMS: usize = T_NDIM + 4;
const T_OFFSET: usize = T_DIMS + 8 * MAX_DIMS;
const T_LEN: usize = T_OFFSET + 8;
const T_XXH3: usize = T_LEN + 8;

const B_LAYER: usize = 0;
const B_EXPERT: usize = B_LAYER + 4;
const B_NEURONS: usize = B_EXPERT + 4;
const B_FLAGS: usize = B_NEURONS + 4;
const B_OFFSET: usize = B_FLAGS + 4;
const B_LEN: usize = B_OFFSET + 8;
const B_FIRST: usize = B_LEN + 8;
const B_SCALES_OFFSET: usize = B_FIRST + 8;
const B_SCALES_XXH3: usize = B_SCALES_OFFSET + 8;
const B_RESERVED: usize = B_SCALES_XXH3 + 8;

// The offsets of the diagram above.
const _: () = {
    assert!(SB_FILE_LEN == 16 && SB_SECTOR == 24 && SB_STRIDE == 44 && SB_DTYPE == 52);
    assert!(SB_SECTIONS == 56 && SB_RESERVED == 272 && SB_XXH3 == 4088);
    assert!(T_DTYPE == 64 && T_DIMS == 72 && T_OFFSET == 104 && T_XXH3 + 8 == TENSOR_RECORD);
    assert!(B_OFFSET == 16 && B_SCALES_OFFSET == 40 && B_RESERVED + 8 == BANK_RECORD);
    let mut i = 0;
    while i < Section::COUNT {
        assert!(Section::ALL[i] as usize == i);
        i += 1;
    }
};

/// A section of the file, in file order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Section {
    /// JSON metadata.
    Meta,
    /// Directory of dense tensors.
    Tensors,
    /// Directory of banks.
    Banks,
    /// Two crc32 for each neuron.
    Checksums,
    /// Resident scales.
    Scales,
    /// Activation statistics.
    Stats,
    /// Predictor weights.
    Predictor,
    /// Data of the dense tensors.
    Dense,
    /// Data of the banks.
    Bundles,
}

impl Section {
    /// Number of sections.
    pub const COUNT: usize = 9;
    /// All sections in file order.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Meta,
        Self::Tensors,
        Self::Banks,
        Self::Checksums,
        Self::Scales,
        Self::Stats,
        Self::Predictor,
        Self::Dense,
        Self::Bundles,
    ];

    /// Name in error messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Meta => "metadata",
            Self::Tensors => "tensor directory",
            Self::Banks => "bank directory",
            Self::Checksums => "checksum table",
            Self::Scales => "scales",
            Self::Stats => "statistics",
            Self::Predictor => "predictor",
            Self::Dense => "dense tensors",
            Self::Bundles => "bundles",
        }
    }

    /// Whether one checksum in the superblock covers the whole section. Otherwise its entries carry
    /// their own, so they can be checked one by one.
    #[must_use]
    pub fn has_checksum(self) -> bool {
        !matches!(self, Self::Scales | Self::Dense | Self::Bundles)
    }
}

impl std::fmt::Display for Section {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The hash of the format: xxh3, 64 bits.
#[must_use]
pub fn xxh3(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// Extent and hash of a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SectionEntry {
    /// Place in the container.
    pub extent: Extent,
    /// xxh3 of the section, 0 if its entries carry their own checksums.
    pub xxh3: u64,
}

/// The first 4096 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Bytes of the whole container.
    pub file_len: u64,
    /// Bundle geometry.
    pub geometry: BundleGeometry,
    /// Block format of the bundles; opaque.
    pub bundle_dtype: u32,
    /// Sections in file order, indexed by [`Section`].
    pub sections: [SectionEntry; Section::COUNT],
}

/// A fault in a superblock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SuperblockFault {
    Magic([u8; 8]),
    Version(u32),
    Checksum { expected: u64, found: u64 },
    Length(u32),
    Placement(u32),
    Reserved(usize),
}

impl Superblock {
    /// Encodes the superblock, checksum included.
    #[must_use]
    pub fn encode(&self) -> [u8; SUPERBLOCK_LEN] {
        let mut b = [0; SUPERBLOCK_LEN];
        let g = &self.geometry;
        put(&mut b, SB_MAGIC, &MAGIC);
        let placement = match g.placement {
            Placement::Inline => 0,
            Placement::Resident => 1,
        };
        for (at, value) in [
            (SB_VERSION, VERSION),
            (SB_SUPERBLOCK_LEN, SUPERBLOCK_LEN as u32),
            (SB_SECTOR, g.sector),
            (SB_PLACEMENT, placement),
            (SB_GATE_LEN, g.gate_len),
            (SB_REST_LEN, g.rest_len),
            (SB_GATE_SPAN, g.gate_span),
            (SB_STRIDE, g.stride),
            (SB_SCALES, g.scales_per_neuron),
            (SB_DTYPE, self.bundle_dtype),
        ] {
            put(&mut b, at, &value.to_le_bytes());
        }
        put(&mut b, SB_FILE_LEN, &self.file_len.to_le_bytes());
        for (i, entry) in self.sections.iter().enumerate() {
            let at = SB_SECTIONS + i * SECTION_RECORD;
            put(&mut b, at, &entry.extent.offset.to_le_bytes());
            put(&mut b, at + 8, &entry.extent.len.to_le_bytes());
            put(&mut b, at + 16, &entry.xxh3.to_le_bytes());
        }
        let hash = xxh3(&b[..SB_XXH3]);
        put(&mut b, SB_XXH3, &hash.to_le_bytes());
        b
    }

    /// Decodes the superblock and checks what it can without the rest of the file. The layout
    /// checks the geometry.
    pub(crate) fn decode(b: &[u8; SUPERBLOCK_LEN]) -> Result<Self, SuperblockFault> {
        let magic = take(b, SB_MAGIC);
        if magic != MAGIC {
            return Err(SuperblockFault::Magic(magic));
        }
        let version = u32_at(b, SB_VERSION);
        if version != VERSION {
            return Err(SuperblockFault::Version(version));
        }
        let (expected, found) = (u64_at(b, SB_XXH3), xxh3(&b[..SB_XXH3]));
        if expected != found {
            return Err(SuperblockFault::Checksum { expected, found });
        }
        let len = u32_at(b, SB_SUPERBLOCK_LEN);
        if len as usize != SUPERBLOCK_LEN {
            return Err(SuperblockFault::Length(len));
        }
        if let Some(i) = b[SB_RESERVED..SB_XXH3].iter().position(|&x| x != 0) {
            return Err(SuperblockFault::Reserved(SB_RESERVED + i));
        }
        let mut sections = [SectionEntry::default(); Section::COUNT];
        for (i, entry) in sections.iter_mut().enumerate() {
            let at = SB_SECTIONS + i * SECTION_RECORD;
            entry.extent = Extent {
                offset: u64_at(b, at),
                len: u64_at(b, at + 8),
            };
            entry.xxh3 = u64_at(b, at + 16);
            if entry.xxh3 != 0 && !Section::ALL[i].has_checksum() {
                return Err(SuperblockFault::Reserved(at + 16));
            }
        }
        Ok(Self {
            file_len: u64_at(b, SB_FILE_LEN),
            geometry: BundleGeometry {
                sector: u32_at(b, SB_SECTOR),
                placement: match u32_at(b, SB_PLACEMENT) {
                    0 => Placement::Inline,
                    1 => Placement::Resident,
                    other => return Err(SuperblockFault::Placement(other)),
                },
                gate_len: u32_at(b, SB_GATE_LEN),
                rest_len: u32_at(b, SB_REST_LEN),
                gate_span: u32_at(b, SB_GATE_SPAN),
                stride: u32_at(b, SB_STRIDE),
                scales_per_neuron: u32_at(b, SB_SCALES),
            },
            bundle_dtype: u32_at(b, SB_DTYPE),
            sections,
        })
    }
}

/// One dense tensor of the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Unique name.
    pub name: String,
    /// Block format; opaque.
    pub dtype: u32,
    /// Shape, 1 to 4 dimensions.
    pub dims: Vec<u64>,
    /// First byte in the container, a multiple of 64.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// xxh3 of the bytes.
    pub xxh3: u64,
}

impl TensorEntry {
    /// Unique name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shape, 1 to 4 dimensions.
    #[must_use]
    pub fn dims(&self) -> &[u64] {
        &self.dims
    }

    /// Name, format, shape and length without the offset.
    #[must_use]
    pub fn spec(&self) -> TensorSpec {
        let (name, dims) = (self.name.clone(), self.dims.clone());
        TensorSpec {
            name,
            dtype: self.dtype,
            dims,
            len: self.len,
        }
    }

    pub(crate) fn new(spec: &TensorSpec, place: Extent, xxh3: u64) -> Self {
        let TensorSpec {
            name,
            dtype,
            dims,
            len,
        } = spec.clone();
        Self {
            name,
            dtype,
            dims,
            offset: place.offset,
            len,
            xxh3,
        }
    }

    /// Encodes the record. Truncates a name or dimensions beyond the record's size, which the layout
    /// rejects beforehand.
    #[must_use]
    pub fn encode(&self) -> [u8; TENSOR_RECORD] {
        let mut b = [0; TENSOR_RECORD];
        let name = self.name.as_bytes();
        put(&mut b, T_NAME, &name[..name.len().min(MAX_NAME)]);
        put(&mut b, T_DTYPE, &self.dtype.to_le_bytes());
        put(&mut b, T_NDIM, &(self.dims.len() as u32).to_le_bytes());
        for (i, dim) in self.dims.iter().take(MAX_DIMS).enumerate() {
            put(&mut b, T_DIMS + 8 * i, &dim.to_le_bytes());
        }
        put(&mut b, T_OFFSET, &self.offset.to_le_bytes());
        put(&mut b, T_LEN, &self.len.to_le_bytes());
        put(&mut b, T_XXH3, &self.xxh3.to_le_bytes());
        b
    }

    /// Decodes a record. Fails if encoding it again would give other bytes, with the offset of the
    /// first bad field in the record.
    pub(crate) fn decode(b: &[u8; TENSOR_RECORD]) -> Result<Self, usize> {
        let end = b[..MAX_NAME]
            .iter()
            .position(|&x| x == 0)
            .unwrap_or(MAX_NAME);
        let name = std::str::from_utf8(&b[..end]).map_err(|_| T_NAME)?;
        let ndim = u32_at(b, T_NDIM) as usize;
        if ndim > MAX_DIMS {
            return Err(T_NDIM);
        }
        let entry = Self {
            name: name.to_owned(),
            dtype: u32_at(b, T_DTYPE),
            dims: (0..ndim).map(|i| u64_at(b, T_DIMS + 8 * i)).collect(),
            offset: u64_at(b, T_OFFSET),
            len: u64_at(b, T_LEN),
            xxh3: u64_at(b, T_XXH3),
        };
        same(&entry.encode(), b)?;
        Ok(entry)
    }
}

/// One bank of the directory: the neurons of one FFN or expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BankEntry {
    /// Layer.
    pub layer: u32,
    /// Expert inside the layer; 0 for a dense FFN.
    pub expert: u32,
    /// Neurons.
    pub neurons: u32,
    /// Flags of the caller; opaque.
    pub flags: u32,
    /// First byte of the bundles in the container, a multiple of 4096.
    pub offset: u64,
    /// Bytes of the bundles: neurons × stride.
    pub len: u64,
    /// Index of the first neuron in the checksum table.
    pub first_checksum: u64,
    /// First byte of the bank's scales in the container.
    pub scales_offset: u64,
    /// xxh3 of the bank's scales, 0 when inline.
    pub scales_xxh3: u64,
}

impl BankEntry {
    pub(crate) fn new(spec: &BankSpec, place: &BankPlace, scales_xxh3: u64) -> Self {
        let BankSpec {
            layer,
            expert,
            neurons,
            flags,
        } = *spec;
        Self {
            layer,
            expert,
            neurons,
            flags,
            offset: place.data.offset,
            len: place.data.len,
            first_checksum: place.first_checksum,
            scales_offset: place.scales.offset,
            scales_xxh3,
        }
    }

    /// Identity and size without the offsets.
    #[must_use]
    pub fn spec(&self) -> BankSpec {
        let Self {
            layer,
            expert,
            neurons,
            flags,
            ..
        } = *self;
        BankSpec {
            layer,
            expert,
            neurons,
            flags,
        }
    }

    /// Encodes the record.
    #[must_use]
    pub fn encode(&self) -> [u8; BANK_RECORD] {
        let mut b = [0; BANK_RECORD];
        for (at, value) in [
            (B_LAYER, self.layer),
            (B_EXPERT, self.expert),
            (B_NEURONS, self.neurons),
            (B_FLAGS, self.flags),
        ] {
            put(&mut b, at, &value.to_le_bytes());
        }
        for (at, value) in [
            (B_OFFSET, self.offset),
            (B_LEN, self.len),
            (B_FIRST, self.first_checksum),
            (B_SCALES_OFFSET, self.scales_offset),
            (B_SCALES_XXH3, self.scales_xxh3),
        ] {
            put(&mut b, at, &value.to_le_bytes());
        }
        b
    }

    /// Decodes a record. Fails if encoding it again would give other bytes.
    pub(crate) fn decode(b: &[u8; BANK_RECORD]) -> Result<Self, usize> {
        let entry = Self {
            layer: u32_at(b, B_LAYER),
            expert: u32_at(b, B_EXPERT),
            neurons: u32_at(b, B_NEURONS),
            flags: u32_at(b, B_FLAGS),
            offset: u64_at(b, B_OFFSET),
            len: u64_at(b, B_LEN),
            first_checksum: u64_at(b, B_FIRST),
            scales_offset: u64_at(b, B_SCALES_OFFSET),
            scales_xxh3: u64_at(b, B_SCALES_XXH3),
        };
        same(&entry.encode(), b)?;
        Ok(entry)
    }
}

fn same(encoded: &[u8], stored: &[u8]) -> Result<(), usize> {
    match encoded.iter().zip(stored).position(|(a, b)| a != b) {
        Some(at) => Err(at),
        None => Ok(()),
    }
}

fn put(b: &mut [u8], at: usize, value: &[u8]) {
    b[at..at + value.len()].copy_from_slice(value);
}

/// `N` bytes at a constant offset of a fixed-size record.
fn take<const N: usize>(b: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&b[at..at + N]);
    out
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(take(b, at))
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(take(b, at))
}
