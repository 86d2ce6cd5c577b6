//! Q4_0: nibbles less 8, times a scale.
//!
//! ```text
//! 0    2   scale   f16
//! 2   16   quants  byte j holds weight j in its low nibble and weight j + 16 in its high one
//!
//! weight   scale × (nibble − 8)
//! ```

use super::{Block, Blocks, Format, Group, Vector, vector::nibble};
use crate::{
    groups::{GROUP, HALF},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ4_0 {
    scale: [u8; 2],
    quants: [u8; HALF],
}
const _: () = assert!(size_of::<BlockQ4_0>() == 18 && align_of::<BlockQ4_0>() == 1);

impl Format for BlockQ4_0 {
    const BLOCK: Block = Block::Q4_0;
    const ELEMENTS: usize = GROUP;
    const SIGNED: bool = false;
    const MOST: u8 = 15;
    const RAISED: u8 = 8;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, _: usize) -> Group {
        let quant = |i: usize| {
            let nibble = self.quants[i % HALF] >> (4 * (i / HALF)) & 15;
            nibble.cast_signed() - 8
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
        unsafe { nibble::<V>(V::load(|lane| &chunk.at(first + lane).quants), half) }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale))) }
    }
}
