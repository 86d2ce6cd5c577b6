//! MXFP4: floats of one sign, two exponent and one mantissa bit, times a power of two.
//!
//! ```text
//! 0    1   exponent  e8m0
//! 1   16   quants    as in Q4_0
//!
//! weight   e2m1 × 2^(exponent − 127), here as twice the float times half the power
//! ```

use super::{Block, Blocks, Format, Group, Vector, vector::nibble};
use crate::groups::{E2M1_DOUBLED, GROUP, HALF, MXFP4_SCALES};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockMxfp4 {
    exponent: u8,
    quants: [u8; HALF],
}
const _: () = assert!(size_of::<BlockMxfp4>() == 17 && align_of::<BlockMxfp4>() == 1);

impl Format for BlockMxfp4 {
    const BLOCK: Block = Block::Mxfp4;
    const ELEMENTS: usize = GROUP;
    const FLOATS: bool = true;
    const SIGNED: bool = true;
    const MOST: u8 = 12;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, _: usize) -> Group {
        let quant = |i: usize| {
            let nibble = self.quants[i % HALF] >> (4 * (i / HALF)) & 15;
            E2M1_DOUBLED[usize::from(nibble)]
        };
        Group {
            quants: std::array::from_fn(quant),
            scale: MXFP4_SCALES[usize::from(self.exponent)],
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let nibbles = nibble::<V>(V::load(|lane| &chunk.at(first + lane).quants), half);
            V::lookup(&E2M1_DOUBLED, nibbles)
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::values(&chunk.each(|block| MXFP4_SCALES[usize::from(block.exponent)])) }
    }
}
