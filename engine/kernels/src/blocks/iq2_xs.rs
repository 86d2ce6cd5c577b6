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
    codebooks::{EVEN_SIGNS, IQ2_XS, entry, is_negative, odd_steps},
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
    quants: [[u8; 8]; SUPER_GROUPS],
    steps: [u8; SUPER_GROUPS],
}
const _: () = assert!(size_of::<BlockIq2Xs>() == 74 && align_of::<BlockIq2Xs>() == 1);

impl BlockIq2Xs {
    /// The quants of group `g`, 16 bits each.
    #[inline(always)]
    fn quants(&self, g: usize) -> u64 {
        u64::from_le_bytes(self.quants[g])
    }

    /// Entry `i` of group `g`.
    #[inline(always)]
    fn entry(&self, g: usize, i: usize) -> u64 {
        entry(&IQ2_XS, (self.quants(g) >> (16 * i) & 511) as usize)
    }

    /// The signs of the weights of entry `i`, as masks.
    #[inline(always)]
    fn signs(&self, g: usize, i: usize) -> u64 {
        entry(&EVEN_SIGNS, (self.quants(g) >> (16 * i + 9) & 127) as usize)
    }

    /// The steps of its halves of groups.
    #[inline(always)]
    fn steps(&self) -> [i8; CHUNK_GROUPS] {
        odd_steps(self.steps)
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
        let quant = |i: usize| {
            let seven = self.quants(g) >> (16 * (i / 8) + 9) & 127;
            let magnitude = self.entry(g, i / 8).to_le_bytes()[i % 8].cast_signed();
            if is_negative(seven as u32, i % 8) {
                -magnitude
            } else {
                magnitude
            }
        };
        let steps = self.steps();
        Group {
            quants: std::array::from_fn(quant),
            scale: f16_to_f32(u16::from_le_bytes(self.scale)) * 0.125,
            steps: [steps[2 * g], steps[2 * g + 1]],
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let magnitudes = V::words(|lane| [0, 1].map(|i| block.entry(g + lane, 2 * half + i)));
            let signs = V::words(|lane| [0, 1].map(|i| block.signs(g + lane, 2 * half + i)));
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
