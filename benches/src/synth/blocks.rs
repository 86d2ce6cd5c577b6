//! Rows as bytes. Random weights are drawn as integers of the format, so nothing is quantised.
//!
//! Every block contains the format's largest magnitude, at the column where `row + column` is a
//! multiple of 32. Quantising again, along rows or (for Down, which is stored transposed) along
//! columns, then finds the same scale and changes no weight.

use emberflow_models::Encoding;

use super::random::word;
use super::stream::{BLOCK, Fill, RowPlan, Segment};

use half::f16;

/// √E[q²] of a block's nibbles: 31 uniform in −8…7 and one −8.
const Q4_DEVIATION: f32 = 4.778_072;
/// √E[q²] of a block's bytes: 31 uniform in −127…127 (−127 twice) and one −127.
const Q8_DEVIATION: f32 = 75.553_69;

/// √E[v²] of uniform four-bit floats.
const MXFP4_DEVIATION: f32 = 2.926_175;

/// Encodes `row` into `out`, which has the row's length in this encoding.
pub fn encode(encoding: Encoding, row: &RowPlan, out: &mut [u8]) {
    let mut rest = out;
    for segment in row {
        let len = segment.blocks * block_bytes(encoding);
        let Some((here, after)) = std::mem::take(&mut rest).split_at_mut_checked(len) else {
            return;
        };
        match encoding {
            Encoding::Q4_0 => q4_0(segment, here),
            Encoding::Q8_0 => q8_0(segment, here),
            Encoding::Mxfp4 => mxfp4(segment, here),
            Encoding::F16 => floats(segment, here, |v| f16::from_f32(v).to_le_bytes()),
            Encoding::F32 => floats(segment, here, f32::to_le_bytes),
        }
        rest = after;
    }
}

/// Writes the values of `row` as f32 to `out`, which has the row's length.
pub fn values(row: &RowPlan, out: &mut [f32]) {
    let mut rest = out;
    for segment in row {
        let len = segment.blocks * BLOCK;
        let Some((here, after)) = std::mem::take(&mut rest).split_at_mut_checked(len) else {
            return;
        };
        let mut bytes = [0; BLOCK * 4];
        for (index, out) in here.chunks_exact_mut(BLOCK).enumerate() {
            floats_block(&segment.fill, index, &mut bytes, f32::to_le_bytes);
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        rest = after;
    }
}

fn block_bytes(encoding: Encoding) -> usize {
    encoding.row_bytes(BLOCK).unwrap_or_default()
}

/// Column of the largest magnitude in every block of a row.
fn peak(row: usize) -> usize {
    (BLOCK - row % BLOCK) % BLOCK
}

fn q4_0(segment: &Segment, out: &mut [u8]) {
    let (blocks, _) = out.as_chunks_mut::<18>();
    match segment.fill {
        Fill::Constant(value) => {
            // All nibbles are 0, which means −8.
            let scale = f16::from_f32(value / -8.0).to_le_bytes();
            for block in blocks {
                *block = [0; 18];
                block[..2].copy_from_slice(&scale);
            }
        }
        Fill::Random {
            deviation,
            key,
            tile,
            row,
        } => {
            // −8…7 plus the peak have a negative mean, which would accumulate over layers. A random
            // sign for each tile of 32 × 32 weights removes it and keeps one scale per tile in both
            // directions.
            let scale = deviation / Q4_DEVIATION;
            let scales = [scale, -scale].map(|s| f16::from_f32(s).to_le_bytes());
            let (byte, keep) = match peak(row) {
                low @ 0..16 => (low, 0xf0),
                high => (high - 16, 0x0f),
            };
            for (index, block) in blocks.iter_mut().enumerate() {
                let at = 2 * index as u64;
                let signs = word(tile, index as u64 / 64);
                block[..2].copy_from_slice(&scales[(signs >> (index % 64)) as usize & 1]);
                block[2..10].copy_from_slice(&word(key, at).to_le_bytes());
                block[10..].copy_from_slice(&word(key, at + 1).to_le_bytes());
                block[2 + byte] &= keep;
            }
        }
    }
}

fn q8_0(segment: &Segment, out: &mut [u8]) {
    let (blocks, _) = out.as_chunks_mut::<34>();
    for (index, block) in (0u64..).zip(blocks) {
        let (scale, quants) = match segment.fill {
            Fill::Constant(value) => (value / 127.0, [127; BLOCK]),
            Fill::Random {
                deviation,
                key,
                row,
                ..
            } => (deviation / Q8_DEVIATION, bytes_of(key, index, row)),
        };
        block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        for (byte, quant) in block[2..].iter_mut().zip(quants) {
            *byte = quant.cast_unsigned();
        }
    }
}

/// Scales are powers of two. So some blocks have the next larger scale and the others the next
/// smaller one; the same holds for the weights of a constant.
fn mxfp4(segment: &Segment, out: &mut [u8]) {
    let (blocks, _) = out.as_chunks_mut::<17>();
    match segment.fill {
        Fill::Constant(value) => {
            // 2 and 3, or 3 and 4, times a power of two
            let below = exponent(value.abs() / 2.0);
            let times = value.abs() / power(below);
            let (low, floor) = if times < 3.0 { (4, 2.0) } else { (5, 3.0) };
            let higher = (times - floor) * BLOCK as f32;
            let sign = u8::from(value < 0.0) << 3;
            for block in blocks {
                block[0] = below;
                for (i, byte) in block[1..].iter_mut().enumerate() {
                    let nibble = |at: usize| match (at as f32 + 0.5) < higher {
                        _ if value == 0.0 => 0,
                        higher => sign | (low + u8::from(higher)),
                    };
                    *byte = nibble(i) | nibble(i + 16) << 4;
                }
            }
        }
        Fill::Random { deviation, key, .. } => {
            let wanted = deviation / MXFP4_DEVIATION;
            let below = exponent(wanted);
            // Share of blocks with the larger scale: variances add up.
            let above = ((wanted / power(below)).powi(2) - 1.0) / 3.0;
            for (index, block) in (0u64..).zip(blocks) {
                let drawn = (word(key, 3 * index) >> 40) as f32 / (1u32 << 24) as f32;
                block[0] = below + u8::from(drawn < above);
                block[1..9].copy_from_slice(&word(key, 3 * index + 1).to_le_bytes());
                block[9..].copy_from_slice(&word(key, 3 * index + 2).to_le_bytes());
            }
        }
    }
}

/// Stored exponent of the largest power of two up to `value`.
fn exponent(value: f32) -> u8 {
    ((value.to_bits() >> 23) as u8).clamp(1, 253)
}

/// The power of two of a stored exponent.
fn power(exponent: u8) -> f32 {
    f32::from_bits(u32::from(exponent) << 23)
}

/// Block `index` of a row of signed bytes.
fn bytes_of(key: u64, index: u64, row: usize) -> [i8; BLOCK] {
    let mut quants = [0i8; BLOCK];
    for (i, part) in (0u64..).zip(quants.as_chunks_mut::<8>().0) {
        *part = word(key, 4 * index + i)
            .to_le_bytes()
            .map(|byte| byte.cast_signed().max(-127));
    }
    let peak = &mut quants[peak(row)];
    *peak = if *peak < 0 { -127 } else { 127 };
    quants
}

fn floats<const N: usize>(segment: &Segment, out: &mut [u8], encode: impl Fn(f32) -> [u8; N]) {
    for (index, block) in out.chunks_exact_mut(N * BLOCK).enumerate() {
        floats_block(&segment.fill, index, block, &encode);
    }
}

fn floats_block<const N: usize>(
    fill: &Fill,
    index: usize,
    out: &mut [u8],
    encode: impl Fn(f32) -> [u8; N],
) {
    let (elements, _) = out.as_chunks_mut::<N>();
    match *fill {
        Fill::Constant(value) => elements.fill(encode(value)),
        Fill::Random {
            deviation,
            key,
            row,
            ..
        } => {
            let scale = deviation / Q8_DEVIATION;
            for (out, quant) in elements.iter_mut().zip(bytes_of(key, index as u64, row)) {
                *out = encode(scale * f32::from(quant));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use emberflow_kernels::{Cpu, DType, Row as Bytes, quantize_row};

    fn row(fill: Fill) -> RowPlan {
        let empty = Segment {
            blocks: 0,
            fill: Fill::Constant(0.0),
        };
        [Segment { blocks: 8, fill }, empty, empty]
    }

    /// Bytes of a GGUF row in the kernels' order: quants, then scales.
    fn split(bytes: &[u8], block: usize) -> (Vec<u8>, Vec<u8>) {
        let blocks = bytes.chunks_exact(block);
        (
            blocks.clone().flat_map(|b| b[2..].to_vec()).collect(),
            blocks.flat_map(|b| b[..2].to_vec()).collect(),
        )
    }

    fn random(seed: u64, row: usize) -> Fill {
        Fill::Random {
            deviation: 0.02,
            key: seed,
            tile: 7,
            row,
        }
    }

    /// Root mean square over many rows, decoded here.
    fn deviation(encoding: Encoding) -> f64 {
        let (mut sum, mut count) = (0.0, 0.0);
        for seed in 0..500 {
            let mut bytes = vec![0; encoding.row_bytes(256).unwrap()];
            encode(encoding, &row(random(seed, seed as usize)), &mut bytes);
            for v in decoded(encoding, &bytes) {
                sum += f64::from(v).powi(2);
                count += 1.0;
            }
        }
        (sum / count).sqrt()
    }

    fn decoded(encoding: Encoding, bytes: &[u8]) -> Vec<f32> {
        let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
        match encoding {
            Encoding::Q4_0 => bytes
                .chunks_exact(18)
                .flat_map(|b| {
                    let weight = move |q: u8| half(b) * (f32::from(q) - 8.0);
                    let low = b[2..].iter().map(move |q| weight(q & 15));
                    low.chain(b[2..].iter().map(move |q| weight(q >> 4)))
                })
                .collect(),
            Encoding::Q8_0 => bytes
                .chunks_exact(34)
                .flat_map(|b| b[2..].iter().map(move |q| half(b) * f32::from(*q as i8)))
                .collect(),
            Encoding::Mxfp4 => bytes
                .chunks_exact(17)
                .flat_map(|b| {
                    let value = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
                    let weight = move |q: u8| {
                        let sign = if q & 8 == 0 { 1.0 } else { -1.0 };
                        sign * power(b[0]) * value[usize::from(q & 7)]
                    };
                    let low = b[1..].iter().map(move |q| weight(q & 15));
                    low.chain(b[1..].iter().map(move |q| weight(q >> 4)))
                })
                .collect(),
            Encoding::F16 => bytes.chunks_exact(2).map(half).collect(),
            Encoding::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        }
    }

    const ALL: [Encoding; 4] = [Encoding::Q4_0, Encoding::Q8_0, Encoding::F16, Encoding::F32];

    #[test]
    fn powers_of_two_give_the_deviation_and_the_constant_in_the_mean() {
        for deviation in [0.02, 0.03, 1.7] {
            let (mut sum, mut count) = (0.0, 0.0);
            for seed in 0..2000 {
                let fill = Fill::Random {
                    deviation,
                    key: seed,
                    tile: 7,
                    row: 0,
                };
                let mut bytes = vec![0; Encoding::Mxfp4.row_bytes(256).unwrap()];
                encode(Encoding::Mxfp4, &row(fill), &mut bytes);
                for v in decoded(Encoding::Mxfp4, &bytes) {
                    sum += f64::from(v).powi(2);
                    count += 1.0;
                }
            }
            let found = (sum / count).sqrt() / f64::from(deviation);
            assert!((found - 1.0).abs() < 0.01, "{deviation}: {found}");
        }
        for value in [0.0, -0.3, 0.02, 5.9] {
            let mut bytes = vec![0; Encoding::Mxfp4.row_bytes(256).unwrap()];
            encode(Encoding::Mxfp4, &row(Fill::Constant(value)), &mut bytes);
            let mean = decoded(Encoding::Mxfp4, &bytes).iter().sum::<f32>() / 256.0;
            assert!(
                (mean - value).abs() <= value.abs() / 64.0,
                "{value}: {mean}"
            );
        }
    }

    #[test]
    fn every_encoding_has_the_deviation_and_the_constant() {
        for encoding in ALL {
            let found = deviation(encoding);
            assert!((found - 0.02).abs() < 2e-4, "{encoding:?} {found}");
            let mut bytes = vec![0; encoding.row_bytes(256).unwrap()];
            encode(encoding, &row(Fill::Constant(-0.3)), &mut bytes);
            for v in decoded(encoding, &bytes) {
                assert!((v + 0.3).abs() < 2e-4, "{encoding:?} {v}");
            }
        }
    }

    #[test]
    fn f32_bytes_and_values_agree() {
        let row = row(random(3, 5));
        let mut bytes = vec![0; 1024];
        encode(Encoding::F32, &row, &mut bytes);
        let mut out = vec![0.0; 256];
        values(&row, &mut out);
        assert_eq!(decoded(Encoding::F32, &bytes), out);
    }

    #[test]
    fn packing_the_same_blocks_changes_no_weight() {
        for (encoding, dtype, block) in [
            (Encoding::Q4_0, DType::Q4, 18),
            (Encoding::Q8_0, DType::Q8, 34),
        ] {
            for seed in 0..200 {
                let fill = match seed {
                    0 => Fill::Constant(0.7),
                    1 => Fill::Constant(0.0),
                    _ => random(seed, seed as usize),
                };
                let mut bytes = vec![0; encoding.row_bytes(256).unwrap()];
                encode(encoding, &row(fill), &mut bytes);
                let before = decoded(encoding, &bytes);
                let (mut quants, mut scales) = split(&bytes, block);
                quantize_row(dtype, &before, &mut quants, &mut scales).unwrap();
                let packed = [quants, scales].concat();
                let mut after = vec![0.0; 256];
                Cpu::detect().dequantize(Bytes::inline(dtype, 256, &packed), &mut after);
                assert_eq!(before, after, "{encoding:?} {seed}");
            }
        }
    }

    #[test]
    fn packing_columns_changes_no_weight_either() {
        for (encoding, dtype) in [(Encoding::Q4_0, DType::Q4), (Encoding::Q8_0, DType::Q8)] {
            // 32 rows of 256: each column is one block of the transposed matrix.
            let rows: Vec<Vec<f32>> = (64..96)
                .map(|r| {
                    let mut bytes = vec![0; encoding.row_bytes(256).unwrap()];
                    encode(encoding, &row(random(r as u64, r)), &mut bytes);
                    decoded(encoding, &bytes)
                })
                .collect();
            for column in 0..256 {
                let before: Vec<f32> = rows.iter().map(|r| r[column]).collect();
                let mut packed = vec![0; dtype.row_bytes(BLOCK)];
                let (quants, scales) = packed.split_at_mut(dtype.quants_bytes(BLOCK));
                quantize_row(dtype, &before, quants, scales).unwrap();
                let mut after = [0.0; BLOCK];
                Cpu::detect().dequantize(Bytes::inline(dtype, BLOCK, &packed), &mut after);
                assert_eq!(before, after, "{encoding:?} {column}");
            }
        }
    }
}
