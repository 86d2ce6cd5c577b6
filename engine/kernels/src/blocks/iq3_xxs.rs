//! IQ3_XXS: four magnitudes by an index of eight bits, signs whose number is even, times a scale in four bits
//! for 32 weights.
//!
//! ```text
//!  0    2   scale   f16
//!  2   64   quants  an index for each four weights
//! 66   32   signs   u32 for each group, as the second one of IQ2_XXS
//!
//! weight   scale × (2 × scale of the group + 1) / 4 × magnitude × sign
//! ```

use super::{
    Block, Blocks, Format, Group, Vector,
    codebooks::{EVEN_SIGNS, IQ3_XXS, entry, is_negative, joined},
};
use crate::{
    groups::{GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq3Xxs {
    scale: [u8; 2],
    quants: [[u8; 8]; SUPER_GROUPS],
    signs: [[u8; 4]; SUPER_GROUPS],
}
const _: () = assert!(size_of::<BlockIq3Xxs>() == 98 && align_of::<BlockIq3Xxs>() == 1);

impl BlockIq3Xxs {
    /// Entry `i` of group `g`.
    #[inline(always)]
    fn entry(&self, g: usize, i: usize) -> u64 {
        entry(&IQ3_XXS, usize::from(self.quants[g][i]))
    }

    /// The signs and the scale of group `g`.
    #[inline(always)]
    fn signs(&self, g: usize) -> u32 {
        u32::from_le_bytes(self.signs[g])
    }

    /// The scale of group `g`, an odd number.
    #[inline(always)]
    fn step(&self, g: usize) -> i8 {
        (2 * (self.signs(g) >> 28) + 1) as i8
    }
}

impl Format for BlockIq3Xxs {
    const BLOCK: Block = Block::Iq3Xxs;
    const LIKE: Block = Block::Q8_0;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 62;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, g: usize) -> Group {
        let quant = |i: usize| {
            let magnitude = self.entry(g, i / 4).to_le_bytes()[i % 4].cast_signed();
            let seven = self.signs(g) >> (7 * (i / 8)) & 127;
            if is_negative(seven, i % 8) {
                -magnitude
            } else {
                magnitude
            }
        };
        let scale = f16_to_f32(u16::from_le_bytes(self.scale));
        Group {
            quants: std::array::from_fn(quant),
            scale: scale * f32::from(self.step(g)) * 0.25,
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let magnitudes = V::words(|lane| {
                let four = |i| block.entry(g + lane, 4 * half + i);
                [joined(four(0), four(1)), joined(four(2), four(3))]
            });
            let signs = V::words(|lane| {
                let signs = block.signs(g + lane);
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
            V::scaled(V::times(units, &steps), 0.25)
        }
    }
}
