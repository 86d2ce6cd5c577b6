//! Sums of scaled rows, `y += Σ aᵢ · rowᵢ`: the down projection of a sparse FFN.
//!
//! A block of columns stays in registers while all rows are added to it, so `y` is read and written
//! once for many rows instead of once per row. Every element adds its products in the order of the
//! rows, so splitting the rows into several calls changes no bit.

use super::lanes::Lanes;
use crate::{
    cpu::with_features,
    dtype::{DType, GROUP},
    row::Row,
};

/// Maximum rows added to a block of columns before the next block.
const ROWS: usize = 16;

/// Groups whose scales are converted to f32 at once.
pub(super) const GROUPS: usize = 16;

/// The entry points of one instruction set. Its registers hold the accumulators of `$groups` groups
/// beside weights being decoded, of `$token_groups` beside decoded ones, or two registers of
/// accumulators for each of `$tile` tokens.
macro_rules! entry_points {
    ([$($feature:tt)*] $lanes:ty, $groups:literal, $token_groups:literal, $tile:literal) => {
        use crate::{Row, simd::axpy_tokens};

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd) fn axpy_rows(factors: &[f32], rows: &[Row<'_>], y: &mut [f32]) {
            // SAFETY: the features are enabled here; the dispatcher checked the rows.
            unsafe { super::axpy_rows::<$lanes, $groups, false>(factors, rows, y) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd) fn sum_rows(factors: &[f32], rows: &[Row<'_>], y: &mut [f32]) {
            // SAFETY: as above.
            unsafe { super::axpy_rows::<$lanes, $groups, true>(factors, rows, y) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd) fn axpy_rows_tokens(
            factors: &[f32],
            rows: &[Row<'_>],
            tokens: usize,
            ys: &mut [f32],
            scratch: &mut axpy_tokens::Scratch,
        ) {
            // SAFETY: as above.
            unsafe {
                axpy_tokens::axpy_rows_tokens::<$lanes, $token_groups, $tile>(
                    factors, rows, tokens, ys, scratch,
                )
            }
        }
    };
}

pub(super) mod portable {
    entry_points!([] crate::simd::portable::Portable, 1, 1, 2);
}
#[cfg(target_arch = "x86_64")]
pub(super) mod avx2 {
    // 8 accumulators, 4 weights and 1 factor of the 16 registers.
    super::with_features!(avx2, entry_points, crate::simd::avx2::Avx2, 2, 2, 6);
}
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512 {
    // 16 accumulators, 2 weights and 1 factor of the 32 registers.
    super::with_features!(avx512, entry_points, crate::simd::avx512::Avx512, 8, 4, 12);
}
#[cfg(target_arch = "aarch64")]
pub(super) mod neon {
    // 16 accumulators, 8 weights and 1 factor of the 32 registers.
    super::with_features!(neon, entry_points, crate::simd::neon::Neon, 2, 2, 12);
}

/// Converts 32 stored elements to lanes, without their scale.
pub(super) trait Stored {
    /// Stored bytes of a group, without its scale.
    const BYTES: usize;
    /// Whether groups have a scale.
    const SCALED: bool;
    /// Rows added to a block together: their blocks and the next ones fit in the L1 cache, and are
    /// enough bytes to saturate memory.
    const ROWS: usize = match 256 / Self::BYTES {
        0..4 => 4,
        rows => rows,
    };
    /// The 32 elements of a group.
    ///
    /// # Safety
    /// The CPU has the instruction set of `L`, and `from` is valid for reads of `BYTES` bytes;
    /// it need not be aligned.
    unsafe fn load<L: Lanes>(from: *const u8) -> L;
}

macro_rules! stored {
    ($name:ident, $dtype:expr, |$from:ident| $load:expr) => {
        pub(super) struct $name;
        impl Stored for $name {
            const BYTES: usize = $dtype.quants_bytes(GROUP);
            const SCALED: bool = $dtype.is_grouped();
            #[inline(always)]
            unsafe fn load<L: Lanes>($from: *const u8) -> L {
                // SAFETY: the caller guarantees the instruction set and `BYTES` bytes.
                unsafe { $load }
            }
        }
    };
}
stored!(F32, DType::F32, |from| L::load_f32(from));
stored!(F16, DType::F16, |from| L::load_f16(from));
stored!(BF16, DType::BF16, |from| L::load_bf16(from));
// The compiler removes a multiplication by one.
stored!(Q8, DType::Q8, |from| L::load_q8(from, 1.0));
stored!(Q4, DType::Q4, |from| L::load_q4(from, 1.0));

/// `y[j] = fma(factors[i] * scale, q, y[j])` for every row `i` in order, where row `i` holds `scale
/// · q` at `j`. With `NEW`, starts from zero and
/// ignores the contents of `y`.
///
/// # Safety
/// The CPU has the instruction set of `L`; there are as many factors as rows, and all rows
/// have the same format and the length of `y`.
#[inline(always)]
unsafe fn axpy_rows<L: Lanes, const G: usize, const NEW: bool>(
    factors: &[f32],
    rows: &[Row<'_>],
    y: &mut [f32],
) {
    let Some(first) = rows.first() else {
        if NEW {
            y.fill(0.0);
        }
        return;
    };
    // SAFETY: passed on from the caller.
    unsafe {
        match first.dtype() {
            DType::F32 => axpy_rows_as::<L, F32, G, NEW>(factors, rows, y),
            DType::F16 => axpy_rows_as::<L, F16, G, NEW>(factors, rows, y),
            DType::BF16 => axpy_rows_as::<L, BF16, G, NEW>(factors, rows, y),
            DType::Q8 => axpy_rows_as::<L, Q8, G, NEW>(factors, rows, y),
            DType::Q4 => axpy_rows_as::<L, Q4, G, NEW>(factors, rows, y),
        }
    }
}

/// [`axpy_rows`] of rows in the format `S`.
///
/// # Safety
/// As for [`axpy_rows`].
#[inline(always)]
unsafe fn axpy_rows_as<L: Lanes, S: Stored, const G: usize, const NEW: bool>(
    factors: &[f32],
    rows: &[Row<'_>],
    y: &mut [f32],
) {
    let groups = y.len() / GROUP;
    for row in rows.iter().take(S::ROWS) {
        let (from, bytes) = (row.quants().as_ptr(), GROUPS * S::BYTES);
        (0..bytes)
            .step_by(LINE)
            .for_each(|at| prefetch(from.wrapping_add(at)));
    }
    let mut done = 0;
    while done < rows.len() {
        let end = rows.len().min(done + S::ROWS);
        let (factors, here, next) = (&factors[done..end], &rows[done..end], &rows[end..]);
        let mut group = 0;
        while group < groups {
            let count = GROUPS.min(groups - group);
            // SAFETY: groups `group..group + count` of all rows and of `y` are full; the
            // caller guarantees the rest.
            unsafe {
                if NEW && done == 0 {
                    block::<L, S, G, true>(factors, here, next, group, count, y);
                } else {
                    block::<L, S, G, false>(factors, here, next, group, count, y);
                }
            }
            group += count;
        }
        if !y.len().is_multiple_of(GROUP) {
            if NEW && done == 0 {
                y[groups * GROUP..].fill(0.0);
            }
            for (&a, row) in factors.iter().zip(here) {
                // SAFETY: as above.
                unsafe { last_group::<L, S>(a, *row, &mut y[groups * GROUP..]) }
            }
        }
        done = end;
    }
}

/// Adds at most [`ROWS`] rows to `count <= GROUPS` groups of `y`, and prefetches what follows: the
/// same rows further on, or the starts of the rows in `next`.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `count <= GROUPS`. The rows have the format
/// `S`, and the groups `first..first + count` of each of them and of `y` are full. `next` is
/// not read.
#[inline(always)]
unsafe fn block<L: Lanes, S: Stored, const G: usize, const NEW: bool>(
    factors: &[f32],
    rows: &[Row<'_>],
    next: &[Row<'_>],
    first: usize,
    count: usize,
    y: &mut [f32],
) {
    let mut scaled = [[0.0f32; GROUPS]; ROWS];
    let mut ahead = [std::ptr::null(); ROWS];
    let end = first + count;
    for (i, (&a, row)) in factors.iter().zip(rows).enumerate() {
        let (row_ahead, group) = if end < y.len() / GROUP {
            (*row, end)
        } else {
            (*next.get(i).unwrap_or(row), 0)
        };
        ahead[i] = row_ahead.quants().as_ptr().wrapping_add(group * S::BYTES);
        scaled[i] = if S::SCALED {
            prefetch(row_ahead.scales().as_ptr().wrapping_add(2 * group));
            // SAFETY: the row has the scales of these groups; the caller guarantees the
            // instruction set.
            unsafe { scales::<L>(*row, first, count) }.map(|scale| a * scale)
        } else {
            [a; GROUPS]
        };
    }
    let mut k = 0;
    // SAFETY: all rows and `y` have the groups `first..first + count`.
    unsafe {
        while k + G <= count {
            tile::<L, S, G, NEW>(&scaled, rows, &ahead, first, k, y);
            k += G;
        }
        while k < count {
            tile::<L, S, 1, NEW>(&scaled, rows, &ahead, first, k, y);
            k += 1;
        }
    }
}

/// Adds the rows to the `G` groups of `y` from `first + k` on.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `k + G <= GROUPS`. The rows have the format
/// `S`, and these groups of each of them and of `y` are full. `ahead` may be anything.
#[inline(always)]
unsafe fn tile<L: Lanes, S: Stored, const G: usize, const NEW: bool>(
    scaled: &[[f32; GROUPS]; ROWS],
    rows: &[Row<'_>],
    ahead: &[*const u8; ROWS],
    first: usize,
    k: usize,
    y: &mut [f32],
) {
    let group = first + k;
    // SAFETY: the caller guarantees the instruction set and these groups, and
    // `k + G <= GROUPS`.
    unsafe {
        let y = y.as_mut_ptr().add(group * GROUP).cast::<u8>();
        let mut sums = [L::zero(); G];
        if !NEW {
            for (g, sum) in sums.iter_mut().enumerate() {
                *sum = L::load_f32(y.add(4 * GROUP * g));
            }
        }
        for ((scaled, row), ahead) in scaled.iter().zip(rows).zip(ahead) {
            // A few at a time: a burst of prefetches would stall the additions behind it.
            for at in (0..G * S::BYTES).step_by(LINE) {
                prefetch(ahead.wrapping_add(k * S::BYTES + at));
            }
            let from = row.quants().as_ptr().add(group * S::BYTES);
            for (g, sum) in sums.iter_mut().enumerate() {
                let a = L::splat(*scaled.get_unchecked(k + g));
                *sum = a.mul_add(S::load::<L>(from.add(g * S::BYTES)), *sum);
            }
        }
        for (g, sum) in sums.into_iter().enumerate() {
            sum.store_f32(y.add(4 * GROUP * g));
        }
    }
}

/// Adds the incomplete last group of a row to the `rest < 32` elements of `y`.
///
/// # Safety
/// The CPU has the instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn last_group<L: Lanes, S: Stored>(a: f32, row: Row<'_>, y: &mut [f32]) {
    let rest = row.skip_groups(row.len() / GROUP);
    let mut quants = [0u8; 4 * GROUP];
    quants[..rest.quants().len()].copy_from_slice(rest.quants());
    let mut weights = [0.0f32; GROUP];
    // SAFETY: `quants` is as long as the longest group, `weights` takes 128 bytes; the
    // caller guarantees the instruction set.
    let a = unsafe {
        S::load::<L>(quants.as_ptr()).store_f32(weights.as_mut_ptr().cast());
        if S::SCALED {
            a * scales::<L>(rest, 0, 1)[0]
        } else {
            a
        }
    };
    for (y, w) in y.iter_mut().zip(weights) {
        *y = a.mul_add(w, *y);
    }
}

/// The scales of `count <= 16` groups from `first` on; the rest of the array is zero.
///
/// # Safety
/// The CPU has the instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn scales<L: Lanes>(row: Row<'_>, first: usize, count: usize) -> [f32; GROUPS] {
    let bytes = &row.scales()[2 * first..2 * (first + count)];
    // SAFETY: 32 bytes are readable in both cases; the caller guarantees the instruction
    // set.
    unsafe {
        if count == GROUPS {
            return L::load_scales(bytes.as_ptr());
        }
        let mut padded = [0u8; 2 * GROUPS];
        padded[..bytes.len()].copy_from_slice(bytes);
        L::load_scales(padded.as_ptr())
    }
}

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Prefetches a cache line into the L2 cache. The L1 cache has too few line fill buffers, so
/// prefetching into it is slower. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that neither faults nor changes anything; SSE is baseline.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{at}]", at = in(reg) at,
            options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}
