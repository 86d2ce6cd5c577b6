//! Decoders of formats for which there are no products.

use half::f16;

/// 16 scales and minima of 4 bits, bit pairs, two super-scales.
pub(crate) const Q2_K_BYTES: usize = 16 + 64 + 2 + 2;

/// Decodes consecutive blocks of `B` bytes into `N` weights each.
pub(crate) fn blocks<const B: usize, const N: usize>(
    raw: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; B], &mut [f32; N]),
) {
    let (packed, _) = raw.as_chunks::<B>();
    let (weights, _) = out.as_chunks_mut::<N>();
    for (block, out) in packed.iter().zip(weights) {
        decode(block, out);
    }
}

/// The f16 at byte `at`.
fn half_at<const B: usize>(block: &[u8; B], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// An eight-bit float of 4 exponent and 3 fraction bits, exact. There is no infinity; two codes are NaN.
pub(crate) fn e4m3(byte: u8) -> f32 {
    let (exponent, fraction) = (byte >> 3 & 15, f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2f32.powi(-9),
        _ => (8.0 + fraction) * 2f32.powi(i32::from(exponent) - 10),
    };
    match byte & 0x80 {
        0 => magnitude,
        _ => -magnitude,
    }
}

/// The values of four-bit floats (e2m1), doubled.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// A four-bit float times 2^(exponent − 127), exact. The exponent 255 stands for NaN.
fn four_bits(nibble: u8, exponent: u8) -> f32 {
    // half of the power, as the values are doubled
    let half = match exponent {
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(exponent - 1) << 23),
    };
    let value = half * f32::from(E2M1[usize::from(nibble & 15)]);
    match nibble {
        8 => -value,
        _ => value,
    }
}

/// `2^(code − 127)`, the scale of a block.
pub(crate) fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        code => f32::from_bits(u32::from(code) << 23),
    }
}

/// Blocks as in safetensors: byte j of 16 holds weights 2j (low nibble) and 2j + 1; exponents are
/// stored separately.
pub(crate) fn mxfp4_pairs(raw: &[u8], exponents: &[u8], out: &mut [f32]) {
    let blocks = raw.chunks_exact(16).zip(exponents);
    for ((block, &exponent), out) in blocks.zip(out.chunks_exact_mut(32)) {
        for (&byte, out) in block.iter().zip(out.chunks_exact_mut(2)) {
            out[0] = four_bits(byte & 15, exponent);
            out[1] = four_bits(byte >> 4, exponent);
        }
    }
}

/// `d·scale·q − dmin·min`, groups of 16. Each half of 128 weights has 32 bytes of bit pairs: run r of 32
/// takes pair r of each.
pub(crate) fn q2_k(block: &[u8; Q2_K_BYTES], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, r) = (run / 4, run % 4);
        let pairs = &block[16 + half * 32..][..32];
        for (j, value) in out.iter_mut().enumerate() {
            let group = block[run * 2 + j / 16];
            let (scale, min) = (d * f32::from(group & 15), dmin * f32::from(group >> 4));
            *value = scale * f32::from(pairs[j] >> (2 * r) & 3) - min;
        }
    }
}
