//! Q4_1: nibbles times a scale, plus an offset.
//!
//! ```text
//! 0    2   scale   f16
//! 2    2   offset  f16
//! 4   16   quants  as in Q4_0
//!
//! weight   scale × nibble + offset
//! ```

use super::{Block, Blocks, Format, Group, Vector, vector::nibble};
use crate::{
    groups::{GROUP, HALF},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ4_1 {
    scale: [u8; 2],
    offset: [u8; 2],
    quants: [u8; HALF],
}
const _: () = assert!(size_of::<BlockQ4_1>() == 20 && align_of::<BlockQ4_1>() == 1);

/// The sign of an f16: an offset is a minimum of the other sign.
const SIGN: u16 = 1 << 15;

impl Format for BlockQ4_1 {
    const BLOCK: Block = Block::Q4_1;
    const ELEMENTS: usize = GROUP;
    const SIGNED: bool = false;
    const MOST: u8 = 15;
    const RAISED: u8 = 0;
    const MINS: bool = true;
    const STEPS: bool = false;

    fn group(&self, _: usize) -> Group {
        let quant = |i: usize| {
            let nibble = self.quants[i % HALF] >> (4 * (i / HALF)) & 15;
            nibble.cast_signed()
        };
        Group {
            quants: std::array::from_fn(quant),
            scale: f16_to_f32(u16::from_le_bytes(self.scale)),
            minimum: -f16_to_f32(u16::from_le_bytes(self.offset)),
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

    #[inline(always)]
    unsafe fn factors<V: Vector>(chunk: Blocks<'_, Self>) -> [V::Values; 2] {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let less = chunk.each(|block| u16::from_le_bytes(block.offset) ^ SIGN);
            [Self::scales::<V>(chunk), V::wide(&less)]
        }
    }
}
