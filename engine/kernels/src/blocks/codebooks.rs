//! The codebooks of the IQ formats: what the indices in their blocks stand for.
//!
//! An entry is eight or four small numbers. The tables are part of the formats, as llama.cpp defines them;
//! `codebooks.bin` has them as u16 codes, little-endian, one table after the other: two bits for each of
//! eight numbers, or three bits for each of four, the first number in the lowest bits.

/// Codes of all tables.
static CODES: &[u8; 2 * (256 + 512 + 1024 + 256 + 512 + 2048)] = include_bytes!("codebooks.bin");

/// The table from code `first` on: `values` are what codes of `bits` bits stand for.
const fn table<const N: usize>(first: usize, bits: u32, values: &[u8]) -> [u64; N] {
    let numbers = 16 / bits;
    let mut entries = [0; N];
    let mut i = 0;
    while i < N {
        let at = 2 * (first + i);
        let code = u16::from_le_bytes([CODES[at], CODES[at + 1]]);
        let mut j = 0;
        while j < numbers {
            let value = values[(code >> (j * bits)) as usize % (1 << bits)];
            entries[i] |= (value as u64) << (8 * j);
            j += 1;
        }
        i += 1;
    }
    entries
}

/// Magnitudes of weights in IQ2_XXS, IQ2_XS and IQ2_S. Code 3 is unused, as in [`EIGHTHS`].
const MAGNITUDES: [u8; 4] = [8, 25, 43, 0];

/// Eight magnitudes of IQ2_XXS.
pub(super) static IQ2_XXS: [u64; 256] = table(0, 2, &MAGNITUDES);
/// Eight magnitudes of IQ2_XS.
pub(super) static IQ2_XS: [u64; 512] = table(256, 2, &MAGNITUDES);
/// Eight magnitudes of IQ2_S.
pub(super) static IQ2_S: [u64; 1024] = table(768, 2, &MAGNITUDES);
/// Four magnitudes of IQ3_XXS.
pub(super) static IQ3_XXS: [u64; 256] = table(1792, 3, &[4, 12, 20, 28, 36, 44, 52, 62]);
/// Four magnitudes of IQ3_S.
pub(super) static IQ3_S: [u64; 512] = table(2048, 3, &[1, 3, 5, 7, 9, 11, 13, 15]);

/// −1, 0 and 1 in eighths.
const EIGHTHS: [u8; 4] = [0xf8, 0, 8, 0];

/// Eight weights of IQ1_S and IQ1_M, in eighths.
pub(super) static IQ1: [u64; 2048] = table(2560, 2, &EIGHTHS);

/// Entry `index` of a table.
#[inline(always)]
pub(super) fn entry<const N: usize>(table: &'static [u64; N], index: usize) -> u64 {
    // Volatile, so that several are not read by one gather, for which indices go through vectors and back: 3 to 4
    // times slower on Zen 5.
    // SAFETY: a reference is valid for reads.
    unsafe { std::ptr::read_volatile(&raw const table[index]) }
}

/// Sign bits of 32 weights, from four fields of seven bits each: the eighth bit of each byte makes the number
/// of its negative weights even.
#[inline(always)]
pub(super) const fn even_signs(fields: u32) -> u32 {
    let sevens = fields & 0x7f
        | (fields & 0x7f << 7) << 1
        | (fields & 0x7f << 14) << 2
        | (fields & 0x7f << 21) << 3;
    // The parity of each byte, in its lowest bit.
    let parity = sevens ^ sevens >> 4;
    let parity = parity ^ parity >> 2;
    let parity = parity ^ parity >> 1;
    sevens | (parity & 0x0101_0101) << 7
}

/// Entry `i` of a group whose entries are four weights each, joined with the next one.
#[inline(always)]
pub(super) const fn joined(low: u64, high: u64) -> u64 {
    low | high << 32
}

/// Scales in four bits for each half of a group, as odd steps: `2 × nibble + 1`.
#[inline(always)]
pub(super) fn odd_steps<const N: usize>(nibbles: impl Fn(usize) -> u8) -> [i8; N] {
    std::array::from_fn(|s| (2 * (nibbles(s / 2) >> (4 * (s % 2)) & 15) + 1).cast_signed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_are_even_in_number() {
        for field in 0u32..128 {
            let signs = even_signs(field | (127 - field) << 7 | 5 << 14 | 4 << 21).to_le_bytes();
            assert_eq!(signs[0] & 127, field as u8);
            assert_eq!(signs[1] & 127, 127 - field as u8);
            assert_eq!(signs[2..], [5, 0x84]);
            assert!(signs.iter().all(|byte| byte.count_ones() % 2 == 0));
        }
    }

    #[test]
    fn unused_codes_are_not_in_the_tables() {
        let codes = CODES.as_chunks().0.iter().map(|c| u16::from_le_bytes(*c));
        let pairs: Vec<u16> = codes.collect();
        for code in pairs[..1792].iter().chain(&pairs[2560..]) {
            assert_eq!(code & code >> 1 & 0x5555, 0);
        }
        assert!(pairs[1792..2560].iter().all(|code| code >> 12 == 0));
        // Each table ascends.
        for table in [0, 256, 768, 1792, 2048, 2560, 4608].windows(2) {
            assert!(pairs[table[0]..table[1]].is_sorted_by(|a, b| a < b));
        }
    }
}
