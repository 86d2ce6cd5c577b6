//! Rows in two bits: not model weights, but copies of them that are good enough to predict the sign
//! of a product.
//!
//! ```text
//! ROW OF n ELEMENTS: ceil(n / 64) groups, quants of all groups, then their scales
//!   quants   16 bytes per group; byte j holds the elements j, j + 32, j + 16, j + 48 of
//!            the group, from its lowest two bits up
//!   scales   one f16 per group
//!
//! value      (2 × quant − 3) × scale
//! ```
//!
//! The order is that of two adjacent q4 groups, so a mask, a shift and an addition turn a row into
//! a q4 row for the q4 kernels.

use crate::dtype::{DType, GROUP};

/// Elements per scale.
pub const TWO_BIT_GROUP: usize = 2 * GROUP;

/// Bytes of the quants of a group.
const QUANTS: usize = TWO_BIT_GROUP / 4;

/// Bytes of a two-bit row of `n` elements; saturates.
pub const fn two_bit_row_bytes(n: usize) -> usize {
    n.div_ceil(TWO_BIT_GROUP).saturating_mul(QUANTS + 2)
}

/// Byte of the quants that holds element `i`, and its lowest bit.
const fn place(i: usize) -> (usize, usize) {
    let e = i % TWO_BIT_GROUP;
    let bit = match e / 16 {
        0 => 0,
        1 => 4,
        2 => 2,
        _ => 6,
    };
    (i / TWO_BIT_GROUP * QUANTS + e % 16, bit)
}

/// Stores a row: a quant of 0 to 3 per element and the bits of an f16 scale per group.
///
/// # Panics
/// If a length is wrong: `out` needs [`two_bit_row_bytes`], `scales` one entry per group.
pub fn store_two_bit_row(quants: &[u8], scales: &[u16], out: &mut [u8]) {
    let groups = quants.len().div_ceil(TWO_BIT_GROUP);
    assert!(
        out.len() == two_bit_row_bytes(quants.len()) && scales.len() == groups,
        "{} bytes and {} scales for {} elements",
        out.len(),
        scales.len(),
        quants.len()
    );
    out.fill(0);
    for (i, &quant) in quants.iter().enumerate() {
        let (byte, bit) = place(i);
        out[byte] |= (quant & 3) << bit;
    }
    for (bytes, scale) in out[groups * QUANTS..].chunks_exact_mut(2).zip(scales) {
        bytes.copy_from_slice(&scale.to_le_bytes());
    }
}

/// Widens rows of `n` elements, consecutive in `bytes`, to q4 rows in `out`.
#[inline(always)]
pub(crate) fn widen_two_bit(bytes: &[u8], n: usize, out: &mut [u8]) {
    let groups = n.div_ceil(TWO_BIT_GROUP);
    let wide = DType::Q4.quants_bytes(n);
    for (row, out) in bytes
        .chunks_exact(two_bit_row_bytes(n))
        .zip(out.chunks_exact_mut(DType::Q4.row_bytes(n)))
    {
        let (quants, scales) = row.split_at(groups * QUANTS);
        let (out, out_scales) = out.split_at_mut(wide);
        for (q, out) in quants.chunks_exact(QUANTS).zip(out.chunks_mut(2 * QUANTS)) {
            let (first, second) = out.split_at_mut(QUANTS);
            for (&q, out) in q.iter().zip(first) {
                *out = ((q & 0x33) << 1) + 0x55;
            }
            for (&q, out) in q.iter().zip(second) {
                *out = (((q >> 2) & 0x33) << 1) + 0x55;
            }
        }
        for (scale, out) in scales.chunks_exact(2).zip(out_scales.chunks_mut(4)) {
            for out in out.chunks_exact_mut(2) {
                out.copy_from_slice(scale);
            }
        }
    }
}
