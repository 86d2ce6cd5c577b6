//! Groups of weights that share a scale, and the scales of MXFP4.

/// Groups of a whole super-block.
pub const SUPER_GROUPS: usize = 8;
/// Elements that share one scale in the block formats.
pub const GROUP: usize = 32;
/// Half of a group: the elements in the low or high nibbles of a q4 group.
pub(crate) const HALF: usize = GROUP / 2;
/// Groups of a chunk, and chains of an integer dot product.
pub(crate) const CHUNK_GROUPS: usize = 16;
/// Elements of a chunk.
pub(crate) const CHUNK: usize = CHUNK_GROUPS * GROUP;

/// Twice the values of the nibbles of mxfp4, exact as integers.
pub(crate) const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The factor of such an integer in a group of mxfp4 with the exponent `e`: 2^(e − 128), exact. 255
/// stands for NaN.
#[inline(always)]
pub const fn mxfp4_scale(e: u8) -> f32 {
    match e {
        // below the smallest normal number
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits((e as u32 - 1) << 23),
    }
}

/// [`mxfp4_scale`] of every exponent.
pub(crate) static MXFP4_SCALES: [f32; 256] = {
    let mut scales = [0.0; 256];
    let mut e = 0;
    while e < scales.len() {
        scales[e] = mxfp4_scale(e as u8);
        e += 1;
    }
    scales
};
