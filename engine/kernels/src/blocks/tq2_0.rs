//! TQ2_0: −1, 0 and 1 in two bits, times a scale for 256 weights.
//!
//! ```text
//!  0   64   quants  bits 2 r and 2 r + 1 of byte 32 h + j are weight j of group 4 h + r, r < 4; less one
//! 64    2   scale   f16
//!
//! weight   scale × (q − 1)
//! ```

use super::{Block, Blocks, Format, Group, Vector, vector::half_of};
use crate::{
    groups::{GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockTq2_0 {
    quants: [u8; 2 * GROUP],
    scale: [u8; 2],
}
const _: () = assert!(size_of::<BlockTq2_0>() == 66 && align_of::<BlockTq2_0>() == 1);

/// What two bits stand for; the rest of the table is unused.
pub(super) const LESS_ONE: [i8; 16] = [-1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

impl Format for BlockTq2_0 {
    const BLOCK: Block = Block::Tq2_0;
    const LIKE: Block = Block::Q8_0;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 2;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, g: usize) -> Group {
        let (h, r) = (g / 4, g % 4);
        let quant = |i: usize| (self.quants[GROUP * h + i] >> (2 * r) & 3).cast_signed() - 1;
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
            let bytes = V::load(|_| half_of(&block.quants, g / 4 * 2 + half));
            let bytes = V::shift(bytes, |lane| -2 * (g % 4 + lane) as i32);
            V::lookup(&LESS_ONE, V::and(bytes, V::splat(3)))
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale))) }
    }
}
