//! Rows in two or three bits: not model weights, but copies of them that are good enough to predict
//! which products are large.
//!
//! ```text
//! ROW OF n ELEMENTS: ceil(n / 64) groups, quants of all groups, then their scales
//!   quants   of each group 16 bytes; byte j holds two bits of the elements j, j + 32, j + 16,
//!            j + 48 of the group, from its lowest two bits up
//!            of three bits 8 bytes more; byte j holds the third bit of the elements j, j + 8,
//!            j + 32, j + 40, j + 16, j + 24, j + 48, j + 56, from its lowest bit up
//!   scales   one f16 per group
//!
//! value      (2 × quant − 3) × scale of two bits, (2 × quant − 7) × scale of three
//! ```
//!
//! The order is that of two adjacent q4 groups, so masks, shifts and an addition turn a row into
//! a q4 row for the q4 kernels.

use crate::dtype::{DType, GROUP};

/// Elements per scale.
pub const NARROW_GROUP: usize = 2 * GROUP;

/// Bytes of the lowest two bits of a group.
const LOW: usize = NARROW_GROUP / 4;

/// Bytes of the third bits of a group.
const HIGH: usize = NARROW_GROUP / 8;

/// Bits of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Narrow {
    /// −3, −1, 1 and 3 times the scale.
    Two,
    /// The odd multiples of the scale from −7 to 7.
    Three,
}

impl Narrow {
    /// Bytes of the quants of a group.
    const fn quants(self) -> usize {
        match self {
            Self::Two => LOW,
            Self::Three => LOW + HIGH,
        }
    }

    /// The largest quant.
    pub const fn most(self) -> u8 {
        match self {
            Self::Two => 3,
            Self::Three => 7,
        }
    }

    /// Bytes of a row of `n` elements; saturates.
    pub const fn row_bytes(self, n: usize) -> usize {
        n.div_ceil(NARROW_GROUP).saturating_mul(self.quants() + 2)
    }

    /// Stores a row: a quant of 0 to [`Narrow::most`] per element and the bits of an f16 scale per
    /// group.
    ///
    /// # Panics
    /// If a length is wrong: `out` needs [`Narrow::row_bytes`], `scales` one entry per group.
    pub fn store(self, quants: &[u8], scales: &[u16], out: &mut [u8]) {
        let groups = quants.len().div_ceil(NARROW_GROUP);
        assert!(
            out.len() == self.row_bytes(quants.len()) && scales.len() == groups,
            "{} bytes and {} scales for {} elements",
            out.len(),
            scales.len(),
            quants.len()
        );
        out.fill(0);
        let (all, out_scales) = out.split_at_mut(groups * self.quants());
        for (group, quants) in all
            .chunks_exact_mut(self.quants())
            .zip(quants.chunks(NARROW_GROUP))
        {
            let quant = |element: usize| quants.get(element).copied().unwrap_or(0);
            let (low, high) = group.split_at_mut(LOW);
            for (byte, out) in low.iter_mut().enumerate() {
                let bits = |place: usize| quant(byte + LOW * place) & 3;
                *out = bits(0) | bits(1) << 4 | bits(2) << 2 | bits(3) << 6;
            }
            for (byte, out) in high.iter_mut().enumerate() {
                let bit = |place: usize| quant(byte + HIGH * place) >> 2 & 1;
                let low = bit(0) | bit(1) << 1 | bit(4) << 2 | bit(5) << 3;
                *out = low | (bit(2) | bit(3) << 1 | bit(6) << 2 | bit(7) << 3) << 4;
            }
        }
        for (bytes, scale) in out_scales.chunks_exact_mut(2).zip(scales) {
            bytes.copy_from_slice(&scale.to_le_bytes());
        }
    }
}

/// Widens rows of `n` elements, consecutive in `bytes`, to q4 rows in `out`.
#[inline(always)]
pub(crate) fn widen(narrow: Narrow, bytes: &[u8], n: usize, out: &mut [u8]) {
    let quants = n.div_ceil(NARROW_GROUP) * narrow.quants();
    let wide = DType::Q4.quants_bytes(n);
    for (row, out) in bytes
        .chunks_exact(narrow.row_bytes(n))
        .zip(out.chunks_exact_mut(DType::Q4.row_bytes(n)))
    {
        let (quants, scales) = row.split_at(quants);
        let (out, out_scales) = out.split_at_mut(wide);
        let groups = quants.chunks_exact(narrow.quants());
        let groups = groups.zip(out.chunks_mut(2 * LOW));
        match narrow {
            Narrow::Two => groups.for_each(|(group, out)| widen_two(group, out)),
            Narrow::Three => groups.for_each(|(group, out)| widen_three(group, out)),
        }
        for (scale, out) in scales.chunks_exact(2).zip(out_scales.chunks_mut(4)) {
            for out in out.chunks_exact_mut(2) {
                out.copy_from_slice(scale);
            }
        }
    }
}

/// A group of two bits as one or two groups of q4.
#[inline(always)]
fn widen_two(group: &[u8], out: &mut [u8]) {
    let (first, second) = out.split_at_mut(LOW);
    for (&q, out) in group.iter().zip(first) {
        *out = ((q & 0x33) << 1) + 0x55;
    }
    for (&q, out) in group.iter().zip(second) {
        *out = (((q >> 2) & 0x33) << 1) + 0x55;
    }
}

/// A group of three bits as one or two groups of q4. No bit crosses the bytes of a word.
#[inline(always)]
fn widen_three(group: &[u8], out: &mut [u8]) {
    const EACH: u64 = 0x0101_0101_0101_0101;
    let (words, _) = group.as_chunks::<HIGH>();
    let &[first, second, high] = words else {
        return;
    };
    let [first, second, high] = [first, second, high].map(u64::from_le_bytes);
    for ((part, low), out) in (0..4)
        .zip([first, second, first, second])
        .zip(out.chunks_exact_mut(HIGH))
    {
        let two = low >> (part / 2 * 2) & (0x33 * EACH);
        let third = high >> part & (0x11 * EACH);
        let word = ((two | third << 2) << 1) + 0x11 * EACH;
        out.copy_from_slice(&word.to_le_bytes());
    }
}
