//! Storage formats of weights.
//!
//! ```text
//! ROW OF n ELEMENTS (little-endian, any alignment, structure of arrays)
//!
//! f32          n × 4 bytes
//! f16, bf16    n × 2 bytes
//!
//! q8, q4       groups = ceil(n / 32)
//!   quants     q8: groups × 32 bytes, byte i = element i as i8
//!              q4: groups × 16 bytes, byte j of a group holds element j in its
//!                  low nibble and element j + 16 in its high nibble
//!   scales     groups × 2 bytes, one f16 per group
//!
//! q4k          groups = ceil(n / 32)
//!   quants     nibbles in the order of q4
//!   scales     16 bytes for each super-block of eight groups, fewer for a shorter last one:
//!              see `q4k.rs`
//!
//! mxfp4        groups = ceil(n / 32)
//!   quants     nibbles in the order of q4: floats of one sign, two exponent and one
//!              mantissa bit (e2m1)
//!   scales     groups × 1 byte, an exponent e (e8m0)
//!
//! q8c, q4c     groups = ceil(n / 32), outliers = ceil(n / 64), at most 1024
//!   quants     bytes in the order of q8, or nibbles in the order of q4
//!   scales     q8c: one f32 for the whole row
//!              q4c: f32 of the nibbles, f32 of the outliers, outliers × i8 quants,
//!                   outliers × u16 elements: see `channel.rs`
//!
//! blocks       a whole number of blocks of a GGUF file, scales inside: see `blocks/`
//!
//! value        q8, q8c: q × scale    q4, q4c: (nibble − 8) × scale    mxfp4: e2m1 × 2^(e − 127)
//!              q4k: nibble × scale − minimum    q4c: and outlier quant × outlier scale
//! ```
//!
//! Elements past `n` in the last group are written as zero (q8, q8c: 0, q4, q4c: nibble 8, q4k and mxfp4: nibble 0) and
//! ignored on reading.

use crate::blocks::Block;
pub(crate) use crate::groups::{CHUNK, CHUNK_GROUPS, E2M1_DOUBLED, HALF, MXFP4_SCALES};
pub use crate::groups::{GROUP, SUPER_GROUPS, mxfp4_scale};

/// Elements of the longest row of q8c or q4c: its sum fits in 32 bits.
pub const LONGEST: usize = 1 << 17;

/// Elements of a q4c row for each of its outliers.
const PER_OUTLIER: usize = 64;
/// Most outliers of a q4c row: those of as many elements as a u16 tells apart.
pub(crate) const MAX_OUTLIERS: usize = (1 << 16) / PER_OUTLIER;
/// Bytes of the scale of a row of q8c, or of one of the two of q4c.
pub(crate) const CHANNEL_SCALE: usize = size_of::<f32>();
/// Bytes of an outlier: an i8 and a u16.
const OUTLIER_BYTES: usize = 3;

/// Outliers of a q4c row of `n` elements.
pub const fn outliers(n: usize) -> usize {
    let count = n.div_ceil(PER_OUTLIER);
    if count < MAX_OUTLIERS {
        count
    } else {
        MAX_OUTLIERS
    }
}

const Q4_GROUP_BYTES: usize = GROUP / 2;
const SCALE_BYTES: usize = 2;

/// Bytes of its two f16 numbers.
pub(crate) const SUPER_HEAD: usize = 4;
/// Bytes of a whole super-block.
pub(crate) const SUPER_BYTES: usize = SUPER_HEAD + SUPER_GROUPS * 12 / 8;

/// Bytes of the super-blocks of so many groups; saturates.
pub(crate) const fn super_bytes(groups: usize) -> usize {
    let (whole, rest) = (groups / SUPER_GROUPS, groups % SUPER_GROUPS);
    let short = if rest == 0 {
        0
    } else {
        SUPER_HEAD + (12 * rest).div_ceil(8)
    };
    whole.saturating_mul(SUPER_BYTES).saturating_add(short)
}

// The kernels process two groups per step of the lane rule, and codes are stored in files.
const _: () = assert!(crate::LANES == 2 * GROUP);
const _: () = assert!(DType::F32.code() == 0 && DType::F16.code() == 1);
const _: () = assert!(DType::BF16.code() == 2 && DType::Q8.code() == 3);
const _: () = assert!(DType::Q4.code() == 4 && DType::Mxfp4.code() == 5);
const _: () = assert!(DType::Q4.row_bytes(64) == 36 && DType::Q8.row_bytes(64) == 68);
const _: () = assert!(DType::Q4.row_bytes(33) == 36 && DType::Q8.row_bytes(33) == 68);
const _: () = assert!(DType::Q4k.code() == 6 && DType::Q4k.row_bytes(256) == 144);
const _: () = assert!(DType::Q4k.row_bytes(96) == 48 + 4 + 5);
const _: () = assert!(DType::Q8c.code() == 7 && DType::Q8c.row_bytes(64) == 68);
const _: () = assert!(DType::Q4c.code() == 8 && DType::Q4c.row_bytes(64) == 32 + 8 + 3);
const _: () = assert!(DType::F32.row_bytes(3) == 12 && DType::BF16.row_bytes(3) == 6);
const _: () = assert!(DType::F16.row_bytes(0) == 0 && DType::Q4.row_bytes(0) == 0);

/// A storage format of weights or of the KV cache. Their [codes](DType::code) are stored in
/// containers and never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// 32-bit IEEE float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// The upper half of a 32-bit IEEE float.
    BF16,
    /// Signed 8-bit integers, one f16 scale per 32 elements.
    Q8,
    /// 4-bit integers, one f16 scale per 32 elements.
    Q4,
    /// 4-bit floats, one exponent per 32 elements, as gpt-oss is published.
    Mxfp4,
    /// 4-bit integers from a minimum on; scales and minimums in six bits for 32 elements each, in
    /// units of two f16 for 256. As large as q4, with a third less squared error.
    Q4k,
    /// Signed 8-bit integers, one f32 scale per row: for NPUs, which know no groups.
    Q8c,
    /// 4-bit integers with one f32 scale per row, and one element of 64 in 8 bits instead, with
    /// another (PowerInfer-2 §7.6).
    Q4c,
    /// Blocks of GGUF files. Rows are read in this form and never written.
    Block(Block),
}

impl DType {
    /// Every format that rows can be written in, in order of its code.
    pub const ALL: [DType; 9] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q8,
        DType::Q4,
        DType::Mxfp4,
        DType::Q4k,
        DType::Q8c,
        DType::Q4c,
    ];

    /// The name used on command lines and in metadata.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::Q8 => "q8",
            DType::Q4 => "q4",
            DType::Mxfp4 => "mxfp4",
            DType::Q4k => "q4k",
            DType::Q8c => "q8c",
            DType::Q4c => "q4c",
            DType::Block(block) => block.name(),
        }
    }

    /// The format with this [`name`](DType::name), `None` if there is none.
    pub fn parse(name: &str) -> Option<DType> {
        DType::all().find(|dtype| dtype.name() == name)
    }

    /// Every format, blocks after those that rows can be written in.
    pub fn all() -> impl Iterator<Item = DType> {
        let blocks = Block::ALL.into_iter().map(DType::Block);
        DType::ALL.into_iter().chain(blocks)
    }

    /// The number stored in files; of blocks 256 more than in GGUF files.
    pub const fn code(self) -> u32 {
        match self {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::BF16 => 2,
            DType::Q8 => 3,
            DType::Q4 => 4,
            DType::Mxfp4 => 5,
            DType::Q4k => 6,
            DType::Q8c => 7,
            DType::Q4c => 8,
            DType::Block(block) => 256 + block.gguf(),
        }
    }

    /// The format with this [`code`](DType::code), `None` if there is none.
    pub fn from_code(code: u32) -> Option<DType> {
        DType::all().find(|dtype| dtype.code() == code)
    }

    /// Whether elements are integers in whole groups of [`GROUP`], with a scale of the group or of
    /// the row. Such rows meet activations in 8 bits.
    #[inline(always)]
    pub const fn is_grouped(self) -> bool {
        matches!(self, DType::Q8 | DType::Q4 | DType::Q4k | DType::Mxfp4) || self.is_per_channel()
    }

    /// Whether a row (an output channel) has one scale for all of its elements, so that its product
    /// with a token that has one too is a single integer.
    #[inline(always)]
    pub const fn is_per_channel(self) -> bool {
        matches!(self, DType::Q8c | DType::Q4c)
    }

    /// Integers that a product of a row of `n` elements with a token consists of: one for each
    /// group; or one for the row, and in q4c another for its outliers.
    #[inline]
    pub const fn sums(self, n: usize) -> usize {
        match self {
            DType::Q8c => 1,
            DType::Q4c => 2,
            _ => n.div_ceil(GROUP),
        }
    }

    /// Elements whose scales depend on each other; `usize::MAX` if they are all of a row's.
    pub const fn span(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::Q8 | DType::Q4 | DType::Mxfp4 => GROUP,
            DType::Q4k => GROUP * SUPER_GROUPS,
            DType::Q8c | DType::Q4c => usize::MAX,
            DType::Block(block) => block.elements(),
        }
    }

    /// Whether rows are blocks of GGUF files. Such rows meet activations in 8 bits, in the products of
    /// matrices ([`Cpu::matvec_q`](crate::Cpu::matvec_q), [`Cpu::matmul_q`](crate::Cpu::matmul_q)).
    #[inline(always)]
    pub const fn is_blocks(self) -> bool {
        matches!(self, DType::Block(_))
    }

    /// Bytes of the elements of a row of `n`, without scales; of all of it, if it is blocks. Saturates at `usize::MAX`, which no
    /// slice reaches, so an absurd `n` fails the caller's length check.
    #[inline(always)]
    pub const fn quants_bytes(self, n: usize) -> usize {
        let groups = n.div_ceil(GROUP);
        match self {
            DType::F32 => n.saturating_mul(4),
            DType::F16 | DType::BF16 => n.saturating_mul(2),
            DType::Q8 | DType::Q8c => groups.saturating_mul(GROUP),
            DType::Q4 | DType::Q4k | DType::Q4c | DType::Mxfp4 => {
                groups.saturating_mul(Q4_GROUP_BYTES)
            }
            DType::Block(block) => block.row_bytes(n),
        }
    }

    /// Bytes of the scales of a row of `n`; zero for the float formats and blocks.
    #[inline(always)]
    pub const fn scales_bytes(self, n: usize) -> usize {
        match self {
            DType::Q8 | DType::Q4 => n.div_ceil(GROUP).saturating_mul(SCALE_BYTES),
            DType::Q4k => super_bytes(n.div_ceil(GROUP)),
            DType::Mxfp4 => n.div_ceil(GROUP),
            DType::Q8c => CHANNEL_SCALE,
            DType::Q4c => 2 * CHANNEL_SCALE + OUTLIER_BYTES * outliers(n),
            DType::F32 | DType::F16 | DType::BF16 | DType::Block(_) => 0,
        }
    }

    /// Panics where the parts of a row of `n` elements have not these lengths in bytes.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn assert_lens(self, n: usize, quants: usize, scales: usize) {
        let (q, s) = (self.quants_bytes(n), self.scales_bytes(n));
        assert!(
            quants == q && scales == s,
            "a {self} row of {n} elements takes {q} + {s} bytes, got {quants} + {scales}"
        );
    }

    /// Bytes of a whole row of `n`: [`quants_bytes`](DType::quants_bytes) plus
    /// [`scales_bytes`](DType::scales_bytes), saturating.
    #[inline(always)]
    pub const fn row_bytes(self, n: usize) -> usize {
        self.quants_bytes(n).saturating_add(self.scales_bytes(n))
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_round_trip() {
        for dtype in DType::all() {
            assert_eq!(DType::parse(dtype.name()), Some(dtype));
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
        }
        assert_eq!(DType::parse("Q4"), None);
        assert_eq!(DType::from_code(9), None);
    }

    #[test]
    fn absurd_lengths_saturate() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            assert_eq!(dtype.row_bytes(usize::MAX), usize::MAX);
        }
        assert_eq!(DType::Q8.row_bytes(usize::MAX), usize::MAX);
        assert!(DType::Q4.row_bytes(usize::MAX) > usize::MAX / 2);
    }
}
