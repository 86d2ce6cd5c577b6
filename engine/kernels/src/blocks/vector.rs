//! What an instruction set offers to the unpacking of blocks.

use crate::groups::{CHUNK_GROUPS, HALF};

/// Vector operations on lanes of 16 bytes, each half of a group. Nothing needs an alignment.
pub(crate) trait Vector {
    /// [`LANES`](Vector::LANES) × 16 bytes.
    type Bytes: Copy;
    /// 16 floats, one for each group of a chunk.
    type Values: Copy;
    /// Lanes of a vector: 1 or 2.
    const LANES: usize;

    /// 16 bytes in each lane.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn load<'a>(at: impl Fn(usize) -> &'a [u8; HALF]) -> Self::Bytes;

    /// One value in all bytes.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn splat(byte: u8) -> Self::Bytes;

    /// Bits that are set in both.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn and(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// Bits that are set in one or both.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// The bits of each byte moved to the left by as many places as `left` says of its lane, or to
    /// the right if that is negative. Bits that leave a byte may enter its neighbours, and any bits
    /// may enter at its ends.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`. The places are between −7 and 7.
    unsafe fn shift(bytes: Self::Bytes, left: impl Fn(usize) -> i32) -> Self::Bytes;

    /// The entry of the table for each byte, which is below 16.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn lookup(table: &[i8; 16], at: Self::Bytes) -> Self::Bytes;

    /// Byte `j` of a lane is 255 if bit `16 × half + j` of the lane's word is set, otherwise 0.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn spread(words: impl Fn(usize) -> u32, half: usize) -> Self::Bytes;

    /// Two words of eight bytes in each lane.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn words(of: impl Fn(usize) -> [u64; 2]) -> Self::Bytes;

    /// The sums of bytes, which wrap around.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn plus(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// The negative of each byte where `by` is 255; itself where it is 0.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`. Bytes of `by` are 0 or 255.
    unsafe fn negate(bytes: Self::Bytes, by: Self::Bytes) -> Self::Bytes;

    /// 16 values.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn values(values: &[f32; CHUNK_GROUPS]) -> Self::Values;

    /// 16 values in f16.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn wide(halves: &[u16; CHUNK_GROUPS]) -> Self::Values;

    /// Each value times an integer.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn times(values: Self::Values, by: &[i8; CHUNK_GROUPS]) -> Self::Values;

    /// Each value times one factor.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn scaled(values: Self::Values, by: f32) -> Self::Values;
}

/// The low nibbles of each byte, or the high ones as half 1.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn nibble<V: Vector>(bytes: V::Bytes, half: usize) -> V::Bytes {
    // SAFETY: the caller guarantees the instruction set.
    unsafe { V::and(V::shift(bytes, |_| -4 * half as i32), V::splat(15)) }
}

/// Half `half` of 32 bytes.
#[inline(always)]
pub(super) fn half_of<const N: usize>(bytes: &[u8; N], half: usize) -> &[u8; HALF] {
    &bytes.as_chunks::<HALF>().0[half]
}
