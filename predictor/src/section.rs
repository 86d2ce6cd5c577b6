//! The bytes of a container's PREDICTOR section.
//!
//! ```text
//! header, 64 bytes                     layer record, 64 bytes, one per layer
//!    0   8  magic "EMBRPRED"              0   4  kind: 0 none, 1 sign bits, 2 low rank, 3 magnitude,
//!                                                     4 coarse gate
//!    8   4  version                       4   4  flags: 1 reads the residual, 2 ReLU between the factors
//!   12   4  layers                        8   4  rank, else 0
//!   16   4  d_model                      12   4  block format of fc1, else 0
//!   20   4  neurons of a layer           16   4  block format of fc2, else 0
//!   24   8  tokens it was made from      20   4  sign bits: most negative products, u32
//!   32   8  tokens it was measured on            magnitude: smallest |activated gate|, f32
//!   40   8  length of the section        24   8  offset of the payload in the section
//!   48   4  recall aimed at, f32         32   8  length of the payload
//!   52  12  reserved, zero               40  24  measured: active, predicted, hit, u64 each
//!
//! payload, at a multiple of 64, in layer order without gaps but zeros
//!   sign bits   signs of each gate row (see the kernels' sign_bytes)
//!   low rank    fc1 rows │ fc2 rows │ a threshold per neuron, f16; each part at a multiple of 64
//!   coarse gate   two-bit gate rows │ a threshold per neuron, f16; each part at a multiple of 64
//!   none, magnitude   nothing
//! ```
//!
//! Rows are in packed order. A layer of kind *none* keeps the measurements of the predictor that
//! was rejected.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use emberflow_kernels::{DType, sign_bytes, two_bit_row_bytes};

use crate::bytes::SharedBytes;
use crate::coarse::CoarseGate;
use crate::low_rank::{LowRank, LowRankSpec};
use crate::predict::{Predictor, Reads, SharedShape};
use crate::quality::Quality;
use crate::sign::SignBit;
use crate::thresholds::Thresholds;

/// First bytes of the section.
const MAGIC: &[u8; 8] = b"EMBRPRED";

/// Format version.
const VERSION: u32 = 1;

const HEADER: usize = 64;
const RECORD: usize = 64;
const ALIGN: usize = 64;

/// Largest rank: the dimensions of any model, with a margin.
const MAX_RANK: usize = 1 << 16;

/// How a layer's neurons are selected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// By computing the gate itself.
    None,
    /// [`SignBit`] with its limit.
    Sign {
        /// Most negative products.
        limit: u32,
    },
    /// [`LowRank`].
    LowRank(LowRankSpec),
    /// [`CoarseGate`].
    Coarse,
    /// Neurons with an activated gate of at least this magnitude (CATS, arXiv 2404.08763).
    Magnitude {
        /// Smallest magnitude.
        threshold: f32,
    },
}

impl Kind {
    /// Whether a [`Predictor`] selects the neurons.
    pub fn predicts(&self) -> bool {
        matches!(self, Kind::Sign { .. } | Kind::LowRank(_) | Kind::Coarse)
    }

    /// What its predictor stores per token, for inputs of `d` elements.
    pub fn shared_shape(&self, d: usize) -> SharedShape {
        match self {
            Kind::None | Kind::Magnitude { .. } | Kind::Coarse => SharedShape::default(),
            Kind::Sign { .. } => SignBit::shared_shape(d),
            Kind::LowRank(spec) => spec.shared_shape(),
        }
    }
}

/// A layer's predictor and its quality on held-out text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerEntry {
    /// How neurons are selected.
    pub kind: Kind,
    /// Measured on held-out text.
    pub quality: Quality,
    /// Location of the payload.
    offset: usize,
    len: usize,
}

/// The directory of a section.
#[derive(Debug, Clone, PartialEq)]
pub struct Directory {
    /// Elements of an input.
    pub d: usize,
    /// Neurons of a layer.
    pub neurons: usize,
    /// Tokens of the training text.
    pub trained_on: u64,
    /// Tokens of the held-out text.
    pub measured_on: u64,
    /// Recall they are calibrated for.
    pub target: f32,
    /// One per layer.
    pub layers: Vec<LayerEntry>,
}

/// Why a section is rejected.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum SectionError {
    /// A wrong length.
    #[error("the section has {found} bytes, {what} takes {expected}")]
    Length {
        /// What needs the bytes.
        what: &'static str,
        /// Bytes present.
        found: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// Not a predictor section, or another version.
    #[error("{what} is {found}, expected {expected}; train the predictors again")]
    Header {
        /// Which field.
        what: &'static str,
        /// Its value.
        found: String,
        /// Expected value.
        expected: String,
    },
    /// An invalid layer.
    #[error("layer {layer}: {what}")]
    Layer {
        /// Its number.
        layer: usize,
        /// What is wrong.
        what: String,
    },
}

/// A layer to write.
pub struct NewLayer {
    /// How neurons are selected.
    pub kind: Kind,
    /// Measured on held-out text.
    pub quality: Quality,
    /// The parts of the payload in order.
    pub parts: Vec<Vec<u8>>,
}

/// Lengths of the parts of a payload; saturating.
fn part_lens(kind: &Kind, d: usize, neurons: usize) -> [usize; 3] {
    match kind {
        Kind::None | Kind::Magnitude { .. } => [0; 3],
        Kind::Sign { .. } => [neurons.saturating_mul(sign_bytes(d)), 0, 0],
        Kind::LowRank(spec) => [
            spec.fc1_bytes(),
            spec.fc2_bytes(),
            neurons.saturating_mul(2),
        ],
        Kind::Coarse => [
            neurons.saturating_mul(two_bit_row_bytes(d)),
            neurons.saturating_mul(2),
            0,
        ],
    }
}

fn padded(len: usize) -> usize {
    len.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX)
}

fn payload_len(kind: &Kind, d: usize, neurons: usize) -> usize {
    part_lens(kind, d, neurons)
        .iter()
        .fold(0, |sum, &len| sum.saturating_add(padded(len)))
}

impl Directory {
    /// Bytes before the first payload, for `layers` layers.
    pub fn len_for(layers: usize) -> usize {
        HEADER.saturating_add(layers.saturating_mul(RECORD))
    }

    /// Parses the head of a section of `len` bytes from at least its first [`Directory::len_for`]
    /// bytes, and checks that the payloads fill the rest in order and without gaps.
    ///
    /// # Errors
    /// A [`SectionError`] for the first invalid field.
    pub fn parse(
        bytes: &[u8],
        len: u64,
        layers: usize,
        d: usize,
        neurons: usize,
    ) -> Result<Self, SectionError> {
        let directory = Self::len_for(layers);
        if bytes.len() < directory {
            return Err(SectionError::Length {
                what: "its directory",
                found: bytes.len(),
                expected: directory,
            });
        }
        let (header, records) = bytes[..directory].split_at(HEADER);
        check_header(header, layers, d, neurons)?;
        let measured_on = u64_at(header, 32);
        let mut next = directory;
        let mut entries = Vec::with_capacity(layers);
        for (layer, record) in records.chunks_exact(RECORD).enumerate() {
            let entry = layer_entry(record, d, neurons, measured_on, next)
                .map_err(|what| SectionError::Layer { layer, what })?;
            next = next.saturating_add(entry.len);
            entries.push(entry);
        }
        for (what, found) in [
            ("all of its layers", len),
            ("its header", u64_at(header, 40)),
        ] {
            if found != next as u64 {
                return Err(SectionError::Length {
                    what,
                    found: usize::try_from(found).unwrap_or(usize::MAX),
                    expected: next,
                });
            }
        }
        Ok(Self {
            d,
            neurons,
            trained_on: u64_at(header, 24),
            measured_on,
            target: f32_at(header, 48),
            layers: entries,
        })
    }

    /// Checks the payloads of this directory's section: padding is zero, thresholds are not NaN.
    ///
    /// # Errors
    /// The first invalid layer.
    pub fn check(&self, section: &[u8]) -> Result<(), SectionError> {
        let expected = self.len();
        if section.len() != expected {
            return Err(SectionError::Length {
                what: "all of its layers",
                found: section.len(),
                expected,
            });
        }
        for (layer, entry) in self.layers.iter().enumerate() {
            self.check_payload(entry, section)
                .map_err(|what| SectionError::Layer { layer, what })?;
        }
        Ok(())
    }

    /// Bytes of the section.
    #[allow(clippy::len_without_is_empty)] // a section is never empty
    pub fn len(&self) -> usize {
        let end = self.layers.last().map(|l| l.offset + l.len);
        end.unwrap_or(Self::len_for(0))
    }

    fn check_payload(&self, entry: &LayerEntry, bytes: &[u8]) -> Result<(), String> {
        let lens = part_lens(&entry.kind, self.d, self.neurons);
        let parts = self.parts(entry);
        for (part, len) in parts.iter().zip(lens) {
            if bytes[part.end..part.start + padded(len)]
                .iter()
                .any(|&b| b != 0)
            {
                return Err("padding is not zero".into());
            }
        }
        let [_, second, third] = parts;
        let thresholds = match entry.kind {
            Kind::LowRank(_) => third,
            Kind::Coarse => second,
            _ => return Ok(()),
        };
        // infinite thresholds are valid: always, and never
        let is_nan = |b: &[u8]| (b[1] & 0x7c) == 0x7c && (b[1] & 3 | b[0]) != 0;
        match bytes[thresholds].chunks_exact(2).position(is_nan) {
            Some(n) => Err(format!("the threshold of neuron {n} is not a number")),
            None => Ok(()),
        }
    }

    /// Ranges of a layer's payload parts in the section.
    fn parts(&self, entry: &LayerEntry) -> [Range<usize>; 3] {
        let mut at = entry.offset;
        part_lens(&entry.kind, self.d, self.neurons).map(|len| {
            let part = at..at + len;
            at += padded(len);
            part
        })
    }

    /// The predictor of a layer over the section it was parsed from; `None` if the layer has none.
    pub fn predictor(
        &self,
        layer: usize,
        section: &Arc<dyn AsRef<[u8]> + Send + Sync>,
    ) -> Option<Box<dyn Predictor>> {
        let entry = self.layers.get(layer)?;
        let [first, second, third] = self
            .parts(entry)
            .map(|part| SharedBytes::new(section.clone(), part));
        match entry.kind {
            Kind::None | Kind::Magnitude { .. } => None,
            Kind::Sign { limit } => Some(Box::new(SignBit::new(first?, self.d, limit))),
            Kind::LowRank(spec) => {
                let thresholds = Thresholds::Each(third?);
                Some(Box::new(LowRank::new(spec, first?, second?, thresholds)))
            }
            Kind::Coarse => {
                let thresholds = Thresholds::Each(second?);
                Some(Box::new(CoarseGate::new(first?, self.d, thresholds)))
            }
        }
    }

    /// A layer of `section`, as given to [`encode`]; `None` if there is none.
    pub fn layer(&self, layer: usize, section: &[u8]) -> Option<NewLayer> {
        let entry = self.layers.get(layer)?;
        let parts = self.parts(entry);
        let parts = parts.iter().filter(|part| !part.is_empty());
        Some(NewLayer {
            kind: entry.kind,
            quality: entry.quality,
            parts: parts
                .map(|part| section.get(part.clone()).map(<[u8]>::to_vec))
                .collect::<Option<_>>()?,
        })
    }

    /// Bytes of a layer's predictor in the section.
    pub fn layer_bytes(&self, layer: usize) -> usize {
        self.layers.get(layer).map_or(0, |l| l.len)
    }

    /// Measurements of all layers combined.
    pub fn quality(&self) -> Quality {
        let mut all = Quality::default();
        self.layers.iter().for_each(|l| all += l.quality);
        all
    }
}

/// Checks the fields of the header that do not depend on the layers.
fn check_header(
    header: &[u8],
    layers: usize,
    d: usize,
    neurons: usize,
) -> Result<(), SectionError> {
    let refused = |what, found: String, expected: &dyn Display| {
        Err(SectionError::Header {
            what,
            found,
            expected: expected.to_string(),
        })
    };
    if header[..8] != MAGIC[..] {
        let (found, expected) = (format!("{:02x?}", &header[..8]), format!("{MAGIC:02x?}"));
        return refused("the magic", found, &expected);
    }
    for (what, at, expected) in [
        ("the version", 8, u64::from(VERSION)),
        ("the number of layers", 12, layers as u64),
        ("d_model", 16, d as u64),
        ("the number of neurons", 20, neurons as u64),
    ] {
        let found = u64::from(u32_at(header, at));
        if found != expected {
            return refused(what, found.to_string(), &expected);
        }
    }
    let target = f32_at(header, 48);
    if !(0.0..=1.0).contains(&target) {
        return refused("the recall aimed at", target.to_string(), &"0 to 1");
    }
    if header[52..].iter().any(|&b| b != 0) {
        return refused("the reserved part", "not zero".into(), &"zero");
    }
    Ok(())
}

/// The kind that a layer's record names.
fn kind_of(record: &[u8], d: usize, neurons: usize) -> Result<Kind, String> {
    let [kind, flags, rank, fc1, fc2, value] = [0, 4, 8, 12, 16, 20].map(|at| u32_at(record, at));
    let plain = |kind| {
        if (flags, rank, fc1, fc2) == (0, 0, 0, 0) {
            Ok(kind)
        } else {
            Err(format!(
                "(flags, rank, formats) are {:?}, expected zeros",
                (flags, rank, fc1, fc2)
            ))
        }
    };
    match kind {
        0 if value == 0 => plain(Kind::None),
        1 if value as usize <= d => plain(Kind::Sign { limit: value }),
        2 if value == 0 => {
            let format =
                |code| DType::from_code(code).ok_or(format!("unknown block format {code}"));
            if flags > 3 {
                return Err(format!("unknown flags {flags:#x}"));
            }
            if rank == 0 || rank as usize > MAX_RANK {
                return Err(format!("a rank of {rank}, expected 1 to {MAX_RANK}"));
            }
            Ok(Kind::LowRank(LowRankSpec {
                d,
                neurons,
                rank: rank as usize,
                fc1: format(fc1)?,
                fc2: format(fc2)?,
                reads: if flags & 1 == 0 {
                    Reads::Normed
                } else {
                    Reads::Residual
                },
                relu: flags & 2 != 0,
            }))
        }
        3 if f32::from_bits(value) >= 0.0 => plain(Kind::Magnitude {
            threshold: f32::from_bits(value),
        }),
        4 if value == 0 => plain(Kind::Coarse),
        0..=4 => Err(format!("a threshold of {value:#x} makes no sense")),
        other => Err(format!("unknown kind {other}")),
    }
}

/// A layer's record, whose payload is expected at `expected_offset`.
fn layer_entry(
    record: &[u8],
    d: usize,
    neurons: usize,
    measured_on: u64,
    expected_offset: usize,
) -> Result<LayerEntry, String> {
    let kind = kind_of(record, d, neurons)?;
    let [active, predicted, hit] = [40, 48, 56].map(|at| u64_at(record, at));
    let pairs = measured_on
        .checked_mul(neurons as u64)
        .ok_or("more measured pairs than can be counted")?;
    if hit > active || hit > predicted || active > pairs || predicted > pairs {
        return Err(format!(
            "of {pairs} pairs {active} fire, {predicted} were predicted and {hit} were both"
        ));
    }
    let (offset, len) = (u64_at(record, 24), u64_at(record, 32));
    let expected_len = payload_len(&kind, d, neurons);
    if (offset, len) != (expected_offset as u64, expected_len as u64) {
        return Err(format!(
            "its {len} bytes lie at {offset}, expected {expected_len} at {expected_offset}"
        ));
    }
    Ok(LayerEntry {
        kind,
        quality: Quality {
            pairs,
            active,
            predicted,
            hit,
        },
        offset: expected_offset,
        len: expected_len,
    })
}

/// From how much text the predictors of a section were made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Training {
    /// Tokens that they were made from.
    pub trained_on: u64,
    /// Tokens of held-out text that they were measured on.
    pub measured_on: u64,
    /// Recall that they were calibrated to.
    pub target: f32,
}

/// The bytes of a section. `d`, `neurons` and the training are those of all layers.
///
/// # Panics
/// If a part has not the length that its layer's kind needs.
pub fn encode(d: usize, neurons: usize, training: Training, layers: &[NewLayer]) -> Vec<u8> {
    let mut out = vec![0; Directory::len_for(layers.len())];
    out[..8].copy_from_slice(MAGIC);
    put(&mut out, 8, VERSION);
    put(&mut out, 12, layers.len() as u32);
    put(&mut out, 16, d as u32);
    put(&mut out, 20, neurons as u32);
    put(&mut out, 48, training.target.to_bits());
    out[24..32].copy_from_slice(&training.trained_on.to_le_bytes());
    out[32..40].copy_from_slice(&training.measured_on.to_le_bytes());
    for (l, layer) in layers.iter().enumerate() {
        let at = HEADER + l * RECORD;
        let fields: [u32; 6] = match layer.kind {
            Kind::None => [0; 6],
            Kind::Sign { limit } => [1, 0, 0, 0, 0, limit],
            Kind::LowRank(s) => {
                let residual = u32::from(s.reads == Reads::Residual);
                let flags = residual | u32::from(s.relu) << 1;
                [2, flags, s.rank as u32, s.fc1.code(), s.fc2.code(), 0]
            }
            Kind::Magnitude { threshold } => [3, 0, 0, 0, 0, threshold.to_bits()],
            Kind::Coarse => [4, 0, 0, 0, 0, 0],
        };
        for (i, field) in fields.into_iter().enumerate() {
            put(&mut out, at + 4 * i, field);
        }
        let q = layer.quality;
        let lens = part_lens(&layer.kind, d, neurons);
        let len = payload_len(&layer.kind, d, neurons);
        let numbers = [out.len() as u64, len as u64, q.active, q.predicted, q.hit];
        for (i, number) in numbers.into_iter().enumerate() {
            out[at + 24 + 8 * i..][..8].copy_from_slice(&number.to_le_bytes());
        }
        let none = Vec::new();
        for (i, len) in lens.into_iter().enumerate() {
            let part = layer.parts.get(i).unwrap_or(&none);
            assert_eq!(part.len(), len, "part {i} of layer {l}");
            out.extend_from_slice(part);
            out.resize(out.len().next_multiple_of(ALIGN), 0);
        }
    }
    let len = out.len() as u64;
    out[40..48].copy_from_slice(&len.to_le_bytes());
    out
}

fn put(out: &mut [u8], at: usize, value: u32) {
    out[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut b = [0; 4];
    b.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(b)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut b = [0; 8];
    b.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(b)
}

fn f32_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_bits(u32_at(bytes, at))
}
