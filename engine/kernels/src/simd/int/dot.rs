//! One row times one token: the decode case, bound by memory bandwidth.

use crate::{
    Chunk, Row,
    activations::{CHUNK, CHUNK_GROUPS},
    dtype::{DType, GROUP},
    matrix::Rows,
};

/// Bytes of a q4 and a q8 row per chunk of activations.
const Q4_BYTES: usize = DType::Q4.quants_bytes(CHUNK);
const Q8_BYTES: usize = DType::Q8.quants_bytes(CHUNK);
/// Bytes of the scales per chunk.
const SCALES_BYTES: usize = DType::Q4.scales_bytes(CHUNK);
/// Prefetch distance in bytes. 4 to 64 KiB are equally fast; without prefetching a core reaches
/// half the memory bandwidth.
const AHEAD: usize = 8192;
const CACHE_LINE: usize = 64;

/// Vector operations for an integer dot product. Pointers need no alignment.
pub(super) trait Unit {
    /// One i32 for each group of a chunk, in order.
    type Sums: Copy;
    /// The 16 chains.
    type Chains: Copy;

    /// All chains zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn zero() -> Self::Chains;

    /// Exact sums of `groups <= 16` groups of q4 weights (16 bytes each) times
    /// activations; the other sums are zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, `groups <= 16`, and `quants` is valid for
    /// reads of `16 * groups` bytes.
    unsafe fn q4(quants: *const u8, groups: usize, x: &Chunk) -> Self::Sums;

    /// Exact sums of `groups <= 16` groups of q8 weights (32 bytes each) times
    /// activations; the other sums are zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, `groups <= 16`, and `quants` is valid for
    /// reads of `32 * groups` bytes.
    unsafe fn q8(quants: *const u8, groups: usize, x: &Chunk) -> Self::Sums;

    /// `fma(sum, weight scale * activation scale, chain)` for the first `groups <= 16`
    /// chains; reads as many f16.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, `groups <= 16`, and `scales` is valid for
    /// reads of `2 * groups` bytes.
    unsafe fn add(
        chains: Self::Chains,
        sums: Self::Sums,
        scales: *const u8,
        groups: usize,
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

/// Sum of `row · x` by the chain rule.
///
/// # Safety
/// The CPU has the instruction set of `U`; the row is grouped, and `x` has a chunk for
/// every 512 elements of it.
#[inline(always)]
pub(super) unsafe fn dot<U: Unit>(row: Row<'_>, x: &[Chunk]) -> f32 {
    // SAFETY: passed on from the caller.
    unsafe {
        match row.dtype() {
            DType::Q4 => chains::<U, true>(row, x, row),
            _ => chains::<U, false>(row, x, row),
        }
    }
}

/// [`dot`] of every row.
///
/// # Safety
/// As for [`dot`]; all rows have the same format, and `y` has an element for each.
#[inline(always)]
pub(super) unsafe fn dots<U: Unit, R: Rows>(rows: R, x: &[Chunk], y: &mut [f32]) {
    debug_assert_eq!(rows.count(), y.len());
    if rows.count() == 0 {
        return;
    }
    // SAFETY: passed on from the caller.
    unsafe {
        match rows.at(0).dtype() {
            DType::Q4 => dots_as::<U, R, true>(rows, x, y),
            _ => dots_as::<U, R, false>(rows, x, y),
        }
    }
}

/// [`dots`] of at least one row, in q4 if `Q4`, otherwise in q8.
///
/// # Safety
/// As for [`dots`].
#[inline(always)]
unsafe fn dots_as<U: Unit, R: Rows, const Q4: bool>(rows: R, x: &[Chunk], y: &mut [f32]) {
    let bytes = rows.at(0).quants().len().max(1);
    let distance = AHEAD.div_ceil(bytes);
    let last = rows.count() - 1;
    // Nothing has prefetched the first rows. The very first one is needed at once.
    for r in 1..distance.min(rows.count()) {
        let row = rows.at(r);
        for part in [row.quants(), row.scales()] {
            for line in (0..part.len()).step_by(CACHE_LINE) {
                U::prefetch(part.as_ptr().wrapping_add(line));
            }
        }
    }
    for (r, y) in y.iter_mut().enumerate() {
        let ahead = rows.at((r + distance).min(last));
        // SAFETY: passed on from the caller.
        *y = unsafe { chains::<U, Q4>(rows.at(r), x, ahead) };
    }
}

/// [`dot`] of a q4 row if `Q4`, otherwise of a q8 row; prefetches the row `ahead`.
///
/// # Safety
/// As for [`dot`]; `ahead` is not read.
#[inline(always)]
unsafe fn chains<U: Unit, const Q4: bool>(row: Row<'_>, x: &[Chunk], ahead: Row<'_>) -> f32 {
    debug_assert_eq!(x.len(), row.len().div_ceil(CHUNK));
    let bytes = if Q4 { Q4_BYTES } else { Q8_BYTES };
    // Every full chunk of a row has all its groups; the last chunk may be short.
    let full = row.len().div_ceil(GROUP) / CHUNK_GROUPS;
    let (quants, scales) = (row.quants().as_ptr(), row.scales().as_ptr());
    let (next, next_scales) = (ahead.quants().as_ptr(), ahead.scales().as_ptr());
    // SAFETY: chunk `k < full` of the row has all its bytes, the last one its groups.
    unsafe {
        let mut chains = U::zero();
        for (k, x) in x.iter().take(full).enumerate() {
            for line in (0..bytes).step_by(CACHE_LINE) {
                U::prefetch(next.wrapping_add(k * bytes + line));
            }
            U::prefetch(next_scales.wrapping_add(k * SCALES_BYTES));
            let (quants, scales) = (quants.add(k * bytes), scales.add(k * SCALES_BYTES));
            chains = step::<U, Q4>(chains, quants, scales, CHUNK_GROUPS, x);
        }
        if full < x.len() {
            let groups = row.len().div_ceil(GROUP) % CHUNK_GROUPS;
            let (quants, scales) = (quants.add(full * bytes), scales.add(full * SCALES_BYTES));
            chains = step::<U, Q4>(chains, quants, scales, groups, &x[full]);
        }
        U::fold(chains)
    }
}

/// Adds `groups` groups, in q4 if `Q4`, else in q8, and one chunk of activations.
///
/// # Safety
/// As for [`Unit::q4`] or [`Unit::q8`], and [`Unit::add`].
#[inline(always)]
unsafe fn step<U: Unit, const Q4: bool>(
    chains: U::Chains,
    quants: *const u8,
    scales: *const u8,
    groups: usize,
    x: &Chunk,
) -> U::Chains {
    // SAFETY: passed on from the caller.
    unsafe {
        let sums = if Q4 {
            U::q4(quants, groups, x)
        } else {
            U::q8(quants, groups, x)
        };
        U::add(chains, sums, scales, groups, x)
    }
}

/// `groups` scales, then zeros, for units that read all 16 at once.
///
/// # Safety
/// `scales` is valid for `groups <= 16` f16.
#[inline(always)]
pub(super) unsafe fn padded(scales: *const u8, groups: usize) -> [u16; CHUNK_GROUPS] {
    let from = scales.cast::<[u8; 2]>();
    // SAFETY: the caller guarantees the scales that are read.
    unsafe {
        if groups == CHUNK_GROUPS {
            return scales.cast::<[u16; CHUNK_GROUPS]>().read_unaligned();
        }
        std::array::from_fn(|g| {
            if g < groups {
                u16::from_le_bytes(*from.add(g))
            } else {
                0
            }
        })
    }
}
