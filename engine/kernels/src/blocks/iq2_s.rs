//! IQ2_S: eight magnitudes by an index of ten bits, a sign for each, times a scale in four bits for 16 weights.
//!
//! ```text
//!  0    2   scale   f16
//!  2   32   low     the low eight bits of the index of each eight weights
//! 34   32   signs   bit i of byte j is set where weight 8 j + i is negative
//! 66    8   high    bits 2 i and 2 i + 1 of byte g are the upper two of index i of group g
//! 74    8   steps   the scales of both halves of each group, the first in the low nibble
//!
//! weight   scale / 8 × (2 × nibble + 1) × magnitude × sign
//! ```

use super::{
    Block, Blocks, Format, Group, Vector,
    codebooks::{IQ2_S, entry, odd_steps},
};
use crate::{
    groups::{CHUNK_GROUPS, GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq2S {
    scale: [u8; 2],
    low: [[u8; 4]; SUPER_GROUPS],
    signs: [[u8; 4]; SUPER_GROUPS],
    high: [u8; SUPER_GROUPS],
    steps: [u8; SUPER_GROUPS],
}
const _: () = assert!(size_of::<BlockIq2S>() == 82 && align_of::<BlockIq2S>() == 1);

impl BlockIq2S {
    /// Entry `i` of group `g`.
    #[inline(always)]
    fn entry(&self, g: usize, i: usize) -> u64 {
        let high = usize::from(self.high[g] >> (2 * i) & 3);
        entry(&IQ2_S, usize::from(self.low[g][i]) | high << 8)
    }

    /// The steps of its halves of groups.
    #[inline(always)]
    fn steps(&self) -> [i8; CHUNK_GROUPS] {
        odd_steps(self.steps)
    }
}

impl Format for BlockIq2S {
    const BLOCK: Block = Block::Iq2S;
    const LIKE: Block = Block::Iq2Xs;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 43;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = true;

    fn group(&self, g: usize) -> Group {
        let quant = |i: usize| {
            let magnitude = self.entry(g, i / 8).to_le_bytes()[i % 8].cast_signed();
            match self.signs[g][i / 8] >> (i % 8) & 1 {
                1 => -magnitude,
                _ => magnitude,
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
            let signs = V::spread(|lane| u32::from_le_bytes(block.signs[g + lane]), half);
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
