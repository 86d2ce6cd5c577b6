//! IQ1_S: eight of −1, 0 and 1 by an index of eleven bits, all moved by an eighth, times a scale in three bits
//! for 32 weights.
//!
//! ```text
//!  0    2   scale   f16
//!  2   32   low     the low eight bits of the index of each eight weights
//! 34   16   high    u16 for each group: bits 3 i to 3 i + 2 are the upper three of index i; bits 12 to 14
//!                   the scale; bit 15 is set where weights are moved down
//!
//! weight   scale × (2 × scale of the group + 1) × (entry ± 1/8), here as eighths
//! ```

use super::{
    Block, Blocks, Format, Group, Vector,
    codebooks::{IQ1, entry},
};
use crate::{
    groups::{GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq1S {
    scale: [u8; 2],
    low: [[u8; 4]; SUPER_GROUPS],
    high: [[u8; 2]; SUPER_GROUPS],
}
const _: () = assert!(size_of::<BlockIq1S>() == 50 && align_of::<BlockIq1S>() == 1);

/// One in each of eight bytes.
const ONES: u64 = 0x0101_0101_0101_0101;

/// What moves eight weights in eighths up or down.
#[inline(always)]
pub(super) const fn delta(down: bool) -> u64 {
    if down { u64::MAX } else { ONES }
}

impl BlockIq1S {
    /// The upper bits of the indices of group `g`, its scale and whether its weights are moved down.
    #[inline(always)]
    fn high(&self, g: usize) -> u16 {
        u16::from_le_bytes(self.high[g])
    }

    /// Entry `i` of group `g`.
    #[inline(always)]
    fn entry(&self, g: usize, i: usize) -> u64 {
        let high = usize::from(self.high(g) >> (3 * i) & 7);
        entry(&IQ1, usize::from(self.low[g][i]) | high << 8)
    }

    /// The scale of group `g`, an odd number.
    #[inline(always)]
    fn step(&self, g: usize) -> i8 {
        (2 * (self.high(g) >> 12 & 7) + 1) as i8
    }
}

impl Format for BlockIq1S {
    const BLOCK: Block = Block::Iq1S;
    const LIKE: Block = Block::Q8_0;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 9;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, g: usize) -> Group {
        let moved = if self.high(g) >> 15 == 1 { -1 } else { 1 };
        let quant = |i: usize| self.entry(g, i / 8).to_le_bytes()[i % 8].cast_signed() + moved;
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
            let entries = V::words(|lane| [0, 1].map(|i| block.entry(g + lane, 2 * half + i)));
            let deltas = V::words(|lane| [delta(block.high(g + lane) >> 15 == 1); 2]);
            V::plus(entries, deltas)
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
