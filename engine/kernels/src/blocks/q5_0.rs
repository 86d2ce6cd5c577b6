//! Q5_0: integers of five bits less 16, times a scale.
//!
//! ```text
//! 0    2   scale   f16
//! 2    4   high    bit i is the fifth bit of weight i
//! 6   16   quants  the other four, as in Q4_0
//!
//! weight   scale × (q − 16)
//! ```

use super::{Block, Blocks, Format, Group, Vector, vector::nibble};
use crate::{
    groups::{GROUP, HALF},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ5_0 {
    scale: [u8; 2],
    high: [u8; 4],
    quants: [u8; HALF],
}
const _: () = assert!(size_of::<BlockQ5_0>() == 22 && align_of::<BlockQ5_0>() == 1);

impl Format for BlockQ5_0 {
    const BLOCK: Block = Block::Q5_0;
    const ELEMENTS: usize = GROUP;
    const SIGNED: bool = false;
    const MOST: u8 = 31;
    const RAISED: u8 = 16;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, _: usize) -> Group {
        let quant = |i: usize| {
            let nibble = self.quants[i % HALF] >> (4 * (i / HALF)) & 15;
            let fifth = self.high[i / 8] >> (i % 8) & 1;
            (nibble | fifth << 4).cast_signed() - 16
        };
        Group {
            quants: std::array::from_fn(quant),
            scale: f16_to_f32(u16::from_le_bytes(self.scale)),
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let low = nibble::<V>(V::load(|lane| &chunk.at(first + lane).quants), half);
            let fifth = V::spread(|lane| u32::from_le_bytes(chunk.at(first + lane).high), half);
            V::or(low, V::and(fifth, V::splat(16)))
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale))) }
    }
}
