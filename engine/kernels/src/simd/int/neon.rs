//! NEON: 16 chains in four registers. Plain NEON multiplies bytes to 16 bits and adds
//! pairs; the dot product extension does four products and their sum at once.

use std::arch::{aarch64::*, asm};

use super::{
    blocks::BlockUnit,
    dot::padded,
    form::Form,
    quantize::Quantize,
    unit::{Chunks, Unit},
};
use crate::{
    Chunk,
    activations::{CHUNK_GROUPS, HALF, SECOND_HALF, first_half},
    blocks::{Blocks, Format, Vector},
    cpu::with_features,
    dtype::{E2M1_DOUBLED, GROUP, SUPER_BYTES},
    simd::{neon::widen_f16, prefetch},
};

pub(super) mod base {
    super::with_features!(neon, entry_points, super::Neon<{ super::BASE }>);
    super::with_features!(neon, block_entry_points, super::Neon<{ super::BASE }>);
}
pub(super) mod dotprod {
    super::with_features!(neon_dotprod, entry_points, super::Neon<{ super::DOTPROD }>);
    super::with_features!(
        neon_dotprod,
        block_entry_points,
        super::Neon<{ super::DOTPROD }>
    );
}
pub(super) mod i8mm {
    super::with_features!(neon_i8mm, entry_points, super::Neon<{ super::I8MM }>);
    super::with_features!(neon_i8mm, block_entry_points, super::Neon<{ super::I8MM }>);
}

/// Extensions [`Neon`] may use: none, dot products, dot products and matrix products.
pub(super) const BASE: u8 = 0;
pub(super) const DOTPROD: u8 = 1;
pub(super) const I8MM: u8 = 2;

/// Registers of four lanes, with the extensions of a level.
pub(super) struct Neon<const LEVEL: u8>;

impl<const LEVEL: u8> Quantize for Neon<LEVEL> {}

impl<const LEVEL: u8> Unit for Neon<LEVEL> {
    type Sums = [int32x4_t; 4];
    type Chains = [float32x4_t; 4];

    #[inline(always)]
    unsafe fn zero() -> [float32x4_t; 4] {
        // SAFETY: the caller guarantees NEON.
        unsafe { [vdupq_n_f32(0.0); 4] }
    }

    #[inline(always)]
    unsafe fn both(a: [int32x4_t; 4], b: [int32x4_t; 4]) -> [int32x4_t; 4] {
        // SAFETY: the caller guarantees NEON.
        unsafe {
            let mut sums = a;
            for i in 0..CHUNK_GROUPS / 4 {
                sums[i] = vaddq_s32(a[i], b[i]);
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn nibbles<F: Form>(quants: *const u8, groups: usize, x: &Chunk) -> [int32x4_t; 4] {
        // SAFETY: the caller guarantees the ISA and the groups; the chunk has all of them.
        unsafe {
            let mut sums = [vdupq_n_s32(0); 4];
            for (quad, sum) in sums.iter_mut().enumerate() {
                let mut parts = [vdupq_n_s32(0); 4];
                for (i, part) in parts.iter_mut().enumerate() {
                    let g = 4 * quad + i;
                    if g < groups {
                        let bytes = vld1q_u8(quants.add(g * HALF));
                        let low = numbers::<F>(vandq_u8(bytes, vdupq_n_u8(15)));
                        let high = numbers::<F>(vshrq_n_u8::<4>(bytes));
                        let (x_low, x_high) = halves(x, g);
                        *part = products::<LEVEL>(low, x_low, high, x_high);
                    }
                }
                *sum = sums_of_groups(parts);
                if F::CENTRED {
                    *sum = vaddq_s32(*sum, vld1q_s32(&x.by_8[4 * quad]));
                }
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn q8(quants: *const u8, groups: usize, x: &Chunk) -> [int32x4_t; 4] {
        // SAFETY: as in `q4`.
        unsafe {
            let mut sums = [vdupq_n_s32(0); 4];
            for (quad, sum) in sums.iter_mut().enumerate() {
                let mut parts = [vdupq_n_s32(0); 4];
                for (i, part) in parts.iter_mut().enumerate() {
                    let g = 4 * quad + i;
                    if g < groups {
                        let from = quants.add(g * GROUP).cast();
                        let (low, high) = (vld1q_s8(from), vld1q_s8(from.add(HALF)));
                        let (x_low, x_high) = halves(x, g);
                        *part = products::<LEVEL>(low, x_low, high, x_high);
                    }
                }
                *sum = sums_of_groups(parts);
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn scales(scales: *const u8, groups: usize) -> [float32x4_t; 4] {
        // SAFETY: the caller guarantees NEON and the scales.
        unsafe {
            let halves = padded(scales, groups);
            let mut wide = [vdupq_n_f32(0.0); 4];
            for i in 0..CHUNK_GROUPS / 4 {
                wide[i] = widen_f16(vld1_u16(&halves[4 * i]));
            }
            wide
        }
    }

    #[inline(always)]
    unsafe fn chains(values: &[f32; CHUNK_GROUPS]) -> [float32x4_t; 4] {
        // SAFETY: the caller guarantees NEON; the values are four registers long.
        unsafe {
            [
                vld1q_f32(&values[0]),
                vld1q_f32(&values[4]),
                vld1q_f32(&values[8]),
                vld1q_f32(&values[12]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn super_blocks(scales: *const u8) -> [[float32x4_t; 4]; 2] {
        // The two bytes that hold entry g, and how far to move it into the upper twelve bits.
        const ORDER: [u8; 16] = [4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11, 12, 13, 14, 14, 15];
        const SHIFTS: [i16; 8] = [4, 0, 4, 0, 4, 0, 4, 0];
        // SAFETY: the caller guarantees NEON and 32 bytes.
        unsafe {
            let (order, shifts) = (vld1q_u8(ORDER.as_ptr()), vld1q_s16(SHIFTS.as_ptr()));
            let mut factors = [[vdupq_n_f32(0.0); 4]; 2];
            for block in 0..2 {
                let bytes = vld1q_u8(scales.add(block * SUPER_BYTES));
                let units = widen_f16(vreinterpret_u16_u8(vget_low_u8(bytes)));
                let pairs = vreinterpretq_u16_u8(vqtbl1q_u8(bytes, order));
                let upper = vshlq_u16(pairs, shifts);
                let scales = vandq_u16(vshrq_n_u16::<4>(upper), vdupq_n_u16(63));
                let mins = vshrq_n_u16::<10>(upper);
                let (d, dmin) = (vgetq_lane_f32::<0>(units), vgetq_lane_f32::<1>(units));
                for (part, (unit, six)) in [(d, scales), (dmin, mins)].into_iter().enumerate() {
                    let low = vcvtq_f32_u32(vmovl_u16(vget_low_u16(six)));
                    let high = vcvtq_f32_u32(vmovl_high_u16(six));
                    factors[part][2 * block] = vmulq_n_f32(low, unit);
                    factors[part][2 * block + 1] = vmulq_n_f32(high, unit);
                }
            }
            factors
        }
    }

    #[inline(always)]
    unsafe fn less(
        chains: [float32x4_t; 4],
        mins: [float32x4_t; 4],
        x: &Chunk,
    ) -> [float32x4_t; 4] {
        // SAFETY: the caller guarantees NEON; the chunk has 16 sums.
        unsafe {
            let mut chains = chains;
            for i in 0..CHUNK_GROUPS / 4 {
                chains[i] = vfmsq_f32(chains[i], mins[i], vld1q_f32(&x.sums[4 * i]));
            }
            chains
        }
    }

    #[inline(always)]
    unsafe fn add(
        chains: [float32x4_t; 4],
        sums: [int32x4_t; 4],
        scales: [float32x4_t; 4],
        x: &Chunk,
    ) -> [float32x4_t; 4] {
        // SAFETY: the caller guarantees NEON; the chunk has 16 scales.
        unsafe {
            let mut chains = chains;
            for i in 0..CHUNK_GROUPS / 4 {
                let scale = vmulq_f32(scales[i], vld1q_f32(&x.scales[4 * i]));
                chains[i] = vfmaq_f32(chains[i], vcvtq_f32_s32(sums[i]), scale);
            }
            chains
        }
    }

    #[inline(always)]
    unsafe fn fold(chains: [float32x4_t; 4]) -> f32 {
        // SAFETY: the caller guarantees NEON.
        unsafe {
            let [a, b, c, d] = chains;
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d)); // j + 8, + 4
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }

    #[inline(always)]
    fn prefetch(line: *const u8) {
        prefetch(line);
    }
}

impl<const LEVEL: u8> Vector for Neon<LEVEL> {
    type Bytes = uint8x16_t;
    type Values = [float32x4_t; 4];

    const LANES: usize = 1;

    #[inline(always)]
    unsafe fn load<'a>(at: impl Fn(usize) -> &'a [u8; HALF]) -> uint8x16_t {
        // SAFETY: the caller guarantees NEON; there are 16 bytes.
        unsafe { vld1q_u8(at(0).as_ptr()) }
    }

    #[inline(always)]
    unsafe fn splat(byte: u8) -> uint8x16_t {
        // SAFETY: the caller guarantees NEON.
        unsafe { vdupq_n_u8(byte) }
    }

    #[inline(always)]
    unsafe fn and(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        // SAFETY: the caller guarantees NEON.
        unsafe { vandq_u8(a, b) }
    }

    #[inline(always)]
    unsafe fn or(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        // SAFETY: the caller guarantees NEON.
        unsafe { vorrq_u8(a, b) }
    }

    #[inline(always)]
    unsafe fn shift(bytes: uint8x16_t, left: impl Fn(usize) -> i32) -> uint8x16_t {
        // SAFETY: the caller guarantees NEON. A negative count moves bits to the right.
        unsafe { vshlq_u8(bytes, vdupq_n_s8(left(0) as i8)) }
    }

    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], at: uint8x16_t) -> uint8x16_t {
        // SAFETY: the caller guarantees NEON; the table is 16 bytes long.
        unsafe { vreinterpretq_u8_s8(vqtbl1q_s8(vld1q_s8(table.as_ptr()), at)) }
    }

    #[inline(always)]
    unsafe fn spread(words: impl Fn(usize) -> u32, half: usize) -> uint8x16_t {
        const BITS: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
        let [a, b, c, d] = words(0).to_le_bytes();
        let [first, second] = [[a, b], [c, d]][half];
        // SAFETY: the caller guarantees NEON; the table is 16 bytes long.
        unsafe {
            let bytes = vcombine_u8(vdup_n_u8(first), vdup_n_u8(second));
            vtstq_u8(bytes, vld1q_u8(BITS.as_ptr()))
        }
    }

    #[inline(always)]
    unsafe fn words(of: impl Fn(usize) -> [u64; 2]) -> uint8x16_t {
        let [low, high] = of(0);
        // SAFETY: the caller guarantees NEON.
        unsafe { vcombine_u8(vcreate_u8(low), vcreate_u8(high)) }
    }

    #[inline(always)]
    unsafe fn plus(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        // SAFETY: the caller guarantees NEON.
        unsafe { vaddq_u8(a, b) }
    }

    #[inline(always)]
    unsafe fn negate(bytes: uint8x16_t, by: uint8x16_t) -> uint8x16_t {
        // SAFETY: the caller guarantees NEON.
        unsafe { vsubq_u8(veorq_u8(bytes, by), by) }
    }

    #[inline(always)]
    unsafe fn values(values: &[f32; CHUNK_GROUPS]) -> [float32x4_t; 4] {
        // SAFETY: passed on from the caller.
        unsafe { Self::chains(values) }
    }

    #[inline(always)]
    unsafe fn wide(halves: &[u16; CHUNK_GROUPS]) -> [float32x4_t; 4] {
        // SAFETY: passed on from the caller; all scales are there.
        unsafe { Self::scales(halves.as_ptr().cast(), CHUNK_GROUPS) }
    }

    #[inline(always)]
    unsafe fn times(values: [float32x4_t; 4], by: &[i8; CHUNK_GROUPS]) -> [float32x4_t; 4] {
        // SAFETY: passed on from the caller.
        unsafe {
            let by = Self::chains(&by.map(f32::from));
            let mut products = values;
            for i in 0..CHUNK_GROUPS / 4 {
                products[i] = vmulq_f32(values[i], by[i]);
            }
            products
        }
    }

    #[inline(always)]
    unsafe fn scaled(values: [float32x4_t; 4], by: f32) -> [float32x4_t; 4] {
        // SAFETY: the caller guarantees NEON.
        unsafe {
            let mut products = values;
            for product in &mut products {
                *product = vmulq_n_f32(*product, by);
            }
            products
        }
    }
}

impl<const LEVEL: u8> BlockUnit for Neon<LEVEL> {
    #[inline(always)]
    unsafe fn blocks<B: Format, const T: usize>(
        chunk: Blocks<'_, B>,
        xs: Chunks<T>,
    ) -> [[int32x4_t; 4]; T] {
        // SAFETY: the caller guarantees the ISA and the chunks.
        unsafe {
            let mut sums = [[vdupq_n_s32(0); 4]; T];
            let (zero, raised) = (vdupq_n_s8(0), vdupq_n_u8(B::RAISED));
            let steps = B::steps(chunk);
            for quad in 0..CHUNK_GROUPS / 4 {
                let mut parts = [[vdupq_n_s32(0); 4]; T];
                for i in 0..4 {
                    let g = 4 * quad + i;
                    let low = vsubq_u8(B::unpack::<Self>(chunk, g, 0), raised);
                    let high = vsubq_u8(B::unpack::<Self>(chunk, g, 1), raised);
                    let (low, high) = (vreinterpretq_s8_u8(low), vreinterpretq_s8_u8(high));
                    for t in 0..T {
                        let (x_low, x_high) = halves(&*xs[t], g);
                        parts[t][i] = if B::STEPS {
                            let first = products::<LEVEL>(low, x_low, zero, zero);
                            let second = products::<LEVEL>(high, x_high, zero, zero);
                            let first = vmulq_n_s32(first, i32::from(steps[2 * g]));
                            vmlaq_n_s32(first, second, i32::from(steps[2 * g + 1]))
                        } else {
                            products::<LEVEL>(low, x_low, high, x_high)
                        };
                    }
                }
                for t in 0..T {
                    sums[t][quad] = sums_of_groups(parts[t]);
                }
            }
            sums
        }
    }
}

/// The numbers that nibbles, each in a byte, stand for: doubled floats, or themselves.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn numbers<F: Form>(nibbles: uint8x16_t) -> int8x16_t {
    // SAFETY: the caller guarantees NEON; the table is 16 bytes long.
    unsafe {
        match F::FLOATS {
            true => vqtbl1q_s8(vld1q_s8(E2M1_DOUBLED.as_ptr()), nibbles),
            false => vreinterpretq_s8_u8(nibbles),
        }
    }
}

/// The activations of group `g`.
///
/// # Safety
/// The CPU has NEON, and `g < 16`.
#[inline(always)]
pub(super) unsafe fn halves(x: &Chunk, g: usize) -> (int8x16_t, int8x16_t) {
    // SAFETY: the caller guarantees NEON; both halves lie in the chunk.
    unsafe {
        let from = x.quants.as_ptr().add(first_half(g));
        (vld1q_s8(from), vld1q_s8(from.add(SECOND_HALF)))
    }
}

/// The 32 products of a group, summed to four. No activation is −128, so two products fit in 16
/// bits: 2 × 128 × 127.
///
/// # Safety
/// The CPU has NEON, and dot products of bytes unless `LEVEL` is [`BASE`].
#[inline(always)]
pub(super) unsafe fn products<const LEVEL: u8>(
    low: int8x16_t,
    x_low: int8x16_t,
    high: int8x16_t,
    x_high: int8x16_t,
) -> int32x4_t {
    // SAFETY: the caller guarantees the ISA.
    unsafe {
        if LEVEL == BASE {
            let a = vmull_s8(vget_low_s8(low), vget_low_s8(x_low));
            let b = vmull_s8(vget_low_s8(high), vget_low_s8(x_high));
            let a = vmlal_high_s8(a, low, x_low);
            let b = vmlal_high_s8(b, high, x_high);
            vpadalq_s16(vpaddlq_s16(a), b)
        } else {
            sdot(sdot(vdupq_n_s32(0), low, x_low), high, x_high)
        }
    }
}

/// Lane `i` of `sum` plus the dot product of bytes `4i..4i + 4`. The intrinsic is not
/// stable yet.
///
/// # Safety
/// The CPU has NEON and dot products of bytes.
#[inline(always)]
unsafe fn sdot(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: the caller guarantees the extension; only the named registers are touched.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inlateout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Part `i` holds the four partial sums of group `i`; lane `i` of the result is their sum.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
pub(super) unsafe fn sums_of_groups(parts: [int32x4_t; 4]) -> int32x4_t {
    // SAFETY: the caller guarantees NEON.
    unsafe {
        let [a, b, c, d] = parts;
        vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d))
    }
}

/// Scales and minimums of two whole super-blocks, for the kernels of floats.
///
/// # Safety
/// The CPU has NEON, and `scales` is valid for reads of 32 bytes.
#[inline(always)]
pub(in crate::simd) unsafe fn super_blocks(scales: *const u8) -> [[f32; CHUNK_GROUPS]; 2] {
    let mut out = [[0.0; CHUNK_GROUPS]; 2];
    // SAFETY: the caller guarantees the instruction set and 32 bytes; a store fills 4 floats.
    unsafe {
        for (out, factors) in out.iter_mut().zip(<Neon<0> as Unit>::super_blocks(scales)) {
            for (out, factors) in out.chunks_exact_mut(4).zip(factors) {
                vst1q_f32(out.as_mut_ptr(), factors);
            }
        }
    }
    out
}
