//! Q3_K: integers of three bits less 4, times a scale in six bits for 16 weights.
//!
//! ```text
//!   0   32   high    bit g of byte j is the third bit of weight j of group g
//!  32   64   low     bits 2 r and 2 r + 1 of byte 32 h + j are the other two of weight j of group
//!                    4 h + r, r < 4
//!  96   12   packed  16 steps: the low four bits of step s in nibble s / 8 of byte s % 8, the upper two
//!                    in bits 2 (s / 4) and the next of byte 8 + s % 4; 32 is to be taken from each
//! 108    2   scale   f16
//!
//! weight   (scale × (step − 32)) × (q − 4)
//! ```

use super::{Block, Blocks, Format, Group, Vector, six_bits::both, vector::half_of};
use crate::{
    groups::{CHUNK_GROUPS, GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ3K {
    high: [u8; GROUP],
    low: [u8; 2 * GROUP],
    packed: [u8; 12],
    scale: [u8; 2],
}
const _: () = assert!(size_of::<BlockQ3K>() == 110 && align_of::<BlockQ3K>() == 1);

impl BlockQ3K {
    /// The steps of its 16 halves of groups.
    #[inline(always)]
    fn steps(&self) -> [i8; CHUNK_GROUPS] {
        const FOUR: u64 = 0x0f0f_0f0f_0f0f_0f0f;
        const TWO: u64 = 0x0303_0303_0303_0303;
        let (words, _) = self.packed.as_chunks();
        let [a, b, c] = [0, 1, 2].map(|i| u32::from_le_bytes(words[i]));
        let low = both(a, b);
        let first = low & FOUR | (both(c, c >> 2) & TWO) << 4;
        let second = low >> 4 & FOUR | (both(c >> 4, c >> 6) & TWO) << 4;
        let all = [first, second].map(u64::to_le_bytes);
        std::array::from_fn(|s| (all[s / 8][s % 8]).cast_signed() - 32)
    }
}

impl Format for BlockQ3K {
    const BLOCK: Block = Block::Q3K;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = false;
    const MOST: u8 = 7;
    const RAISED: u8 = 4;
    const MINS: bool = false;
    const STEPS: bool = true;

    fn group(&self, g: usize) -> Group {
        let (h, r) = (g / 4, g % 4);
        let quant = |i: usize| {
            let low = self.low[32 * h + i] >> (2 * r) & 3;
            let high = self.high[i] >> g & 1;
            (low | high << 2).cast_signed() - 4
        };
        let steps = self.steps();
        Group {
            quants: std::array::from_fn(quant),
            scale: f16_to_f32(u16::from_le_bytes(self.scale)),
            steps: [steps[2 * g], steps[2 * g + 1]],
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let low = V::load(|_| half_of(&block.low, g / 4 * 2 + half));
            let low = V::shift(low, |lane| -2 * (g % 4 + lane) as i32);
            let high = V::load(|_| half_of(&block.high, half));
            let high = V::shift(high, |lane| 2 - (g + lane) as i32);
            V::or(V::and(low, V::splat(3)), V::and(high, V::splat(4)))
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale))) }
    }

    #[inline(always)]
    fn steps(chunk: Blocks<'_, Self>) -> [i8; 2 * CHUNK_GROUPS] {
        chunk.each_half(Self::steps)
    }
}
