//! Lossless conversion between ggml's Q4_K and q4k rows: the same numbers in another layout.
//!
//! A Q4_K block of 144 bytes holds 256 weights: d and dmin in f16, 12 bytes of 6-bit scales and minimums, then 128
//! bytes of nibbles, where each run of 32 bytes holds two groups, low nibbles first.

use emberflow_kernels::{
    DType, GROUP, Row, SUPER_GROUPS, SuperBlock, nibble, store_q4k_row, super_blocks,
};
use emberflow_models::Checkpoint;
use emberflow_models::names::TensorId;

use crate::Failure;

/// Weights per block.
const WEIGHTS: usize = DType::Q4k.span();
/// Bytes per block.
const BYTES: usize = 144;
const _: () = assert!(WEIGHTS == GROUP * SUPER_GROUPS);

/// Reads a row of the checkpoint as the q4k row `out`, losslessly. Returns false if the checkpoint does not store it
/// in Q4_K, or if a scale is not finite; `out` is then unspecified.
///
/// # Errors
/// The checkpoint cannot be read.
pub fn read(
    source: &dyn Checkpoint,
    id: TensorId,
    row: usize,
    cols: usize,
    out: &mut [u8],
) -> Result<bool, Failure> {
    let mut bytes = Vec::new();
    let whole = cols.is_multiple_of(WEIGHTS) && out.len() == DType::Q4k.row_bytes(cols);
    if !whole || !source.read_q4_k(id, row, &mut bytes)? || bytes.len() != cols / WEIGHTS * BYTES {
        return Ok(false);
    }
    let (stored, _) = bytes.as_chunks::<BYTES>();
    let mut nibbles = vec![0; cols];
    let blocks: Vec<SuperBlock> = (stored.iter().zip(nibbles.chunks_exact_mut(WEIGHTS)))
        .map(|(block, nibbles)| decode(block, nibbles))
        .collect();
    store_q4k_row(&nibbles, &blocks, out);
    let finite = |bits: u16| bits & 0x7c00 != 0x7c00;
    Ok(blocks.iter().all(|b| finite(b.d) && finite(b.dmin)))
}

/// Appends a q4k row of whole super-blocks as Q4_K blocks, losslessly.
pub fn write(row: Row<'_>, out: &mut Vec<u8>) {
    let blocks = super_blocks(row.scales(), row.len() / GROUP);
    for (numbers, quants) in blocks.zip(row.quants().chunks_exact(WEIGHTS / 2)) {
        out.extend(encode(&numbers, quants));
    }
}

/// Encodes one block.
fn encode(numbers: &SuperBlock, quants: &[u8]) -> [u8; BYTES] {
    let mut block = [0; BYTES];
    block[..2].copy_from_slice(&numbers.d.to_le_bytes());
    block[2..4].copy_from_slice(&numbers.dmin.to_le_bytes());
    let (packed, to) = block[4..].split_at_mut(12);
    for g in 0..SUPER_GROUPS / 2 {
        let (scale, min) = (numbers.scales[g + 4], numbers.mins[g + 4]);
        packed[g] = numbers.scales[g] | scale >> 4 << 6;
        packed[g + 4] = numbers.mins[g] | min >> 4 << 6;
        packed[g + 8] = scale & 15 | (min & 15) << 4;
    }
    for (i, byte) in to.iter_mut().enumerate() {
        let at = i / GROUP * 2 * GROUP + i % GROUP;
        *byte = nibble(quants, at) | nibble(quants, at + GROUP) << 4;
    }
    block
}

/// Decodes one block.
fn decode(block: &[u8; BYTES], nibbles: &mut [u8]) -> SuperBlock {
    let half = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
    let (packed, quants) = (&block[4..16], &block[16..]);
    let mut numbers = SuperBlock {
        d: half(0),
        dmin: half(2),
        ..SuperBlock::default()
    };
    // Scales and minimums of the first four groups are the low six bits of bytes 0 to 7. The others have four bits in
    // bytes 8 to 11 and two in the top bits of bytes 0 to 7.
    for g in 0..SUPER_GROUPS {
        (numbers.scales[g], numbers.mins[g]) = match g {
            0..4 => (packed[g] & 63, packed[g + 4] & 63),
            _ => (
                packed[g + 4] & 15 | packed[g - 4] >> 6 << 4,
                packed[g + 4] >> 4 | packed[g] >> 6 << 4,
            ),
        };
    }
    for (g, nibbles) in nibbles.chunks_exact_mut(GROUP).enumerate() {
        let run = &quants[g / 2 * GROUP..][..GROUP];
        for (nibble, byte) in nibbles.iter_mut().zip(run) {
            *nibble = if g % 2 == 0 { byte & 15 } else { byte >> 4 };
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_keep_every_bit_in_both_directions() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..50 {
            let mut blocks = vec![0; 3 * BYTES];
            random.fill(&mut blocks);
            let mut nibbles = vec![0; 3 * WEIGHTS];
            let (stored, _) = blocks.as_chunks::<BYTES>();
            let numbers: Vec<SuperBlock> = (stored.iter().zip(nibbles.chunks_exact_mut(WEIGHTS)))
                .map(|(block, nibbles)| decode(block, nibbles))
                .collect();
            let mut row = vec![0; DType::Q4k.row_bytes(nibbles.len())];
            assert_eq!(row.len(), blocks.len());
            store_q4k_row(&nibbles, &numbers, &mut row);
            let mut again = Vec::new();
            write(Row::inline(DType::Q4k, nibbles.len(), &row), &mut again);
            assert!(again == blocks);
        }
    }
}
