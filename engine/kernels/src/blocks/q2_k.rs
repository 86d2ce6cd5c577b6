//! Q2_K: integers of two bits times a scale less a minimum, both in four bits for 16 weights.
//!
//! ```text
//!  0   16   packed   for each 16 weights the scale in the low nibble, the minimum in the high one
//! 16   64   quants   bits 2 r and 2 r + 1 of byte 32 h + j are weight j of group 4 h + r, r < 4
//! 80    2   scale    f16, of the scales
//! 82    2   minimum  f16, of the minimums
//!
//! weight   (scale × scale of the half) × q − minimum × minimum of the half
//! ```

use super::{Block, Blocks, Format, Group, Vector, vector::half_of};
use crate::{
    groups::{CHUNK_GROUPS, GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ2K {
    packed: [u8; CHUNK_GROUPS],
    quants: [u8; 2 * GROUP],
    scale: [u8; 2],
    minimum: [u8; 2],
}
const _: () = assert!(size_of::<BlockQ2K>() == 84 && align_of::<BlockQ2K>() == 1);

/// The sign of an f16.
const SIGN: u16 = 0x8000;

impl BlockQ2K {
    /// Both nibbles of a half: the step of its scale, and of its minimum.
    #[inline(always)]
    fn nibbles(&self, half: usize) -> [i8; 2] {
        let packed = self.packed[half % CHUNK_GROUPS];
        [packed & 15, packed >> 4].map(u8::cast_signed)
    }

    /// One of both nibbles of each half of a chunk.
    #[inline(always)]
    fn all(chunk: Blocks<'_, Self>, nibble: usize) -> [i8; 2 * CHUNK_GROUPS] {
        std::array::from_fn(|i| chunk.at(i / CHUNK_GROUPS).nibbles(i)[nibble])
    }
}

impl Format for BlockQ2K {
    const BLOCK: Block = Block::Q2K;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = false;
    const MOST: u8 = 3;
    const RAISED: u8 = 0;
    const MINS: bool = true;
    const STEPS: bool = true;
    const MIN_STEPS: bool = true;

    fn group(&self, g: usize) -> Group {
        let (h, r) = (g / 4, g % 4);
        let unit = |half| f16_to_f32(u16::from_le_bytes(half));
        let quant = |i: usize| (self.quants[32 * h + i] >> (2 * r) & 3).cast_signed();
        let [first, second] = [2 * g, 2 * g + 1].map(|half| self.nibbles(half));
        Group {
            quants: std::array::from_fn(quant),
            scale: unit(self.scale),
            steps: [first[0], second[0]],
            minimum: unit(self.minimum),
            min_steps: [first[1], second[1]],
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let pairs = V::load(|_| half_of(&block.quants, g / 4 * 2 + half));
            let pairs = V::shift(pairs, |lane| -2 * (g % 4 + lane) as i32);
            V::and(pairs, V::splat(3))
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale))) }
    }

    #[inline(always)]
    unsafe fn factors<V: Vector>(chunk: Blocks<'_, Self>) -> [V::Values; 2] {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let less = chunk.each(|block| u16::from_le_bytes(block.minimum) ^ SIGN);
            [Self::scales::<V>(chunk), V::wide(&less)]
        }
    }

    #[inline(always)]
    fn steps(chunk: Blocks<'_, Self>) -> [i8; 2 * CHUNK_GROUPS] {
        Self::all(chunk, 0)
    }

    #[inline(always)]
    fn min_steps(chunk: Blocks<'_, Self>) -> [i8; 2 * CHUNK_GROUPS] {
        Self::all(chunk, 1)
    }
}
