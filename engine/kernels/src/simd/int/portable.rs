//! Plain Rust for machines without a supported vector unit.

use super::{
    blocks::{self, BlockTile, BlockUnit},
    dot::padded,
    form::Form,
    gemm::{self, Panel, Step, Tile},
    quantize::Quantize,
    unit::{Chunks, Unit},
};
use crate::{
    activations::{CHUNK_GROUPS, HALF, SECOND_HALF, first_half},
    blocks::{Blocks, Format, Vector},
    dtype::{E2M1_DOUBLED, GROUP, SUPER_BYTES},
    math::f16_to_f32,
    q4k,
    simd::portable::fused,
};

entry_points!([] Portable);
block_entry_points!([] Portable);

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

impl Vector for Portable {
    type Bytes = [u8; HALF];
    type Values = [f32; CHUNK_GROUPS];

    const LANES: usize = 1;

    #[inline(always)]
    unsafe fn load<'a>(at: impl Fn(usize) -> &'a [u8; HALF]) -> [u8; HALF] {
        *at(0)
    }

    #[inline(always)]
    unsafe fn splat(byte: u8) -> [u8; HALF] {
        [byte; HALF]
    }

    #[inline(always)]
    unsafe fn and(a: [u8; HALF], b: [u8; HALF]) -> [u8; HALF] {
        std::array::from_fn(|i| a[i] & b[i])
    }

    #[inline(always)]
    unsafe fn or(a: [u8; HALF], b: [u8; HALF]) -> [u8; HALF] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    unsafe fn shift(bytes: [u8; HALF], left: impl Fn(usize) -> i32) -> [u8; HALF] {
        match left(0) {
            left @ 0.. => bytes.map(|byte| byte << left),
            left => bytes.map(|byte| byte >> -left),
        }
    }

    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], at: [u8; HALF]) -> [u8; HALF] {
        at.map(|at| table[usize::from(at % 16)].cast_unsigned())
    }

    #[inline(always)]
    unsafe fn spread(words: impl Fn(usize) -> u32, half: usize) -> [u8; HALF] {
        let word = words(0);
        std::array::from_fn(|j| match word >> (HALF * half + j) & 1 {
            1 => 255,
            _ => 0,
        })
    }

    #[inline(always)]
    unsafe fn words(of: impl Fn(usize) -> [u64; 2]) -> [u8; HALF] {
        bytemuck::cast(of(0).map(u64::to_le_bytes))
    }

    #[inline(always)]
    unsafe fn plus(a: [u8; HALF], b: [u8; HALF]) -> [u8; HALF] {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    unsafe fn negate(bytes: [u8; HALF], by: [u8; HALF]) -> [u8; HALF] {
        std::array::from_fn(|i| (bytes[i] ^ by[i]).wrapping_sub(by[i]))
    }

    #[inline(always)]
    unsafe fn values(values: &[f32; CHUNK_GROUPS]) -> [f32; CHUNK_GROUPS] {
        *values
    }

    #[inline(always)]
    unsafe fn wide(halves: &[u16; CHUNK_GROUPS]) -> [f32; CHUNK_GROUPS] {
        halves.map(f16_to_f32)
    }

    #[inline(always)]
    unsafe fn times(values: [f32; CHUNK_GROUPS], by: &[i8; CHUNK_GROUPS]) -> [f32; CHUNK_GROUPS] {
        std::array::from_fn(|g| values[g] * f32::from(by[g]))
    }

    #[inline(always)]
    unsafe fn scaled(values: [f32; CHUNK_GROUPS], by: f32) -> [f32; CHUNK_GROUPS] {
        values.map(|value| value * by)
    }
}

impl BlockUnit for Portable {
    #[inline(always)]
    unsafe fn blocks<B: Format, const T: usize>(
        chunk: Blocks<'_, B>,
        xs: Chunks<T>,
    ) -> [[i32; CHUNK_GROUPS]; T] {
        let mut sums = [[0; CHUNK_GROUPS]; T];
        let steps = B::steps(chunk);
        for g in 0..CHUNK_GROUPS {
            for half in 0..2 {
                // SAFETY: there is nothing that the CPU may lack.
                let weights = unsafe { B::unpack::<Portable>(chunk, g, half) };
                for t in 0..T {
                    // SAFETY: the caller guarantees the chunks.
                    let (low, high) = halves(unsafe { &*xs[t] }, g);
                    let mut sum = 0;
                    for (&weight, &x) in weights.iter().zip([low, high][half]) {
                        let weight = weight.wrapping_sub(B::RAISED).cast_signed();
                        sum += i32::from(weight) * i32::from(x);
                    }
                    sums[t][g] += i32::from(steps[2 * g + half]) * sum;
                }
            }
        }
        sums
    }
}

impl BlockTile for Portable {
    type Few = Self;

    const FROM: usize = 2;

    unsafe fn pack_blocks<B: Format>(rows: &[Row<'_>], panel: Panel) {
        // SAFETY: passed on from the caller.
        unsafe { blocks::pack::<Portable, B, GROUP, ROWS>(rows, panel) }
    }
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
            let group = group.wrapping_add(p * apart);
            // SAFETY: the caller guarantees `P` packed groups.
            let weights = unsafe { &*group.cast::<[[i8; GROUP]; ROWS]>() };
            let steps: [[i32; ROWS]; 2] = match F::STEPS {
                // SAFETY: two steps of each row follow the scales.
                true => unsafe { *group.add(ROWS * (GROUP + size_of::<f32>())).cast() },
                false => [[1; ROWS]; 2],
            };
            std::array::from_fn(|t| {
                // SAFETY: the caller guarantees `T` tokens.
                let (low, high) = halves(unsafe { &*x.chunk(t) }, m);
                std::array::from_fn(|r| {
                    let (mut first, mut second) = (0, 0);
                    for i in 0..HALF {
                        first += i32::from(weights[r][i]) * i32::from(low[i]);
                        second += i32::from(weights[r][HALF + i]) * i32::from(high[i]);
                    }
                    first * steps[0][r] + second * steps[1][r]
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
