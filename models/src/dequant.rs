//! Decoders of formats for which there are no products.

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

/// A four-bit float (e2m1) in the low bits.
pub(crate) fn e2m1(nibble: u8) -> f32 {
    let value = 0.5 * f32::from(E2M1[usize::from(nibble & 15)]);
    if nibble & 15 == 8 { -value } else { value }
}

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
