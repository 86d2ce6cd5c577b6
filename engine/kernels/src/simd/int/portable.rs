//! Plain Rust for machines without a supported vector unit.

use super::{
    dot::padded,
    form::Form,
    gemm::{self, Panel, Step, Tile},
    quantize::Quantize,
    unit::Unit,
};
use crate::{
    activations::{CHUNK_GROUPS, HALF, SECOND_HALF, first_half},
    dtype::{E2M1_DOUBLED, GROUP, SUPER_BYTES},
    math::f16_to_f32,
    q4k,
    simd::portable::fused,
};

entry_points!([] Portable);

/// Arrays of 16.
pub(super) struct Portable;

/// Rows of a panel.
const ROWS: usize = 4;

impl Quantize for Portable {}

impl Unit for Portable {
    type Sums = [i32; CHUNK_GROUPS];
    type Chains = [f32; CHUNK_GROUPS];

    #[inline(always)]
    unsafe fn zero() -> Self::Chains {
        [0.0; CHUNK_GROUPS]
    }

    #[inline(always)]
    unsafe fn both(a: Self::Sums, b: Self::Sums) -> Self::Sums {
        std::array::from_fn(|g| a[g].wrapping_add(b[g]))
    }

    #[inline(always)]
    unsafe fn nibbles<F: Form>(quants: *const u8, groups: usize, x: &Chunk) -> Self::Sums {
        std::array::from_fn(|g| {
            if g >= groups {
                return 0;
            }
            // SAFETY: the caller guarantees `groups` of 16 bytes.
            let bytes = unsafe { quants.add(g * HALF).cast::<[u8; HALF]>().read_unaligned() };
            let (low, high) = halves(x, g);
            let mut sum = if F::CENTRED { x.by_8[g] } else { 0 };
            for i in 0..HALF {
                let [first, second] =
                    [bytes[i] & 15, bytes[i] >> 4].map(|nibble| match F::FLOATS {
                        true => i32::from(E2M1_DOUBLED[usize::from(nibble)]),
                        false => i32::from(nibble),
                    });
                sum += first * i32::from(low[i]) + second * i32::from(high[i]);
            }
            sum
        })
    }

    #[inline(always)]
    unsafe fn q8(quants: *const u8, groups: usize, x: &Chunk) -> Self::Sums {
        std::array::from_fn(|g| {
            if g >= groups {
                return 0;
            }
            // SAFETY: the caller guarantees `groups` of 32 bytes.
            let bytes = unsafe { quants.add(g * GROUP).cast::<[i8; GROUP]>().read_unaligned() };
            let (low, high) = halves(x, g);
            let mut sum = 0;
            for i in 0..HALF {
                sum += i32::from(bytes[i]) * i32::from(low[i]);
                sum += i32::from(bytes[HALF + i]) * i32::from(high[i]);
            }
            sum
        })
    }

    #[inline(always)]
    unsafe fn scales(scales: *const u8, groups: usize) -> Self::Chains {
        // SAFETY: the caller guarantees `groups` f16.
        unsafe { padded(scales, groups) }.map(f16_to_f32)
    }

    #[inline(always)]
    unsafe fn chains(values: &[f32; CHUNK_GROUPS]) -> Self::Chains {
        *values
    }

    #[inline(always)]
    unsafe fn super_blocks(scales: *const u8) -> [Self::Chains; 2] {
        // SAFETY: the caller guarantees 32 bytes.
        let bytes = unsafe { scales.cast::<[u8; 2 * SUPER_BYTES]>().read_unaligned() };
        let (scales, mins) = q4k::factors(&bytes, CHUNK_GROUPS, 0, CHUNK_GROUPS);
        [scales, mins]
    }

    #[inline(always)]
    unsafe fn less(chains: Self::Chains, mins: Self::Chains, x: &Chunk) -> Self::Chains {
        std::array::from_fn(|g| fused(-mins[g], x.sums[g], chains[g]))
    }

    #[inline(always)]
    unsafe fn add(
        chains: Self::Chains,
        sums: Self::Sums,
        scales: Self::Chains,
        x: &Chunk,
    ) -> Self::Chains {
        std::array::from_fn(|g| fused(sums[g] as f32, scales[g] * x.scales[g], chains[g]))
    }

    #[inline(always)]
    unsafe fn fold(mut chains: Self::Chains) -> f32 {
        for width in [8, 4, 2, 1] {
            for j in 0..width {
                chains[j] += chains[j + width];
            }
        }
        chains[0]
    }

    #[inline(always)]
    fn prefetch(_line: *const u8) {}
}

/// The two halves of group `g`.
#[inline(always)]
fn halves(x: &Chunk, g: usize) -> (&[i8], &[i8]) {
    let at = first_half(g);
    (
        &x.quants[at..at + HALF],
        &x.quants[at + SECOND_HALF..at + SECOND_HALF + HALF],
    )
}

/// A packed group is the quants of one row after the other.
impl Tile for Portable {
    type Sums = [i32; ROWS];
    type Floats = [f32; ROWS];

    const ROWS: usize = ROWS;
    const PACK_FROM: [usize; 2] = [2, 2];
    const TOKENS: usize = 4;
    const PAIR_TOKENS: usize = 0;

    unsafe fn pack<F: Form>(rows: &[Row<'_>], panel: Panel) {
        // SAFETY: passed on from the caller.
        unsafe { gemm::pack::<F, GROUP>(rows, panel) }
    }

    #[inline(always)]
    unsafe fn sums<F: Form, const P: usize, const T: usize>(at: Step) -> [[[i32; ROWS]; T]; P] {
        let Step { group, apart, x, m } = at;
        std::array::from_fn(|p| {
            // SAFETY: the caller guarantees `P` packed groups.
            let weights = unsafe { &*group.add(p * apart).cast::<[[i8; GROUP]; ROWS]>() };
            std::array::from_fn(|t| {
                // SAFETY: the caller guarantees `T` tokens.
                let (low, high) = halves(unsafe { &*x.chunk(t) }, m);
                std::array::from_fn(|r| {
                    let mut sum = 0;
                    for i in 0..HALF {
                        sum += i32::from(weights[r][i]) * i32::from(low[i]);
                        sum += i32::from(weights[r][HALF + i]) * i32::from(high[i]);
                    }
                    sum
                })
            })
        })
    }

    #[inline(always)]
    unsafe fn more(a: [i32; ROWS], b: [i32; ROWS]) -> [i32; ROWS] {
        std::array::from_fn(|r| a[r].wrapping_add(b[r]))
    }

    #[inline(always)]
    unsafe fn zero() -> [f32; ROWS] {
        [0.0; ROWS]
    }

    #[inline(always)]
    unsafe fn add(
        chain: [f32; ROWS],
        sums: [i32; ROWS],
        scales: *const f32,
        scale: f32,
    ) -> [f32; ROWS] {
        // SAFETY: the caller guarantees a scale for each row.
        let scales = unsafe { *scales.cast::<[f32; ROWS]>() };
        std::array::from_fn(|r| fused(sums[r] as f32, scales[r] * scale, chain[r]))
    }

    #[inline(always)]
    unsafe fn less(chain: [f32; ROWS], mins: *const f32, sum: f32) -> [f32; ROWS] {
        // SAFETY: the caller guarantees a minimum for each row.
        let mins = unsafe { *mins.cast::<[f32; ROWS]>() };
        std::array::from_fn(|r| fused(-mins[r], sum, chain[r]))
    }

    #[inline(always)]
    unsafe fn plus(a: [f32; ROWS], b: [f32; ROWS]) -> [f32; ROWS] {
        std::array::from_fn(|r| a[r] + b[r])
    }

    #[inline(always)]
    unsafe fn store(values: [f32; ROWS], to: *mut f32) {
        // SAFETY: the caller guarantees room for all rows.
        unsafe { to.cast::<[f32; ROWS]>().write_unaligned(values) }
    }
}
