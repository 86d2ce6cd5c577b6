//! IQ2_XXS: eight magnitudes by an index of eight bits, signs whose number is even, times a scale in four bits
//! for 32 weights.
//!
//! ```text
//! 0    2   scale   f16
//! 2   64   groups  8 bytes for each group: four indices; then u32: four fields of seven bits, the signs of
//!                  eight weights each but for the last; the scale of the group in the upper four bits
//!
//! weight   scale × (2 × scale of the group + 1) / 8 × magnitude × sign
//! ```

use super::{
    Block, Blocks, Format, Group, Vector,
    codebooks::{EVEN_SIGNS, IQ2_XXS, entry, is_negative},
};
use crate::{
    groups::{GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq2Xxs {
    scale: [u8; 2],
    groups: [[[u8; 4]; 2]; SUPER_GROUPS],
}
const _: () = assert!(size_of::<BlockIq2Xxs>() == 66 && align_of::<BlockIq2Xxs>() == 1);

impl BlockIq2Xxs {
    /// The indices of group `g`, and its signs and scale.
    #[inline(always)]
    fn parts(&self, g: usize) -> ([u8; 4], u32) {
        let [indices, signs] = self.groups[g];
        (indices, u32::from_le_bytes(signs))
    }

    /// The scale of group `g`, an odd number.
    #[inline(always)]
    fn step(&self, g: usize) -> i8 {
        (2 * (self.parts(g).1 >> 28) + 1) as i8
    }
}

impl Format for BlockIq2Xxs {
    const BLOCK: Block = Block::Iq2Xxs;
    const LIKE: Block = Block::Q8_0;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 43;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, g: usize) -> Group {
        let (indices, signs) = self.parts(g);
        let quant = |i: usize| {
            let magnitude =
                entry(&IQ2_XXS, usize::from(indices[i / 8])).to_le_bytes()[i % 8].cast_signed();
            let seven = signs >> (7 * (i / 8)) & 127;
            if is_negative(seven, i % 8) {
                -magnitude
            } else {
                magnitude
            }
        };
        let scale = f16_to_f32(u16::from_le_bytes(self.scale));
        Group {
            quants: std::array::from_fn(quant),
            scale: scale * f32::from(self.step(g)) * 0.125,
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let magnitudes = V::words(|lane| {
                let (indices, _) = block.parts(g + lane);
                [0, 1].map(|i| entry(&IQ2_XXS, usize::from(indices[2 * half + i])))
            });
            let signs = V::words(|lane| {
                let (_, signs) = block.parts(g + lane);
                let seven = |i: usize| (signs >> (7 * (2 * half + i)) & 127) as usize;
                [0, 1].map(|i| entry(&EVEN_SIGNS, seven(i)))
            });
            V::negate(magnitudes, signs)
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let units = V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale)));
            let steps = chunk.each_group(Self::step);
            V::scaled(V::times(units, &steps), 0.125)
        }
    }
}
