//! IQ3_S: four magnitudes by an index of nine bits, a sign for each, times a scale in four bits for 32 weights.
//!
//! ```text
//!   0    2   scale   f16
//!   2   64   low     the low eight bits of the index of each four weights
//!  66    8   high    bit i of byte g is the ninth of index i of group g
//!  74   32   signs   bit i of byte j is set where weight 8 j + i is negative
//! 106    4   steps   the scale of group g in nibble g % 2 of byte g / 2
//!
//! weight   scale × (2 × nibble + 1) × magnitude × sign
//! ```

use super::{
    Block, Blocks, Format, Group, Vector,
    codebooks::{IQ3_S, entry, joined},
};
use crate::{
    groups::{GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq3S {
    scale: [u8; 2],
    low: [[u8; 8]; SUPER_GROUPS],
    high: [u8; SUPER_GROUPS],
    signs: [[u8; 4]; SUPER_GROUPS],
    steps: [u8; SUPER_GROUPS / 2],
}
const _: () = assert!(size_of::<BlockIq3S>() == 110 && align_of::<BlockIq3S>() == 1);

impl BlockIq3S {
    /// Entry `i` of group `g`.
    #[inline(always)]
    fn entry(&self, g: usize, i: usize) -> u64 {
        let high = usize::from(self.high[g] >> i & 1);
        entry(&IQ3_S, usize::from(self.low[g][i]) | high << 8)
    }

    /// The scale of group `g`, an odd number.
    #[inline(always)]
    fn step(&self, g: usize) -> i8 {
        (2 * (self.steps[g / 2] >> (4 * (g % 2)) & 15) + 1).cast_signed()
    }
}

impl Format for BlockIq3S {
    const BLOCK: Block = Block::Iq3S;
    const LIKE: Block = Block::Q8_0;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 15;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, g: usize) -> Group {
        let quant = |i: usize| {
            let magnitude = self.entry(g, i / 4).to_le_bytes()[i % 4].cast_signed();
            match self.signs[g][i / 8] >> (i % 8) & 1 {
                1 => -magnitude,
                _ => magnitude,
            }
        };
        let scale = f16_to_f32(u16::from_le_bytes(self.scale));
        Group {
            quants: std::array::from_fn(quant),
            scale: scale * f32::from(self.step(g)),
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
            let signs = V::spread(|lane| u32::from_le_bytes(block.signs[g + lane]), half);
            V::negate(magnitudes, signs)
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let units = V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale)));
            V::times(units, &chunk.each_group(Self::step))
        }
    }
}
