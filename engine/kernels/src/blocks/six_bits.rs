//! Scales and minimums in six bits each, of Q4_K and Q5_K: eight of both in twelve bytes.
//!
//! ```text
//! bytes 0..4     scale g in the low six bits of byte g, g < 4
//! bytes 4..8     minimum g in the low six bits of byte 4 + g
//! bytes 8..12    the low four bits of scale and minimum 4 + g in the nibbles of byte 8 + g;
//!                their upper two are the upper two of bytes g and 4 + g
//! ```

/// Two words of four bytes, one after the other.
#[inline(always)]
pub(super) const fn both(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

/// Scales and minimums of eight groups.
#[inline(always)]
pub(super) fn six_bits(packed: &[u8; 12]) -> [[i8; 8]; 2] {
    const SIX: u32 = 0x3f3f_3f3f;
    const FOUR: u32 = 0x0f0f_0f0f;
    const TWO: u32 = 0x0303_0303;
    let word = |i: usize| {
        let at = 4 * i;
        u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]])
    };
    let (a, b, c) = (word(0), word(1), word(2));
    let scales = both(a & SIX, c & FOUR | (a >> 6 & TWO) << 4);
    let mins = both(b & SIX, c >> 4 & FOUR | (b >> 6 & TWO) << 4);
    [scales, mins].map(|eight| eight.to_le_bytes().map(u8::cast_signed))
}
