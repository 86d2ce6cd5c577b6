//! Stored formats as the sums and products over columns read them: groups of 32 elements, their
//! scales and minimums, and the cache lines ahead.

use super::lanes::Lanes;
use crate::{
    channel::{Outliers, scale_of},
    dtype::{DType, GROUP, mxfp4_scale},
    row::Row,
};

/// Groups whose scales are converted to f32 at once.
pub(super) const GROUPS: usize = 16;

/// How 32 stored elements become lanes: without their scale, which goes to the factor, or where
/// groups have minimums, with both.
pub(super) trait Stored {
    /// Stored bytes of a group, without its scale.
    const BYTES: usize;
    /// Whether groups have a scale that goes to the factor.
    const SCALED: bool;
    /// Whether elements are loaded with a scale and a minimum.
    const MINS: bool;
    /// Whether a row has outliers, which are added to its elements once these are decoded.
    const OUTLIERS: bool;
    /// Rows that pass over a block together: their blocks and the next ones stay in the
    /// first-level cache, and are enough bytes to keep the memory busy.
    const ROWS: usize = match 256 / Self::BYTES {
        0..4 => 4,
        rows => rows,
    };
    /// The 32 elements of a group. Scale and minimum are used only by formats with minimums.
    ///
    /// # Safety
    /// The CPU has the instruction set of `L`, and `from` is valid for reads of `BYTES` bytes;
    /// it need not be aligned.
    unsafe fn load<L: Lanes>(from: *const u8, scale: f32, min: f32) -> L;
}

macro_rules! stored {
    ($name:ident, $dtype:expr, |$from:ident, $scale:pat_param, $min:pat_param| $load:expr) => {
        pub(super) struct $name;
        impl Stored for $name {
            const BYTES: usize = $dtype.quants_bytes(GROUP);
            const SCALED: bool = $dtype.is_grouped() && !Self::MINS;
            const MINS: bool = matches!($dtype, DType::Q4k | DType::Q4c);
            const OUTLIERS: bool = matches!($dtype, DType::Q4c);
            #[inline(always)]
            unsafe fn load<L: Lanes>($from: *const u8, $scale: f32, $min: f32) -> L {
                // SAFETY: the caller guarantees the instruction set and `BYTES` bytes.
                unsafe { $load }
            }
        }
    };
}
stored!(F32, DType::F32, |from, _, _| L::load_f32(from));
stored!(F16, DType::F16, |from, _, _| L::load_f16(from));
stored!(BF16, DType::BF16, |from, _, _| L::load_bf16(from));
// The compiler removes a multiplication by one.
stored!(Q8, DType::Q8, |from, _, _| L::load_q8(from, 1.0));
stored!(Q4, DType::Q4, |from, _, _| L::load_q4(from, 1.0));
stored!(Q4k, DType::Q4k, |from, scale, min| L::load_q4k(
    from, scale, min
));
stored!(Q8c, DType::Q8c, |from, _, _| L::load_q8(from, 1.0));
stored!(Q4c, DType::Q4c, |from, scale, _| L::load_q4(from, scale));
stored!(Mxfp4, DType::Mxfp4, |from, _, _| L::load_mxfp4(from, 1.0));

/// Adds the incomplete last group of a row to the `rest < 32` elements of `y`.
///
/// # Safety
/// The CPU has the instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn last_group<L: Lanes, S: Stored>(a: f32, row: Row<'_>, y: &mut [f32]) {
    let (quants, scale, min) = LastGroup::of(row).parts();
    let mut weights = [0.0f32; GROUP];
    // SAFETY: `quants` is as long as the longest group, `weights` takes 128 bytes; the
    // caller guarantees the instruction set.
    unsafe {
        S::load::<L>(quants.as_ptr(), scale, min).store_f32(weights.as_mut_ptr().cast());
    }
    if S::OUTLIERS {
        Outliers::of(row).patch(row.len() / GROUP * GROUP, &mut weights[..y.len()]);
    }
    let a = if S::SCALED { a * scale } else { a };
    for (y, w) in y.iter_mut().zip(weights) {
        *y = a.mul_add(w, *y);
    }
}

/// The last group of a row, which is incomplete: its elements, then zeros; scale and minimum.
#[derive(Clone, Copy)]
pub(super) struct LastGroup {
    quants: [u8; 4 * GROUP],
    scale: f32,
    min: f32,
}

impl LastGroup {
    pub(super) fn of(row: Row<'_>) -> LastGroup {
        let (dtype, group) = (row.dtype(), row.len() / GROUP);
        let rest = &row.quants()[dtype.quants_bytes(group * GROUP)..];
        let mut quants = [0u8; 4 * GROUP];
        quants[..rest.len()].copy_from_slice(rest);
        // from the beginning of a super-block on
        let first = group / GROUPS * GROUPS;
        let (scales, mins) = factors(row, first, group + 1 - first);
        LastGroup {
            quants,
            scale: scales[group - first],
            min: mins[group - first],
        }
    }

    pub(super) fn parts(self) -> ([u8; 4 * GROUP], f32, f32) {
        (self.quants, self.scale, self.min)
    }
}

/// [`factors_of`] without vector instructions; scales are 1 in float formats.
fn factors(row: Row<'_>, first: usize, count: usize) -> ([f32; GROUPS], [f32; GROUPS]) {
    // SAFETY: plain Rust runs on every CPU.
    unsafe { factors_of::<super::portable::Portable>(row, first, count) }
}

/// The scales and the minimums of `count <= 16` groups from `first` on, a multiple of 16; the rest
/// of the arrays is zero. Scales are 1 in float formats, minimums zero where there are none.
///
/// # Safety
/// The CPU has the instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn factors_of<L: Lanes>(
    row: Row<'_>,
    first: usize,
    count: usize,
) -> ([f32; GROUPS], [f32; GROUPS]) {
    match row.dtype() {
        DType::Q4k => {
            let bytes = &row.scales()[2 * first..];
            let mut padded = [0; 2 * GROUPS];
            let from = match bytes.get(..2 * GROUPS) {
                Some(whole) => whole.as_ptr(),
                None => {
                    padded[..bytes.len()].copy_from_slice(bytes);
                    padded.as_ptr()
                }
            };
            // SAFETY: `from` has 32 bytes; the caller guarantees the instruction set.
            let [mut scales, mut mins] = unsafe { L::super_blocks(from) };
            scales[count..].fill(0.0);
            mins[count..].fill(0.0);
            (scales, mins)
        }
        dtype if dtype.is_grouped() => {
            // SAFETY: passed on from the caller.
            (unsafe { scales::<L>(row, first, count) }, [0.0; GROUPS])
        }
        _ => ([1.0; GROUPS], [0.0; GROUPS]),
    }
}

/// The scales of `count <= 16` groups from `first` on, of a format without minimums; the rest of
/// the array is zero.
///
/// # Safety
/// The CPU has the instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn scales<L: Lanes>(row: Row<'_>, first: usize, count: usize) -> [f32; GROUPS] {
    if row.dtype() == DType::Mxfp4 {
        let mut scales = [0.0; GROUPS];
        for (scale, &e) in scales.iter_mut().zip(&row.scales()[first..first + count]) {
            *scale = mxfp4_scale(e);
        }
        return scales;
    }
    if row.dtype().is_per_channel() {
        let mut scales = [0.0; GROUPS];
        scales[..count].fill(scale_of(row));
        return scales;
    }
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

/// Brings a cache line into the second-level cache: the first has room for few lines that
/// are on their way, so that reading into it is slower. Any address is allowed.
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
