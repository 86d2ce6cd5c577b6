//! IQ1_M: eight of −1, 0 and 1 by an index of eleven bits, moved by an eighth, times a scale in three bits for
//! 16 weights.
//!
//! ```text
//!  0   32   low     the low eight bits of the index of each eight weights
//! 32   16   high    a nibble for each eight weights: the upper three bits of the index; the fourth is set
//!                   where weights are moved down
//! 48    8   steps   four u16: bits 3 i to 3 i + 2 of word w are the step of half 4 w + i, its upper four bits
//!                   are bits 4 w to 4 w + 3 of the scale, an f16
//!
//! weight   scale × (2 × step + 1) × (entry ± 1/8), here as eighths
//! ```

use super::{
    Block, Blocks, Format, Group, Vector,
    codebooks::{IQ1, entry},
    iq1_s::delta,
};
use crate::{
    groups::{CHUNK_GROUPS, GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq1M {
    low: [[u8; 4]; SUPER_GROUPS],
    high: [[u8; 2]; SUPER_GROUPS],
    steps: [u8; 8],
}
const _: () = assert!(size_of::<BlockIq1M>() == 56 && align_of::<BlockIq1M>() == 1);

impl BlockIq1M {
    /// The nibble of the eight weights `i` of group `g`.
    #[inline(always)]
    fn high(&self, g: usize, i: usize) -> u8 {
        self.high[g][i / 2] >> (4 * (i % 2)) & 15
    }

    /// Entry `i` of group `g`.
    #[inline(always)]
    fn entry(&self, g: usize, i: usize) -> u64 {
        let high = usize::from(self.high(g, i) & 7);
        entry(&IQ1, usize::from(self.low[g][i]) | high << 8)
    }

    /// The scale, in f16.
    #[inline(always)]
    fn scale(&self) -> u16 {
        let words = u64::from_le_bytes(self.steps);
        let nibble = |w: u32| (words >> (16 * w + 12) & 15) << (4 * w);
        (nibble(0) | nibble(1) | nibble(2) | nibble(3)) as u16
    }

    /// The steps of its halves of groups.
    #[inline(always)]
    fn steps(&self) -> [i8; CHUNK_GROUPS] {
        let words = u64::from_le_bytes(self.steps);
        std::array::from_fn(|s| (2 * (words >> (16 * (s / 4) + 3 * (s % 4)) & 7) + 1) as i8)
    }
}

impl Format for BlockIq1M {
    const BLOCK: Block = Block::Iq1M;
    const LIKE: Block = Block::Iq2Xs;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 9;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = true;

    fn group(&self, g: usize) -> Group {
        let quant = |i: usize| {
            let moved = if self.high(g, i / 8) >> 3 == 1 { -1 } else { 1 };
            self.entry(g, i / 8).to_le_bytes()[i % 8].cast_signed() + moved
        };
        let steps = self.steps();
        Group {
            quants: std::array::from_fn(quant),
            scale: f16_to_f32(self.scale()) * 0.125,
            steps: [steps[2 * g], steps[2 * g + 1]],
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let entries = V::words(|lane| [0, 1].map(|i| block.entry(g + lane, 2 * half + i)));
            let down = |lane, i| block.high(g + lane, 2 * half + i) >> 3 == 1;
            let deltas = V::words(|lane| [0, 1].map(|i| delta(down(lane, i))));
            V::plus(entries, deltas)
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::scaled(V::wide(&chunk.each(Self::scale)), 0.125) }
    }

    #[inline(always)]
    fn steps(chunk: Blocks<'_, Self>) -> [i8; 2 * CHUNK_GROUPS] {
        chunk.each_half(Self::steps)
    }
}
