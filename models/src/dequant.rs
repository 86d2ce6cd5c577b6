//! Decoders of the ggml block formats, one block at a time.
//!
//! A simple block is 32 weights with one f16 scale (`d`), and an f16 offset (`m`) in the `_1`
//! formats. A K block is 256 weights with one or two f16 super-scales and small integer scales for
//! each group of 32 (16 in Q6_K).

use half::f16;

/// Bytes of a 32-weight block: scale, 16 pairs of nibbles.
pub(crate) const Q4_0_BYTES: usize = 2 + 16;
/// Scale, offset, 16 pairs of nibbles.
pub(crate) const Q4_1_BYTES: usize = 2 + 2 + 16;
/// Scale, 32 fifth bits, 16 pairs of nibbles.
pub(crate) const Q5_0_BYTES: usize = 2 + 4 + 16;
/// Scale, offset, 32 fifth bits, 16 pairs of nibbles.
pub(crate) const Q5_1_BYTES: usize = 2 + 2 + 4 + 16;
/// Scale, 32 signed bytes.
pub(crate) const Q8_0_BYTES: usize = 2 + 32;
/// Bytes of a 256-weight block: two super-scales, packed 6-bit scales, nibbles.
pub(crate) const Q4_K_BYTES: usize = 2 + 2 + 12 + 128;
/// Two super-scales, packed 6-bit scales, fifth bits, nibbles.
pub(crate) const Q5_K_BYTES: usize = 2 + 2 + 12 + 32 + 128;
/// Low nibbles, high bit pairs, 16 signed scales, super-scale.
pub(crate) const Q6_K_BYTES: usize = 128 + 64 + 16 + 2;

/// 16 scales and minima of 4 bits, bit pairs, two super-scales.
pub(crate) const Q2_K_BYTES: usize = 16 + 64 + 2 + 2;
/// Third bits, bit pairs, 16 scales of 6 bits, super-scale.
pub(crate) const Q3_K_BYTES: usize = 32 + 64 + 12 + 2;
/// Bytes of a 32-weight block: scale, 16 pairs of table indices.
pub(crate) const IQ4_NL_BYTES: usize = 2 + 16;
/// Super-scale, high pairs and low nibbles of 8 scales, pairs of table indices.
pub(crate) const IQ4_XS_BYTES: usize = 2 + 2 + 4 + 128;

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

/// Bytes of a 32-weight block: exponent, 16 pairs of four-bit floats.
pub(crate) const MXFP4_BYTES: usize = 1 + 16;

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

/// Byte j holds weights j (low nibble) and j + 16, after the exponent.
pub(crate) fn mxfp4(block: &[u8; MXFP4_BYTES], out: &mut [f32; 32]) {
    for (j, &byte) in block[1..].iter().enumerate() {
        out[j] = four_bits(byte & 15, block[0]);
        out[j + 16] = four_bits(byte >> 4, block[0]);
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

/// `d · (q − 8)`; byte j holds weights j (low nibble) and j + 16.
pub(crate) fn q4_0(block: &[u8; Q4_0_BYTES], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (j, &byte) in block[2..].iter().enumerate() {
        out[j] = d * (f32::from(byte & 15) - 8.0);
        out[j + 16] = d * (f32::from(byte >> 4) - 8.0);
    }
}

/// `d · q + m`.
pub(crate) fn q4_1(block: &[u8; Q4_1_BYTES], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (j, &byte) in block[4..].iter().enumerate() {
        out[j] = d * f32::from(byte & 15) + m;
        out[j + 16] = d * f32::from(byte >> 4) + m;
    }
}

/// The five-bit weights of a block: byte j of `low` holds the nibbles of weights
/// j and j + 16, bit j of the 32-bit word `high` is weight j's fifth bit.
fn five_bits(high: [u8; 4], low: &[u8], out: &mut [f32; 32], weight: impl Fn(f32) -> f32) {
    let high = u32::from_le_bytes(high);
    let fifth = |j: usize| ((high >> j & 1) << 4) as u8;
    for (j, &byte) in low.iter().enumerate() {
        out[j] = weight(f32::from((byte & 15) | fifth(j)));
        out[j + 16] = weight(f32::from((byte >> 4) | fifth(j + 16)));
    }
}

/// `d · (q − 16)`.
pub(crate) fn q5_0(block: &[u8; Q5_0_BYTES], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    five_bits(
        [block[2], block[3], block[4], block[5]],
        &block[6..],
        out,
        |q| d * (q - 16.0),
    );
}

/// `d · q + m`.
pub(crate) fn q5_1(block: &[u8; Q5_1_BYTES], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    five_bits(
        [block[4], block[5], block[6], block[7]],
        &block[8..],
        out,
        |q| d * q + m,
    );
}

/// `d · q`.
pub(crate) fn q8_0(block: &[u8; Q8_0_BYTES], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (value, &byte) in out.iter_mut().zip(&block[2..]) {
        *value = d * f32::from(byte.cast_signed());
    }
}

/// The 6-bit scale and minimum of group `j` of 8, packed in 12 bytes: the first four groups use the
/// low bits of bytes 0–7, the others share bytes 8–11 and the top bits of the first eight.
fn scale_min(packed: &[u8; 12], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let low = packed[j + 4];
        (
            low & 15 | packed[j - 4] >> 6 << 4,
            low >> 4 | packed[j] >> 6 << 4,
        )
    };
    (f32::from(scale), f32::from(min))
}

/// The packed scales that follow the two super-scales of Q4_K and Q5_K.
fn packed_scales<const B: usize>(block: &[u8; B]) -> [u8; 12] {
    let mut packed = [0; 12];
    packed.copy_from_slice(&block[4..16]);
    packed
}

/// `d·scale·q − dmin·min`; each run of 32 bytes holds two groups, low nibbles
/// first.
pub(crate) fn q4_k(block: &[u8; Q4_K_BYTES], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let packed = packed_scales(block);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min(&packed, group);
        let (scale, min) = (d * scale, dmin * min);
        let bytes = &block[16 + group / 2 * 32..][..32];
        for (value, &byte) in out.iter_mut().zip(bytes) {
            let q = if group % 2 == 0 { byte & 15 } else { byte >> 4 };
            *value = scale * f32::from(q) - min;
        }
    }
}

/// As Q4_K; bit `group` of byte j of the high bits is the fifth bit of the
/// group's weight j.
pub(crate) fn q5_k(block: &[u8; Q5_K_BYTES], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let packed = packed_scales(block);
    let high = &block[16..48];
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min(&packed, group);
        let (scale, min) = (d * scale, dmin * min);
        let bytes = &block[48 + group / 2 * 32..][..32];
        for ((value, &byte), &high) in out.iter_mut().zip(bytes).zip(high) {
            let low = if group % 2 == 0 { byte & 15 } else { byte >> 4 };
            *value = scale * f32::from(low | (high >> group & 1) << 4) - min;
        }
    }
}

/// `d·scale·(q − 32)`. Each half of 128 weights has 64 bytes of low nibbles and
/// 32 bytes of high pairs: run r of 32 takes nibble r/2 of bytes `32·(r%2)..`
/// and bit pair r.
pub(crate) fn q6_k(block: &[u8; Q6_K_BYTES], out: &mut [f32; 256]) {
    let d = half_at(block, 208);
    for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, r) = (run / 4, run % 4);
        let low = &block[half * 64 + r % 2 * 32..][..32];
        let high = &block[128 + half * 32..][..32];
        for (j, value) in out.iter_mut().enumerate() {
            let nibble = if r < 2 { low[j] & 15 } else { low[j] >> 4 };
            let q = nibble | (high[j] >> (2 * r) & 3) << 4;
            let scale = f32::from(block[192 + run * 2 + j / 16].cast_signed());
            *value = d * scale * (f32::from(q) - 32.0);
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

/// `d·(scale − 32)·(q − 4)`, groups of 16; bit pairs as in Q2_K, bit `run` of byte j of the high bits is the
/// third bit. Scale g of 16: nibble g/8 of byte g%8, and bit pair g/4 of byte 8 + g%4.
pub(crate) fn q3_k(block: &[u8; Q3_K_BYTES], out: &mut [f32; 256]) {
    let d = half_at(block, 108);
    let packed = &block[96..108];
    for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, r) = (run / 4, run % 4);
        let pairs = &block[32 + half * 32..][..32];
        for (j, value) in out.iter_mut().enumerate() {
            let g = run * 2 + j / 16;
            let low = packed[g % 8] >> (4 * (g / 8)) & 15;
            let high = packed[8 + g % 4] >> (2 * (g / 4)) & 3;
            let scale = f32::from(low | high << 4) - 32.0;
            let q = (pairs[j] >> (2 * r) & 3) | (block[j] >> run & 1) << 2;
            *value = d * scale * (f32::from(q) - 4.0);
        }
    }
}

/// The values of IQ4_NL and IQ4_XS: denser near zero, where most weights are.
const IQ4: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// `scale · table[q]`; byte j holds weights j (low nibble) and j + 16.
fn iq4(scale: f32, bytes: &[u8], out: &mut [f32; 32]) {
    let value = |nibble: u8| scale * f32::from(IQ4[usize::from(nibble)]);
    for (j, &byte) in bytes.iter().enumerate() {
        out[j] = value(byte & 15);
        out[j + 16] = value(byte >> 4);
    }
}

/// `d · table[q]`.
pub(crate) fn iq4_nl(block: &[u8; IQ4_NL_BYTES], out: &mut [f32; 32]) {
    iq4(half_at(block, 0), &block[2..], out);
}

/// `d·(scale − 32)·table[q]`, groups of 32. Scale g of 8: nibble g%2 of byte 4 + g/2, and bit pair g of the
/// 16-bit word before.
pub(crate) fn iq4_xs(block: &[u8; IQ4_XS_BYTES], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    let high = u16::from_le_bytes([block[2], block[3]]);
    for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = block[4 + g / 2] >> (4 * (g % 2)) & 15;
        let scale = low | ((high >> (2 * g) & 3) as u8) << 4;
        iq4(
            d * (f32::from(scale) - 32.0),
            &block[8 + g * 16..][..16],
            out,
        );
    }
}
