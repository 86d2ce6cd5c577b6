//! Matrix products with NEON, eight rows per panel. The interleaving of a panel depends on the
//! multiply instruction: plain NEON uses whole rows of a group, `sdot` four elements of each row,
//! `smmla` eight elements of two rows.

use std::arch::{aarch64::*, asm};

use super::{
    blocks::{self, BlockTile},
    form::Form,
    gemm::{self, Panel, Step, Tile, Tokens},
    neon::{BASE, DOTPROD, Neon, halves, products, sums_of_groups},
};
use crate::{Row, blocks::Format, dtype::GROUP};

const ROWS: usize = 8;

impl<const LEVEL: u8> Tile for Neon<LEVEL> {
    type Sums = [int32x4_t; 2];
    type Floats = [float32x4_t; 2];

    const ROWS: usize = ROWS;
    const PACK_FROM: [usize; 2] = [4, 4];
    // 8 accumulators, 8 chains, 8 activations, weights and scales of the 32 registers.
    const TOKENS: usize = 4;
    const PAIR_TOKENS: usize = 0;

    #[inline(always)]
    unsafe fn pack<F: Form>(rows: &[Row<'_>], panel: Panel) {
        // SAFETY: passed on from the caller.
        unsafe {
            match LEVEL {
                BASE => gemm::pack::<F, GROUP>(rows, panel),
                DOTPROD => gemm::pack::<F, 4>(rows, panel),
                _ => gemm::pack::<F, 8>(rows, panel),
            }
        }
    }

    #[inline(always)]
    unsafe fn sums<F: Form, const P: usize, const T: usize>(at: Step) -> [[[int32x4_t; 2]; T]; P] {
        let Step { group, apart, x, m } = at;
        // SAFETY: the caller guarantees the ISA, `P` packed groups, and `T` tokens.
        unsafe {
            let mut sums = [[[vdupq_n_s32(0); 2]; T]; P];
            for p in 0..P {
                let group = group.add(p * apart).cast();
                if F::STEPS {
                    sums[p] = sums_with_steps::<LEVEL, T>(group, x, m);
                    continue;
                }
                sums[p] = match LEVEL {
                    BASE => sums_by_rows::<T>(group, x, m),
                    DOTPROD => sums_by_sdot::<T>(group, x, m),
                    _ => sums_by_smmla::<T>(group, x, m),
                };
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn more(a: [int32x4_t; 2], b: [int32x4_t; 2]) -> [int32x4_t; 2] {
        // SAFETY: the caller guarantees NEON.
        unsafe { [vaddq_s32(a[0], b[0]), vaddq_s32(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn zero() -> [float32x4_t; 2] {
        // SAFETY: the caller guarantees NEON.
        unsafe { [vdupq_n_f32(0.0); 2] }
    }

    #[inline(always)]
    unsafe fn add(
        chain: [float32x4_t; 2],
        sums: [int32x4_t; 2],
        scales: *const f32,
        scale: f32,
    ) -> [float32x4_t; 2] {
        // SAFETY: the caller guarantees NEON and 8 scales.
        unsafe {
            let mut chain = chain;
            for i in 0..2 {
                let scale = vmulq_n_f32(vld1q_f32(scales.add(4 * i)), scale);
                chain[i] = vfmaq_f32(chain[i], vcvtq_f32_s32(sums[i]), scale);
            }
            chain
        }
    }

    #[inline(always)]
    unsafe fn less(chain: [float32x4_t; 2], mins: *const f32, sum: f32) -> [float32x4_t; 2] {
        // SAFETY: the caller guarantees NEON and 8 minimums.
        unsafe {
            let mut chain = chain;
            for i in 0..2 {
                chain[i] = vfmsq_n_f32(chain[i], vld1q_f32(mins.add(4 * i)), sum);
            }
            chain
        }
    }

    #[inline(always)]
    unsafe fn plus(a: [float32x4_t; 2], b: [float32x4_t; 2]) -> [float32x4_t; 2] {
        // SAFETY: the caller guarantees NEON.
        unsafe { [vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn store(values: [float32x4_t; 2], to: *mut f32) {
        // SAFETY: the caller guarantees NEON and room for 8 values.
        unsafe {
            vst1q_f32(to, values[0]);
            vst1q_f32(to.add(4), values[1]);
        }
    }
}

impl<const LEVEL: u8> BlockTile for Neon<LEVEL> {
    type Few = Self;

    const FROM: usize = 4;

    #[inline(always)]
    unsafe fn pack_blocks<B: Format>(rows: &[Row<'_>], panel: Panel) {
        // SAFETY: passed on from the caller.
        unsafe {
            match LEVEL {
                _ if B::STEPS => blocks::pack::<Self, B, GROUP, ROWS>(rows, panel),
                BASE => blocks::pack::<Self, B, GROUP, ROWS>(rows, panel),
                DOTPROD => blocks::pack::<Self, B, 4, ROWS>(rows, panel),
                _ => blocks::pack::<Self, B, 8, ROWS>(rows, panel),
            }
        }
    }
}

/// As [`sums_by_rows`], with the steps of each row's halves behind its scale.
///
/// # Safety
/// As for [`Tile::sums`] of a [`Neon`], with one panel.
#[inline(always)]
unsafe fn sums_with_steps<const LEVEL: u8, const T: usize>(
    group: *const i8,
    x: Tokens,
    m: usize,
) -> [[int32x4_t; 2]; T] {
    // SAFETY: the caller guarantees the ISA, a packed group with steps, and `T` tokens.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); 2]; T];
        let zero = vdupq_n_s8(0);
        let steps = group.add(ROWS * (GROUP + size_of::<f32>())).cast::<i32>();
        for t in 0..T {
            let (x_low, x_high) = halves(&*x.chunk(t), m);
            for half in 0..2 {
                let mut parts = [[vdupq_n_s32(0); 4]; 2];
                for r in 0..4 {
                    let from = group.add((4 * half + r) * GROUP);
                    let (low, high) = (vld1q_s8(from), vld1q_s8(from.add(GROUP / 2)));
                    parts[0][r] = products::<LEVEL>(low, x_low, zero, zero);
                    parts[1][r] = products::<LEVEL>(high, x_high, zero, zero);
                }
                let (first, second) = (steps.add(4 * half), steps.add(ROWS + 4 * half));
                let sum = vmulq_s32(sums_of_groups(parts[0]), vld1q_s32(first));
                sums[t][half] = vmlaq_s32(sum, sums_of_groups(parts[1]), vld1q_s32(second));
            }
        }
        sums
    }
}

/// Every row's 32 elements lie together.
///
/// # Safety
/// As for [`Tile::sums`] of a [`Neon`] of level [`BASE`], with one panel.
#[inline(always)]
unsafe fn sums_by_rows<const T: usize>(
    group: *const i8,
    x: Tokens,
    m: usize,
) -> [[int32x4_t; 2]; T] {
    // SAFETY: the caller guarantees NEON, a packed group, and `T` tokens.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); 2]; T];
        for t in 0..T {
            let (x_low, x_high) = halves(&*x.chunk(t), m);
            for half in 0..2 {
                let mut parts = [vdupq_n_s32(0); 4];
                for (r, part) in parts.iter_mut().enumerate() {
                    let from = group.add((4 * half + r) * GROUP);
                    let (low, high) = (vld1q_s8(from), vld1q_s8(from.add(GROUP / 2)));
                    *part = products::<BASE>(low, x_low, high, x_high);
                }
                sums[t][half] = sums_of_groups(parts);
            }
        }
        sums
    }
}

/// Four elements of each of the eight rows, then the next four.
///
/// # Safety
/// As for [`Tile::sums`] of a [`Neon`] of level [`DOTPROD`], with one panel.
#[inline(always)]
unsafe fn sums_by_sdot<const T: usize>(
    group: *const i8,
    x: Tokens,
    m: usize,
) -> [[int32x4_t; 2]; T] {
    // SAFETY: the caller guarantees the ISA, a packed group, and `T` tokens.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); 2]; T];
        let mut activations = [(vdupq_n_s8(0), vdupq_n_s8(0)); T];
        for t in 0..T {
            activations[t] = halves(&*x.chunk(t), m);
        }
        macro_rules! step {
            ($half:tt, $lane:literal) => {
                let from = group.add(($half * 4 + $lane) * 4 * ROWS);
                let (upper, lower) = (vld1q_s8(from), vld1q_s8(from.add(16)));
                for t in 0..T {
                    let x = activations[t].$half;
                    sums[t][0] = sdot_lane::<$lane>(sums[t][0], upper, x);
                    sums[t][1] = sdot_lane::<$lane>(sums[t][1], lower, x);
                }
            };
        }
        step!(0, 0);
        step!(0, 1);
        step!(0, 2);
        step!(0, 3);
        step!(1, 0);
        step!(1, 1);
        step!(1, 2);
        step!(1, 3);
        sums
    }
}

/// Eight elements of rows 0 and 1, of rows 2 and 3, …, then the next eight.
///
/// # Safety
/// As for [`Tile::sums`] of a [`Neon`] with products of byte matrices, with one panel.
#[inline(always)]
unsafe fn sums_by_smmla<const T: usize>(
    group: *const i8,
    x: Tokens,
    m: usize,
) -> [[int32x4_t; 2]; T] {
    // SAFETY: the caller guarantees the ISA, a packed group, and `T` tokens.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); 2]; T];
        let mut t = 0;
        while t < T {
            // An odd last token is paired with itself.
            let next = if t + 1 < T { t + 1 } else { t };
            let (a, b) = (halves(&*x.chunk(t), m), halves(&*x.chunk(next), m));
            let steps = [
                pair::<0>(a.0, b.0),
                pair::<1>(a.0, b.0),
                pair::<0>(a.1, b.1),
                pair::<1>(a.1, b.1),
            ];
            // Rows 2i and 2i + 1: row × token.
            let mut squares = [vdupq_n_s32(0); ROWS / 2];
            for (k, x) in steps.into_iter().enumerate() {
                for (i, square) in squares.iter_mut().enumerate() {
                    let weights = vld1q_s8(group.add((k * ROWS + 2 * i) * 8));
                    *square = smmla(*square, weights, x);
                }
            }
            for half in 0..2 {
                let (first, second) = (squares[2 * half], squares[2 * half + 1]);
                sums[next][half] = vuzp2q_s32(first, second);
                sums[t][half] = vuzp1q_s32(first, second);
            }
            t += 2;
        }
        sums
    }
}

/// Eight bytes of `a`, then eight of `b`: the first ones or the last ones.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn pair<const LAST: u8>(a: int8x16_t, b: int8x16_t) -> int8x16_t {
    // SAFETY: the caller guarantees NEON.
    unsafe {
        let (a, b) = (vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b));
        vreinterpretq_s8_s64(if LAST == 0 {
            vzip1q_s64(a, b)
        } else {
            vzip2q_s64(a, b)
        })
    }
}

/// Lane `i` of `sum` plus the dot product of bytes `4i..4i + 4` of `a` and bytes
/// `4 · LANE..4 · LANE + 4` of `b`. The intrinsic is not stable yet.
///
/// # Safety
/// The CPU has NEON and dot products of bytes.
#[inline(always)]
unsafe fn sdot_lane<const LANE: u8>(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: the caller guarantees the extension; only the named registers are touched.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.4b[{lane}]",
            sum = inlateout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// `sum` plus the 2 × 8 matrix `a` times the transposed 2 × 8 matrix `b`. The intrinsic
/// is not stable yet.
///
/// # Safety
/// The CPU has NEON and products of byte matrices.
#[inline(always)]
unsafe fn smmla(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: as in `sdot_lane`.
    unsafe {
        asm!(
            "smmla {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inlateout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}
