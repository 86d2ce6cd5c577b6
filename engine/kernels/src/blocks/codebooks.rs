//! The codebooks of the IQ formats: what the indices in their blocks stand for.
//!
//! An entry is eight or four small numbers. The tables are part of the formats, as llama.cpp defines them;
//! `codebooks.bin` has them as u16 codes, little-endian, one table after the other: two bits for each of
//! eight numbers, or three bits for each of four, the first number in the lowest bits.

/// Codes of all tables.
static CODES: &[u8; 2 * (256 + 512 + 1024 + 256 + 512 + 2048)] = include_bytes!("codebooks.bin");

/// The table from code `first` on: `values` are what codes of `bits` bits stand for.
const fn table<const N: usize>(first: usize, bits: u32, values: &[u8]) -> [u64; N] {
    let numbers = if bits == 2 { 8 } else { 4 };
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
    // Volatile, so that several are not read by one gather, for which indices go through vectors and back: IQ3_S
    // decodes 1.5 times as fast on Zen 5.
    // SAFETY: a reference is valid for reads.
    unsafe { std::ptr::read_volatile(&raw const table[index]) }
}

/// For seven signs, eight bytes: 255 where a weight is negative. The eighth makes the number of these even.
pub(super) static EVEN_SIGNS: [u64; 128] = {
    let mut masks = [0; 128];
    let mut seven = 0;
    while seven < masks.len() {
        let signs = seven | (seven.count_ones() as usize % 2) << 7;
        let mut j = 0;
        while j < 8 {
            masks[seven] |= ((signs as u64 >> j & 1) * 255) << (8 * j);
            j += 1;
        }
        seven += 1;
    }
    masks
};

/// Whether weight `i` of eight is negative, by their seven signs: the reference of [`EVEN_SIGNS`].
pub(super) fn is_negative(seven: u32, i: usize) -> bool {
    match i {
        7 => seven.count_ones() % 2 == 1,
        i => seven >> i & 1 == 1,
    }
}

/// Two entries of four weights each, one after the other.
#[inline(always)]
pub(super) const fn joined(low: u64, high: u64) -> u64 {
    low | high << 32
}

/// Scales in four bits for each half of the groups of a block, as odd steps: `2 × nibble + 1`.
#[inline(always)]
pub(super) fn odd_steps(nibbles: [u8; 8]) -> [i8; 16] {
    let mut steps = [0; 16];
    for (steps, nibbles) in steps.as_chunks_mut::<2>().0.iter_mut().zip(nibbles) {
        *steps = [
            (2 * (nibbles & 15) + 1) as i8,
            (2 * (nibbles >> 4) + 1) as i8,
        ];
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_are_even_in_number() {
        for (seven, mask) in EVEN_SIGNS.into_iter().enumerate() {
            let bytes = mask.to_le_bytes();
            assert!(bytes.iter().all(|byte| matches!(byte, 0 | 255)));
            assert_eq!(mask.count_ones() % 16, 0);
            let bits = (0..7).fold(0, |bits, j| bits | usize::from(bytes[j] & 1) << j);
            assert_eq!(bits, seven);
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
        assert!(IQ3_XXS.iter().chain(&IQ3_S).all(|four| four >> 32 == 0));
        // Each table ascends.
        for table in [0, 256, 768, 1792, 2048, 2560, 4608].windows(2) {
            assert!(pairs[table[0]..table[1]].is_sorted_by(|a, b| a < b));
        }
    }
}
