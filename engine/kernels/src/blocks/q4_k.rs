//! Q4_K: nibbles times a scale less a minimum, both in six bits for 32 weights.
//!
//! ```text
//!  0    2   scale    f16, of the scales
//!  2    2   minimum  f16, of the minimums
//!  4   12   packed   scales and minimums of eight groups, see `six_bits.rs`
//! 16  128   quants   byte 32 k + j holds weight j of group 2 k in its low nibble, and of group 2 k + 1
//!                    in its high one
//!
//! weight   (scale × scale of the group) × nibble − minimum × minimum of the group
//! ```

use super::{Block, Blocks, Format, Group, Vector, six_bits::six_bits, vector::half_of};
use crate::{
    groups::{GROUP, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ4K {
    scale: [u8; 2],
    minimum: [u8; 2],
    packed: [u8; 12],
    quants: [u8; 4 * GROUP],
}
const _: () = assert!(size_of::<BlockQ4K>() == 144 && align_of::<BlockQ4K>() == 1);

impl Format for BlockQ4K {
    const BLOCK: Block = Block::Q4K;
    const LIKE: Block = Block::Q4_1;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = false;
    const MOST: u8 = 15;
    const RAISED: u8 = 0;
    const MINS: bool = true;
    const STEPS: bool = false;

    fn group(&self, g: usize) -> Group {
        let [scales, mins] = six_bits(&self.packed);
        let unit = |half| f16_to_f32(u16::from_le_bytes(half));
        let quant = |i: usize| {
            let nibble = self.quants[g / 2 * GROUP + i] >> (4 * (g % 2)) & 15;
            nibble.cast_signed()
        };
        Group {
            quants: std::array::from_fn(quant),
            scale: unit(self.scale) * f32::from(scales[g]),
            minimum: unit(self.minimum) * f32::from(mins[g]),
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let bytes = V::load(|lane| half_of(&block.quants, (g + lane) / 2 * 2 + half));
            let nibbles = V::shift(bytes, |lane| -4 * ((g + lane) % 2) as i32);
            V::and(nibbles, V::splat(15))
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let [scales, _] = Self::factors::<V>(chunk);
            scales
        }
    }

    #[inline(always)]
    unsafe fn factors<V: Vector>(chunk: Blocks<'_, Self>) -> [V::Values; 2] {
        let [first, second] = [0, 1].map(|i| six_bits(&chunk.at(i).packed));
        let both = |part: usize| {
            let all = [first[part], second[part]];
            std::array::from_fn(|g| all[g / SUPER_GROUPS][g % SUPER_GROUPS])
        };
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let units = V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale)));
            let less = V::wide(&chunk.each(|block| u16::from_le_bytes(block.minimum)));
            [V::times(units, &both(0)), V::times(less, &both(1))]
        }
    }
}
