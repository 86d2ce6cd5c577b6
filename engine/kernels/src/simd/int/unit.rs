//! What an instruction set provides to integer dot products.

use super::form::Form;
use crate::{Chunk, activations::CHUNK_GROUPS, dtype::MXFP4_SCALES};

/// The same chunk of each of `T` tokens.
pub(super) type Chunks<const T: usize> = [*const Chunk; T];

/// Vector operations for an integer dot product. Pointers need no alignment.
pub(super) trait Unit {
    /// One i32 for each group of a chunk, in order, and nothing else: any bits are such sums.
    type Sums: Copy;
    /// The 16 chains.
    type Chains: Copy;

    /// All chains zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn zero() -> Self::Chains;

    /// The sums of two lots of groups, modulo 2³².
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn both(a: Self::Sums, b: Self::Sums) -> Self::Sums;

    /// Exact sums of `groups <= 16` groups of nibbles (16 bytes each), less 8 if the format says
    /// so, or doubled floats, times activations; the other sums are zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, `groups <= 16`, and `quants` is valid for
    /// reads of `16 * groups` bytes.
    unsafe fn nibbles<F: Form>(quants: *const u8, groups: usize, x: &Chunk) -> Self::Sums;

    /// Exact sums of `groups <= 16` groups of q8 weights (32 bytes each) times
    /// activations; the other sums are zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, `groups <= 16`, and `quants` is valid for
    /// reads of `32 * groups` bytes.
    unsafe fn q8(quants: *const u8, groups: usize, x: &Chunk) -> Self::Sums;

    /// [`Unit::nibbles`] of `T` tokens.
    ///
    /// # Safety
    /// As for [`Unit::nibbles`] and the chunk of each of `T` tokens.
    #[inline(always)]
    unsafe fn nibbles_tokens<F: Form, const T: usize>(
        quants: *const u8,
        groups: usize,
        xs: Chunks<T>,
    ) -> [Self::Sums; T] {
        // SAFETY: passed on from the caller.
        unsafe {
            let mut sums = [Self::nibbles::<F>(quants, groups, &*xs[0]); T];
            for t in 1..T {
                sums[t] = Self::nibbles::<F>(quants, groups, &*xs[t]);
            }
            sums
        }
    }

    /// `groups <= 16` scales in f16, widened, one for each chain; the other ones are zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, `groups <= 16`, and `scales` is valid for
    /// reads of `2 * groups` bytes.
    unsafe fn scales(scales: *const u8, groups: usize) -> Self::Chains;

    /// `groups <= 16` exponents as the factors of doubled floats of four bits, one for each chain; the
    /// other ones are zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, `groups <= 16`, and `exponents` is valid for
    /// reads of `groups` bytes.
    #[inline(always)]
    unsafe fn exponents(exponents: *const u8, groups: usize) -> Self::Chains {
        // SAFETY: the caller guarantees the exponents.
        unsafe {
            let exponents = std::slice::from_raw_parts(exponents, groups);
            let mut scales = [0.0; CHUNK_GROUPS];
            for (scale, &e) in scales.iter_mut().zip(exponents) {
                *scale = MXFP4_SCALES[usize::from(e)];
            }
            Self::chains(&scales)
        }
    }

    /// 16 values, one for each chain.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn chains(values: &[f32; CHUNK_GROUPS]) -> Self::Chains;

    /// The scales and the minimums of two whole super-blocks.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `scales` is valid for reads of 32 bytes.
    unsafe fn super_blocks(scales: *const u8) -> [Self::Chains; 2];

    /// `fma(−minimum, sum of the activations, chain)` for every chain.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn less(chains: Self::Chains, mins: Self::Chains, x: &Chunk) -> Self::Chains;

    /// `fma(sum, weight scale * activation scale, chain)` for every chain.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn add(
        chains: Self::Chains,
        sums: Self::Sums,
        scales: Self::Chains,
        x: &Chunk,
    ) -> Self::Chains;

    /// Chain `j` absorbs `j + 8`, then `+ 4`, `+ 2`, `+ 1`.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn fold(chains: Self::Chains) -> f32;

    /// Prefetches a cache line into the L2 cache: L1 supports too few outstanding requests for full
    /// memory bandwidth. Any address is allowed.
    fn prefetch(line: *const u8);
}
