//! IQ4_XS: nibbles that name one of sixteen values, times a scale in six bits for 32 weights.
//!
//! ```text
//! 0    2   scale   f16
//! 2    2   high    bits 2 g and 2 g + 1 are the upper two of the scale of group g
//! 4    4   low     its other four, in nibble g % 2 of byte g / 2; 32 is to be taken from each
//! 8  128   quants  16 bytes for each group, as in Q4_0
//!
//! weight   (scale × (scale of the group − 32)) × VALUES[nibble]
//! ```

use super::{
    Block, Blocks, Format, Group, Vector,
    iq4_nl::VALUES,
    vector::{half_of, nibble},
};
use crate::{
    groups::{GROUP, HALF, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq4Xs {
    scale: [u8; 2],
    high: [u8; 2],
    low: [u8; 4],
    quants: [u8; 4 * GROUP],
}
const _: () = assert!(size_of::<BlockIq4Xs>() == 136 && align_of::<BlockIq4Xs>() == 1);

impl BlockIq4Xs {
    /// The scales of its groups.
    #[inline(always)]
    fn scales(&self) -> [i8; SUPER_GROUPS] {
        // Each step halves the runs of bits and doubles the gaps between them.
        let mut low = u64::from(u32::from_le_bytes(self.low));
        low = (low | low << 16) & 0x0000_ffff_0000_ffff;
        low = (low | low << 8) & 0x00ff_00ff_00ff_00ff;
        low = (low | low << 4) & 0x0f0f_0f0f_0f0f_0f0f;
        let mut high = u64::from(u16::from_le_bytes(self.high));
        high = (high | high << 24) & 0x0000_00ff_0000_00ff;
        high = (high | high << 12) & 0x000f_000f_000f_000f;
        high = (high | high << 6) & 0x0303_0303_0303_0303;
        let scales = (low | high << 4).to_le_bytes();
        scales.map(|scale| scale.cast_signed() - 32)
    }
}

impl Format for BlockIq4Xs {
    const BLOCK: Block = Block::Iq4Xs;
    const LIKE: Block = Block::Q8_0;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 127;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, g: usize) -> Group {
        let quant = |i: usize| {
            let nibble = self.quants[HALF * g + i % HALF] >> (4 * (i / HALF)) & 15;
            VALUES[usize::from(nibble)]
        };
        Group {
            quants: std::array::from_fn(quant),
            scale: f16_to_f32(u16::from_le_bytes(self.scale)) * f32::from(self.scales()[g]),
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let bytes = V::load(|lane| half_of(&block.quants, g + lane));
            V::lookup(&VALUES, nibble::<V>(bytes, half))
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let units = V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale)));
            let all = [0, 1].map(|i| chunk.at(i).scales());
            V::times(
                units,
                &std::array::from_fn(|g| all[g / SUPER_GROUPS][g % SUPER_GROUPS]),
            )
        }
    }
}
