//! TQ1_0: five of −1, 0 and 1 in a byte, times a scale for 256 weights.
//!
//! ```text
//!  0   32   five    byte j has weights j + 32 n, n < 5
//! 32   16   more    byte j has weights 160 + j + 16 n, n < 5
//! 48    4   last    byte j has weights 240 + j + 4 n, n < 4
//! 52    2   scale   f16
//!
//! weight   scale × (q − 1), q the first digit to base three of the fraction byte × 3ⁿ mod 256 of 256
//! ```

use super::{Block, Blocks, Format, Group, Vector};
use crate::{
    groups::{GROUP, HALF, SUPER_GROUPS},
    math::f16_to_f32,
};

/// A stored block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct BlockTq1_0 {
    five: [[u8; HALF]; 2],
    more: [u8; HALF],
    last: [u8; 4],
    scale: [u8; 2],
}
const _: () = assert!(size_of::<BlockTq1_0>() == 54 && align_of::<BlockTq1_0>() == 1);

/// Powers of three.
const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

/// The digit of a byte that a power brings to the front, less one.
#[inline(always)]
const fn digit(byte: u8, power: u8) -> u8 {
    ((byte.wrapping_mul(power) as u16 * 3) >> 8).wrapping_sub(1) as u8
}

impl BlockTq1_0 {
    /// The weights of half `s` of a group, 16 halves in all.
    #[inline(always)]
    fn half(&self, s: usize) -> [u8; HALF] {
        match s {
            0..10 => self.five[s % 2].map(|byte| digit(byte, POWERS[s / 2])),
            10..15 => self.more.map(|byte| digit(byte, POWERS[s - 10])),
            _ => std::array::from_fn(|i| digit(self.last[i % 4], POWERS[i / 4])),
        }
    }
}

impl Format for BlockTq1_0 {
    const BLOCK: Block = Block::Tq1_0;
    const LIKE: Block = Block::Q8_0;
    const ELEMENTS: usize = SUPER_GROUPS * GROUP;
    const SIGNED: bool = true;
    const MOST: u8 = 1;
    const RAISED: u8 = 0;
    const MINS: bool = false;
    const STEPS: bool = false;

    fn group(&self, g: usize) -> Group {
        let quant = |i: usize| {
            let (byte, n) = match GROUP * g + i {
                i @ 0..160 => (self.five[i % 32 / HALF][i % HALF], i / 32),
                i @ 160..240 => (self.more[i % HALF], (i - 160) / HALF),
                i => (self.last[i % 4], (i - 240) / 4),
            };
            let fraction = u32::from(byte) * 3u32.pow(n as u32) % 256;
            (3 * fraction / 256) as i8 - 1
        };
        Group {
            quants: std::array::from_fn(quant),
            scale: f16_to_f32(u16::from_le_bytes(self.scale)),
            ..Group::PLAIN
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes {
        let (block, g) = chunk.of_group(first);
        let of = |lane: usize| block.half(2 * (g + lane) + half);
        let halves = [of(0), of(V::LANES - 1)];
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::load(|lane| &halves[lane]) }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::wide(&chunk.each(|block| u16::from_le_bytes(block.scale))) }
    }
}
