//! Signs as bits, and counts of differing signs: the arithmetic of a predictor without training
//! (SparseInfer, arXiv 2411.12692).
//!
//! ```text
//! SIGNS OF n ELEMENTS: ceil(n / 64) × 8 bytes, any alignment
//!
//! bit i % 8 of byte i / 8   1 if element i is below zero; bits past n are 0
//! ```
//!
//! If the signs of a weight and an activation differ, their product is negative, so the number of
//! differing bits indicates how likely the sum of the products is negative.
//!
//! Integers only, written once in safe code and vectorised for each instruction set.

/// Elements per word of signs.
const WORD: usize = 64;

/// Bytes of the signs of `n` elements.
pub const fn sign_bytes(n: usize) -> usize {
    n.div_ceil(WORD).saturating_mul(WORD / 8)
}

#[inline(always)]
pub(crate) fn sign_bits(x: &[f32], bits: &mut [u8]) {
    for (word, x) in bits.chunks_exact_mut(WORD / 8).zip(x.chunks(WORD)) {
        let mut signs = 0u64;
        for (i, &value) in x.iter().enumerate() {
            signs |= u64::from(value < 0.0) << i;
        }
        word.copy_from_slice(&signs.to_le_bytes());
    }
}

#[inline(always)]
pub(crate) fn sign_differences(bytes: &[u8], stride: usize, x: &[u8], y: &mut [u32]) {
    for (r, y) in y.iter_mut().enumerate() {
        let row = &bytes[r * stride..r * stride + x.len()];
        let words = row.chunks_exact(WORD / 8).zip(x.chunks_exact(WORD / 8));
        *y = words.map(|(a, b)| (word(a) ^ word(b)).count_ones()).sum();
    }
}

#[inline(always)]
fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; WORD / 8];
    word.copy_from_slice(bytes);
    u64::from_le_bytes(word)
}
