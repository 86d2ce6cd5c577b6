//! IQ2_XS: eight magnitudes by an index of nine bits, signs whose number is even, times a scale in four bits for
//! 16 weights.
//!
//! ```text
//!  0    2   scale   f16
//!  2   64   quants  u16 for each eight weights: the index; above it the signs of seven of them
//! 66    8   steps   the scales of both halves of each group, the first in the low nibble
//!
//! weight   scale / 8 × (2 × nibble + 1) × magnitude × sign
//! ```

use super::{
    Block, Blocks, Format, Group, Vector,
    codebooks::{IQ2_XS, entry, even_signs, odd_steps},
};
use crate::{
    groups::{CHUNK_GROUPS, GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq2Xs {
    scale: [u8; 2],
    quants: [[[u8; 2]; 4]; SUPER_GROUPS],
    steps: [u8; SUPER_GROUPS],
}
const _: () = assert!(size_of::<BlockIq2Xs>() == 74 && align_of::<BlockIq2Xs>() == 1);

impl BlockIq2Xs {
    /// The quants of group `g`.
    #[inline(always)]
    fn quants(&self, g: usize) -> [u16; 4] {
        self.quants[g].map(u16::from_le_bytes)
    }

    /// The steps of its halves of groups.
    #[inline(always)]
    fn steps(&self) -> [i8; CHUNK_GROUPS] {
        odd_steps(|g| self.steps[g])
    }
}

impl Format for BlockIq2Xs {
    const BLOCK: Block = Block::Iq2Xs;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 43;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = true;

    fn group(&self, g: usize) -> Group {
        let quants = self.quants(g);
        let quant = |i: usize| {
            let (index, seven) = (quants[i / 8] & 511, quants[i / 8] >> 9);
            let magnitude = entry(&IQ2_XS, usize::from(index)).to_le_bytes()[i % 8].cast_signed();
            let negative = match i % 8 {
                7 => seven.count_ones() % 2,
                bit => u32::from(seven >> bit & 1),
            };
            if negative == 1 { -magnitude } else { magnitude }
        };
        let steps = self.steps();
        Group {
            quants: std::array::from_fn(quant),
            scale: f16_to_f32(u16::from_le_bytes(self.scale)) * 0.125,
            steps: [steps[2 * g], steps[2 * g + 1]],
            minimum: 0.0,
            min_steps: [1; 2],
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let magnitudes = V::words(|lane| {
                let quants = block.quants(g + lane);
                [0, 1].map(|i| entry(&IQ2_XS, usize::from(quants[2 * half + i] & 511)))
            });
            let signs = V::spread(
                |lane| {
                    let [a, b, c, d] = block.quants(g + lane).map(|quant| u32::from(quant >> 9));
                    even_signs(a | b << 7 | c << 14 | d << 21)
                },
                half,
            );
            V::negate(magnitudes, signs)
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let units = V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale)));
            V::scaled(units, 0.125)
        }
    }

    #[inline(always)]
    fn steps(chunk: Blocks<'_, Self>) -> [i8; 2 * CHUNK_GROUPS] {
        chunk.each_half(Self::steps)
    }
}
