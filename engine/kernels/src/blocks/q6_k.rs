//! Q6_K: integers of six bits less 32, times a scale in eight bits for 16 weights.
//!
//! ```text
//!   0  128   low    groups g and g + 2 of each four in the nibbles of 32 bytes: byte 64 h + 32 r + j
//!                   holds weight j of groups 4 h + r and 4 h + r + 2, r < 2
//! 128   64   high   bits 2 r and 2 r + 1 of byte 32 h + j are the upper two of weight j of group
//!                   4 h + r, r < 4
//! 192   16   steps  i8, one for each 16 weights
//! 208    2   scale  f16
//!
//! weight   (scale × step) × (q − 32)
//! ```

use super::{Block, Blocks, Format, Group, Vector, vector::half_of};
use crate::{
    groups::{CHUNK_GROUPS, GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ6K {
    low: [u8; 4 * GROUP],
    high: [u8; 2 * GROUP],
    steps: [i8; CHUNK_GROUPS],
    scale: [u8; 2],
}
const _: () = assert!(size_of::<BlockQ6K>() == 210 && align_of::<BlockQ6K>() == 1);

impl Format for BlockQ6K {
    const BLOCK: Block = Block::Q6K;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = false;
    const MOST: u8 = 63;
    const RAISED: u8 = 32;
    const MINS: bool = false;
    const STEPS: bool = true;

    fn group(&self, g: usize) -> Group {
        let (h, r) = (g / 4, g % 4);
        let quant = |i: usize| {
            let low = self.low[64 * h + 32 * (r % 2) + i] >> (4 * (r / 2)) & 15;
            let high = self.high[32 * h + i] >> (2 * r) & 3;
            (low | high << 4).cast_signed() - 32
        };
        Group {
            quants: std::array::from_fn(quant),
            scale: f16_to_f32(u16::from_le_bytes(self.scale)),
            steps: [self.steps[2 * g], self.steps[2 * g + 1]],
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let (h, r) = (g / 4, g % 4);
            let low = V::load(|lane| half_of(&block.low, 4 * h + 2 * ((r + lane) % 2) + half));
            let low = V::shift(low, |lane| -4 * ((r + lane) / 2) as i32);
            let high = V::load(|_| half_of(&block.high, 2 * h + half));
            let high = V::shift(high, |lane| 4 - 2 * (r + lane) as i32);
            V::or(V::and(low, V::splat(15)), V::and(high, V::splat(0x30)))
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale))) }
    }

    #[inline(always)]
    fn steps(chunk: Blocks<'_, Self>) -> [i8; 2 * CHUNK_GROUPS] {
        chunk.each_half(|block| block.steps)
    }
}
