//! Q2_0: integers of two bits less 1, times a scale for 64 weights.
//!
//! ```text
//! 0    2   scale   f16
//! 2   16   quants  bits 2 i and 2 i + 1 of byte j are weight 4 j + i; less one
//!
//! weight   scale × (q − 1)
//! ```

use super::{Block, Blocks, Format, Group, Vector, tq2_0::LESS_ONE};
use crate::{groups::GROUP, math::f16_to_f32};

/// Groups of a block.
const GROUPS: usize = 2;

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ2_0 {
    scale: [u8; 2],
    // group, half, eight weights
    quants: [[[[u8; 2]; 2]; 2]; GROUPS],
}
const _: () = assert!(size_of::<BlockQ2_0>() == 18 && align_of::<BlockQ2_0>() == 1);

/// Eight fields of two bits, each in a byte.
#[inline(always)]
const fn in_bytes(fields: [u8; 2]) -> u64 {
    let fields = u16::from_le_bytes(fields) as u64;
    // Each step halves the runs of bits and doubles the gaps between them.
    let fields = (fields | fields << 24) & 0x0000_00ff_0000_00ff;
    let fields = (fields | fields << 12) & 0x000f_000f_000f_000f;
    (fields | fields << 6) & 0x0303_0303_0303_0303
}

impl Format for BlockQ2_0 {
    const BLOCK: Block = Block::Q2_0;
    const LIKE: Block = Block::Q8_0;
    const ELEMENTS: usize = GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 2;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, g: usize) -> Group {
        let bytes: &[u8; 8] = bytemuck::cast_ref(&self.quants[g]);
        let quant = |i: usize| (bytes[i / 4] >> (2 * (i % 4)) & 3).cast_signed() - 1;
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
            let fields = V::words(|lane| {
                let (block, g) = chunk.of_group(first + lane);
                block.quants[g][half].map(in_bytes)
            });
            V::lookup(&LESS_ONE, fields)
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale))) }
    }
}
