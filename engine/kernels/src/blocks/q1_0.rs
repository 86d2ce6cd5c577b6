//! Q1_0: signs, times a scale for 128 weights.
//!
//! ```text
//! 0    2   scale   f16
//! 2   16   quants  bit i of byte j is set where weight 8 j + i is positive
//!
//! weight   ± scale
//! ```

use super::{Block, Blocks, Format, Group, Vector};
use crate::{groups::GROUP, math::f16_to_f32};

/// Groups of a block.
const GROUPS: usize = 4;

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ1_0 {
    scale: [u8; 2],
    quants: [[u8; 4]; GROUPS],
}
const _: () = assert!(size_of::<BlockQ1_0>() == 18 && align_of::<BlockQ1_0>() == 1);

impl Format for BlockQ1_0 {
    const BLOCK: Block = Block::Q1_0;
    const LIKE: Block = Block::Q8_0;
    const ELEMENTS: usize = GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 1;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, g: usize) -> Group {
        let quant = |i: usize| match self.quants[g][i / 8] >> (i % 8) & 1 {
            1 => 1,
            _ => -1,
        };
        Group {
            quants: std::array::from_fn(quant),
            scale: f16_to_f32(u16::from_le_bytes(self.scale)),
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let positive = V::spread(|lane| u32::from_le_bytes(block.quants[g + lane]), half);
            V::negate(V::splat(0xff), positive)
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale))) }
    }
}
