//! The bytes of a container's PREDICTOR section.
//!
//! ```text
//! header, 64 bytes                     record, 64 bytes, one per bank
//!    0   8  magic "EMBRPRED"              0   4  kind: 0 none, 1 sign bits, 2 low rank, 3 magnitude,
//!                                                     4 coarse gate, 5 coarse gate with cutoffs,
//!                                                     6 and 7 the same in three bits
//!    8   4  version                       4   4  flags: 1 reads the residual, 2 ReLU between the factors
//!   12   4  banks                         8   4  rank, else 0
//!   16   4  d_model                      12   4  block format of fc1, else 0
//!   20   4  neurons of the largest bank  16   4  block format of fc2, else 0
//!   24   8  tokens it was made from      20   4  sign bits: most negative products, u32
//!   32   8  tokens it was measured on            magnitude: smallest |activated gate|, f32
//!   40   8  length of the section        24   8  offset of the payload in the section
//!   48   4  recall aimed at, f32         32   4  length of the payload
//!   52  12  reserved, zero               36   4  tokens it was measured on, 0 for those of the header
//!                                        40  24  measured: active, predicted, hit, u64 each
//!
//! payload, at a multiple of 64, in the order of banks without gaps but zeros
//!   sign bits   signs of each gate row (see the kernels' sign_bytes)
//!   low rank    fc1 rows │ fc2 rows │ a threshold per neuron, f16; each part at a multiple of 64
//!   coarse gate   gate rows in two or three bits │ a threshold per neuron, f16; each part at a multiple of 64
//!   coarse gate with cutoffs   gate rows in two or three bits │ of a token's cutoff: a fixed part, per mean and per
//!                 deviation of its scores, f32 each │ a threshold per neuron, f16; as above
//!   none, magnitude   nothing
//! ```
//!
//! Banks and their order are those of the container; rows are in packed order. An expert is
//! measured on the tokens that visit it. A bank of kind *none* has the measurements of the
//! predictor that was rejected; zeros mean that none was trained.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use emberflow_kernels::{DType, Narrow, sign_bytes};

use crate::bytes::SharedBytes;
use crate::coarse::CoarseGate;
use crate::fields::{f32_at, put, u32_at, u64_at};
use crate::low_rank::{LowRank, LowRankSpec};
use crate::predict::{Predictor, Reads, SharedShape};
use crate::quality::Quality;
use crate::sign::SignBit;
use crate::thresholds::Thresholds;
use crate::top::{self, CoarseTop, CutoffFit};

/// First bytes of the section.
const MAGIC: &[u8; 8] = b"EMBRPRED";

/// Format version.
const VERSION: u32 = 1;

const HEADER: usize = 64;
const RECORD: usize = 64;
const ALIGN: usize = 64;

/// Largest rank: the dimensions of any model, with a margin.
const MAX_RANK: usize = 1 << 16;

/// How the neurons of a bank are selected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// By computing the gates.
    None,
    /// [`SignBit`].
    Sign {
        /// Most negative products.
        limit: u32,
    },
    /// [`LowRank`].
    LowRank(LowRankSpec),
    /// [`CoarseGate`].
    Coarse(Narrow),
    /// [`CoarseTop`], for gates that fire above a cutoff per token.
    CoarseTop(Narrow),
    /// Neurons with an activated gate of at least this magnitude (CATS, arXiv 2404.08763).
    Magnitude {
        /// Smallest magnitude.
        threshold: f32,
    },
}

impl Kind {
    /// Whether a [`Predictor`] selects the neurons.
    pub fn predicts(&self) -> bool {
        !matches!(self, Kind::None | Kind::Magnitude { .. })
    }

    /// Whether the predictor estimates each token's cutoff.
    pub fn knows_cutoffs(&self) -> bool {
        matches!(self, Kind::CoarseTop(_))
    }

    /// Memory per token of a predictor of `neurons` neurons, for inputs of `d` elements.
    pub fn shared_shape(&self, d: usize, neurons: usize) -> SharedShape {
        match self {
            Kind::None | Kind::Magnitude { .. } => SharedShape::default(),
            Kind::Coarse(_) => CoarseGate::shared_shape(d),
            Kind::Sign { .. } => SignBit::shared_shape(d),
            Kind::LowRank(spec) => spec.shared_shape(),
            Kind::CoarseTop(_) => CoarseTop::shared_shape(d, neurons),
        }
    }

    /// Time to score `neurons` neurons for a token with `d` elements, in 4-bit × 8-bit products.
    pub fn products(&self, d: usize, neurons: usize) -> f64 {
        match self {
            Kind::None | Kind::Magnitude { .. } => 0.0,
            Kind::Coarse(_) | Kind::CoarseTop(_) => d as f64 * neurons as f64,
            Kind::Sign { .. } => SignBit::products(d, neurons),
            Kind::LowRank(spec) => spec.products(),
        }
    }
}

/// A bank's predictor and its quality on held-out text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BankEntry {
    /// How neurons are selected.
    pub kind: Kind,
    /// Measured on held-out text.
    pub quality: Quality,
    /// Neurons of the bank.
    pub neurons: usize,
    /// Location of the payload.
    offset: usize,
    len: usize,
}

/// The directory of a section.
#[derive(Debug, Clone, PartialEq)]
pub struct Directory {
    /// Elements of an input.
    pub d: usize,
    /// Tokens of the training text.
    pub trained_on: u64,
    /// Tokens of the held-out text.
    pub measured_on: u64,
    /// Recall for which the thresholds were calibrated.
    pub target: f32,
    /// One per bank.
    pub banks: Vec<BankEntry>,
}

/// Errors of a section.
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
    /// An invalid record or payload.
    #[error("bank {bank}: {what}")]
    Bank {
        /// Bank number.
        bank: usize,
        /// Description.
        what: String,
    },
}

/// A bank's predictor to encode.
#[derive(Debug, Clone)]
pub struct NewBank {
    /// How neurons are selected.
    pub kind: Kind,
    /// Measured on held-out text.
    pub quality: Quality,
    /// The parts of the payload in order.
    pub parts: Vec<Vec<u8>>,
}

/// Lengths of the parts of a payload, saturating.
fn part_lens(kind: &Kind, d: usize, neurons: usize) -> [usize; 3] {
    match kind {
        Kind::None | Kind::Magnitude { .. } => [0; 3],
        Kind::Sign { .. } => [neurons.saturating_mul(sign_bytes(d)), 0, 0],
        Kind::LowRank(spec) => [
            spec.fc1_bytes(),
            spec.fc2_bytes(),
            neurons.saturating_mul(2),
        ],
        Kind::Coarse(narrow) => [
            neurons.saturating_mul(narrow.row_bytes(d)),
            neurons.saturating_mul(2),
            0,
        ],
        Kind::CoarseTop(narrow) => [
            neurons.saturating_mul(narrow.row_bytes(d)),
            CutoffFit::BYTES,
            neurons.saturating_mul(2),
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
    /// Bytes before the first payload, for `banks` banks.
    pub fn len_for(banks: usize) -> usize {
        HEADER.saturating_add(banks.saturating_mul(RECORD))
    }

    /// Parses the head of a section of `len` bytes, given at least its first [`Directory::len_for`]
    /// bytes, and checks that the payloads fill the rest in order without gaps. `neurons`: neurons
    /// of each bank; `d`: elements of a gate row.
    ///
    /// # Errors
    /// A [`SectionError`] for the first invalid field.
    pub fn parse(
        bytes: &[u8],
        len: u64,
        d: usize,
        neurons: &[usize],
    ) -> Result<Self, SectionError> {
        let directory = Self::len_for(neurons.len());
        if bytes.len() < directory {
            return Err(SectionError::Length {
                what: "its directory",
                found: bytes.len(),
                expected: directory,
            });
        }
        let (header, records) = bytes[..directory].split_at(HEADER);
        check_header(header, d, neurons)?;
        let measured_on = u64_at(header, 32);
        let mut next = directory;
        let mut entries = Vec::with_capacity(neurons.len());
        let records = records.chunks_exact(RECORD).zip(neurons);
        for (bank, (record, &neurons)) in records.enumerate() {
            let entry = bank_entry(record, d, neurons, measured_on, next)
                .map_err(|what| SectionError::Bank { bank, what })?;
            next = next.saturating_add(entry.len);
            entries.push(entry);
        }
        for (what, found) in [
            ("all of its banks", len),
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
            trained_on: u64_at(header, 24),
            measured_on,
            target: f32_at(header, 48),
            banks: entries,
        })
    }

    /// Checks the payloads: padding is zero, thresholds are not NaN.
    ///
    /// # Errors
    /// The first invalid bank.
    pub fn check(&self, section: &[u8]) -> Result<(), SectionError> {
        let expected = self.len();
        if section.len() != expected {
            return Err(SectionError::Length {
                what: "all of its banks",
                found: section.len(),
                expected,
            });
        }
        for (bank, entry) in self.banks.iter().enumerate() {
            self.check_payload(entry, section)
                .map_err(|what| SectionError::Bank { bank, what })?;
        }
        Ok(())
    }

    /// Bytes of the section.
    #[allow(clippy::len_without_is_empty)] // a section is never empty
    pub fn len(&self) -> usize {
        let end = self.banks.last().map(|b| b.offset + b.len);
        end.unwrap_or(Self::len_for(0))
    }

    fn check_payload(&self, entry: &BankEntry, bytes: &[u8]) -> Result<(), String> {
        let lens = part_lens(&entry.kind, self.d, entry.neurons);
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
            Kind::Coarse(_) => second,
            Kind::CoarseTop(_) => match CutoffFit::from_bytes(&bytes[second]) {
                Some(_) => third,
                None => return Err("its cutoffs come from numbers that are not finite".into()),
            },
            _ => return Ok(()),
        };
        // Infinite thresholds are valid: always or never.
        let is_nan = |b: &[u8]| (b[1] & 0x7c) == 0x7c && (b[1] & 3 | b[0]) != 0;
        match bytes[thresholds].chunks_exact(2).position(is_nan) {
            Some(n) => Err(format!("the threshold of neuron {n} is not a number")),
            None => Ok(()),
        }
    }

    /// Ranges of a bank's payload parts in the section.
    fn parts(&self, entry: &BankEntry) -> [Range<usize>; 3] {
        let mut at = entry.offset;
        part_lens(&entry.kind, self.d, entry.neurons).map(|len| {
            let part = at..at + len;
            at += padded(len);
            part
        })
    }

    /// The predictor of a bank, over the section that was parsed; `None` if the bank has none.
    pub fn predictor(
        &self,
        bank: usize,
        section: &Arc<dyn AsRef<[u8]> + Send + Sync>,
    ) -> Option<Box<dyn Predictor>> {
        let entry = self.banks.get(bank)?;
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
            Kind::Coarse(narrow) => {
                let thresholds = Thresholds::Each(second?);
                let gate = CoarseGate::new(narrow, first?, self.d, thresholds);
                Some(Box::new(gate))
            }
            Kind::CoarseTop(narrow) => {
                let gate = CoarseGate::new(narrow, first?, self.d, Thresholds::Each(third?));
                top::assemble(gate, entry.neurons, second?.as_slice())
            }
        }
    }

    /// A bank of `section` in the form that [`encode`] takes; `None` if there is none.
    pub fn bank(&self, bank: usize, section: &[u8]) -> Option<NewBank> {
        let entry = self.banks.get(bank)?;
        let parts = self.parts(entry);
        let parts = parts.iter().filter(|part| !part.is_empty());
        Some(NewBank {
            kind: entry.kind,
            quality: entry.quality,
            parts: parts
                .map(|part| section.get(part.clone()).map(<[u8]>::to_vec))
                .collect::<Option<_>>()?,
        })
    }

    /// Bytes of a bank's predictor in the section.
    pub fn bank_bytes(&self, bank: usize) -> usize {
        self.banks.get(bank).map_or(0, |b| b.len)
    }

    /// Measurements of all banks, added up.
    pub fn quality(&self) -> Quality {
        let mut all = Quality::default();
        self.banks.iter().for_each(|b| all += b.quality);
        all
    }
}

/// Neurons of the largest bank.
fn most(neurons: &[usize]) -> usize {
    neurons.iter().copied().max().unwrap_or(0)
}

/// Checks the header fields that do not depend on records.
fn check_header(header: &[u8], d: usize, neurons: &[usize]) -> Result<(), SectionError> {
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
        ("the number of banks", 12, neurons.len() as u64),
        ("d_model", 16, d as u64),
        ("the number of neurons", 20, most(neurons) as u64),
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

/// Parses the kind of a record.
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
        4 if value == 0 => plain(Kind::Coarse(Narrow::Two)),
        5 if value == 0 => plain(Kind::CoarseTop(Narrow::Two)),
        6 if value == 0 => plain(Kind::Coarse(Narrow::Three)),
        7 if value == 0 => plain(Kind::CoarseTop(Narrow::Three)),
        0..=7 => Err(format!("a threshold of {value:#x} makes no sense")),
        other => Err(format!("unknown kind {other}")),
    }
}

/// Parses a bank's record, whose payload must begin at `expected_offset`.
fn bank_entry(
    record: &[u8],
    d: usize,
    neurons: usize,
    measured_on: u64,
    expected_offset: usize,
) -> Result<BankEntry, String> {
    let kind = kind_of(record, d, neurons)?;
    let [active, predicted, hit] = [40, 48, 56].map(|at| u64_at(record, at));
    let tokens = match u32_at(record, 36) {
        0 => measured_on,
        tokens if u64::from(tokens) == measured_on => {
            return Err(format!("measured on {tokens} tokens, as the header says"));
        }
        tokens => tokens.into(),
    };
    let pairs = tokens
        .checked_mul(neurons as u64)
        .ok_or("more measured pairs than can be counted")?;
    if hit > active || hit > predicted || active > pairs || predicted > pairs {
        return Err(format!(
            "of {pairs} pairs {active} fire, {predicted} were predicted and {hit} were both"
        ));
    }
    let (offset, len) = (u64_at(record, 24), u64::from(u32_at(record, 32)));
    let expected_len = payload_len(&kind, d, neurons);
    if (offset, len) != (expected_offset as u64, expected_len as u64) {
        return Err(format!(
            "its {len} bytes lie at {offset}, expected {expected_len} at {expected_offset}"
        ));
    }
    let unmeasured = kind == Kind::None && u32_at(record, 36) == 0 && active + predicted == 0;
    Ok(BankEntry {
        kind,
        quality: Quality {
            pairs: if unmeasured { 0 } else { pairs },
            active,
            predicted,
            hit,
        },
        neurons,
        offset: expected_offset,
        len: expected_len,
    })
}

/// Amounts of text for a section's predictors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Training {
    /// Tokens of the training text.
    pub trained_on: u64,
    /// Tokens of the held-out text for measuring.
    pub measured_on: u64,
    /// Recall for which the thresholds were calibrated.
    pub target: f32,
}

/// Encodes a section from its banks and the neurons of each.
///
/// # Panics
/// If `banks` and `neurons` differ in length, or a part does not have the length of its kind.
pub fn encode(d: usize, neurons: &[usize], training: Training, banks: &[NewBank]) -> Vec<u8> {
    assert_eq!(banks.len(), neurons.len());
    let mut out = vec![0; Directory::len_for(banks.len())];
    out[..8].copy_from_slice(MAGIC);
    put(&mut out, 8, VERSION);
    put(&mut out, 12, banks.len() as u32);
    put(&mut out, 16, d as u32);
    put(&mut out, 20, most(neurons) as u32);
    put(&mut out, 48, training.target.to_bits());
    out[24..32].copy_from_slice(&training.trained_on.to_le_bytes());
    out[32..40].copy_from_slice(&training.measured_on.to_le_bytes());
    for (b, (bank, &neurons)) in banks.iter().zip(neurons).enumerate() {
        let at = HEADER + b * RECORD;
        let fields: [u32; 6] = match bank.kind {
            Kind::None => [0; 6],
            Kind::Sign { limit } => [1, 0, 0, 0, 0, limit],
            Kind::LowRank(s) => {
                let residual = u32::from(s.reads == Reads::Residual);
                let flags = residual | u32::from(s.relu) << 1;
                [2, flags, s.rank as u32, s.fc1.code(), s.fc2.code(), 0]
            }
            Kind::Magnitude { threshold } => [3, 0, 0, 0, 0, threshold.to_bits()],
            Kind::Coarse(Narrow::Two) => [4, 0, 0, 0, 0, 0],
            Kind::CoarseTop(Narrow::Two) => [5, 0, 0, 0, 0, 0],
            Kind::Coarse(Narrow::Three) => [6, 0, 0, 0, 0, 0],
            Kind::CoarseTop(Narrow::Three) => [7, 0, 0, 0, 0, 0],
        };
        for (i, field) in fields.into_iter().enumerate() {
            put(&mut out, at + 4 * i, field);
        }
        let q = bank.quality;
        let lens = part_lens(&bank.kind, d, neurons);
        let tokens = q.pairs / (neurons as u64).max(1);
        let own = if tokens == training.measured_on {
            0
        } else {
            tokens
        };
        put(
            &mut out,
            at + 32,
            payload_len(&bank.kind, d, neurons) as u32,
        );
        put(&mut out, at + 36, own as u32);
        let numbers = [
            (24, out.len() as u64),
            (40, q.active),
            (48, q.predicted),
            (56, q.hit),
        ];
        for (place, number) in numbers {
            out[at + place..][..8].copy_from_slice(&number.to_le_bytes());
        }
        let none = Vec::new();
        for (i, len) in lens.into_iter().enumerate() {
            let part = bank.parts.get(i).unwrap_or(&none);
            assert_eq!(part.len(), len, "part {i} of bank {b}");
            out.extend_from_slice(part);
            out.resize(out.len().next_multiple_of(ALIGN), 0);
        }
    }
    let len = out.len() as u64;
    out[40..48].copy_from_slice(&len.to_le_bytes());
    out
}
