//! IQ4_NL: nibbles that name one of sixteen values, times a scale.
//!
//! ```text
//! 0    2   scale   f16
//! 2   16   quants  as in Q4_0
//!
//! weight   scale × VALUES[nibble]
//! ```

use super::{Block, Blocks, Format, Group, Vector, vector::nibble};
use crate::{
    groups::{GROUP, HALF},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq4Nl {
    scale: [u8; 2],
    quants: [u8; HALF],
}
const _: () = assert!(size_of::<BlockIq4Nl>() == 18 && align_of::<BlockIq4Nl>() == 1);

/// Denser near zero, where most weights are.
pub(super) const VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

impl Format for BlockIq4Nl {
    const BLOCK: Block = Block::Iq4Nl;
    const LIKE: Block = Block::Q8_0;
    const ELEMENTS: usize = GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 127;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, _: usize) -> Group {
        let quant = |i: usize| {
            let nibble = self.quants[i % HALF] >> (4 * (i / HALF)) & 15;
            VALUES[usize::from(nibble)]
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
            let nibbles = nibble::<V>(V::load(|lane| &chunk.at(first + lane).quants), half);
            V::lookup(&VALUES, nibbles)
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale))) }
    }
}
