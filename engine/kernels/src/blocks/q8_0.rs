//! Q8_0: signed bytes times a scale.
//!
//! ```text
//! 0    2   scale   f16
//! 2   32   quants  byte i is weight i
//!
//! weight   scale × q
//! ```

use super::{Block, Blocks, Format, Group, Vector, vector::half_of};
use crate::{groups::GROUP, math::f16_to_f32};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ8_0 {
    scale: [u8; 2],
    quants: [u8; GROUP],
}
const _: () = assert!(size_of::<BlockQ8_0>() == 34 && align_of::<BlockQ8_0>() == 1);

impl Format for BlockQ8_0 {
    const BLOCK: Block = Block::Q8_0;
    const ELEMENTS: usize = GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 128;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, _: usize) -> Group {
        Group {
            quants: self.quants.map(u8::cast_signed),
            scale: f16_to_f32(u16::from_le_bytes(self.scale)),
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::load(|lane| half_of(&chunk.at(first + lane).quants, half)) }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale))) }
    }
}
