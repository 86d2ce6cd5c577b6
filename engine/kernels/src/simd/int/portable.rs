//! Plain Rust for machines without a supported vector unit.

use super::dot::Unit;
use crate::{
    activations::{CHUNK_GROUPS, SECOND_HALF, first_half},
    dtype::GROUP,
    simd::portable::{f16_to_f32, fused},
};

entry_points!([] Portable);

/// Arrays of 16.
pub(super) struct Portable;

const HALF: usize = GROUP / 2;

impl Unit for Portable {
    type Sums = [i32; CHUNK_GROUPS];
    type Chains = [f32; CHUNK_GROUPS];

    #[inline(always)]
    unsafe fn zero() -> Self::Chains {
        [0.0; CHUNK_GROUPS]
    }

    #[inline(always)]
    unsafe fn q4(quants: *const u8, x: &Chunk) -> Self::Sums {
        std::array::from_fn(|g| {
            // SAFETY: the caller guarantees 16 groups of 16 bytes.
            let bytes = unsafe { quants.add(g * HALF).cast::<[u8; HALF]>().read_unaligned() };
            let (low, high) = halves(x, g);
            let mut sum = -8 * x.sums[g];
            for i in 0..HALF {
                sum += i32::from(bytes[i] & 15) * i32::from(low[i]);
                sum += i32::from(bytes[i] >> 4) * i32::from(high[i]);
            }
            sum
        })
    }

    #[inline(always)]
    unsafe fn q8(quants: *const u8, x: &Chunk) -> Self::Sums {
        std::array::from_fn(|g| {
            // SAFETY: the caller guarantees 16 groups of 32 bytes.
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
    unsafe fn add(
        chains: Self::Chains,
        sums: Self::Sums,
        scales: *const u8,
        x: &Chunk,
    ) -> Self::Chains {
        // SAFETY: the caller guarantees 16 f16.
        let scales = unsafe { scales.cast::<[u16; CHUNK_GROUPS]>().read_unaligned() };
        std::array::from_fn(|g| {
            let scale = f16_to_f32(scales[g]) * x.scales[g];
            fused(sums[g] as f32, scale, chains[g])
        })
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
    unsafe fn prefetch(_line: *const u8) {}
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
