//! The row kernels, written once over [`Lanes`]: a walk over the groups of a stored row, and a
//! visitor for each operation.
//!
//! Everything here is inlined into the entry point of an instruction set. Visitors are types rather
//! than closures because only a named function can force inlining, and a body compiled separately
//! would lack the instruction set.

use std::marker::PhantomData;

use super::{
    lanes::Lanes,
    stored::{GROUPS, LastGroup, factors_of},
};
use crate::{
    LANES,
    channel::Outliers,
    dtype::{DType, GROUP},
    row::Row,
};

/// An operation on each dequantised group.
trait Visitor<L> {
    /// Receives the 32 weights of group `group`; `HALF` is `group % 2`, a constant so
    /// that the accumulators stay in registers.
    ///
    /// # Safety
    /// The CPU has the instruction set of `L`, and group `group` of what the visitor leads to
    /// is full.
    unsafe fn group<const HALF: usize>(&mut self, group: usize, weights: L);
}

/// Converts 32 stored elements to lanes.
trait Format {
    /// Stored bytes of a group, without its scale.
    const BYTES: usize;
    /// Whether groups have a scale.
    const SCALED: bool;
    /// Whether a row has outliers.
    const OUTLIERS: bool;
    /// The 32 elements of a group, times `scale` if the format is scaled, less `min` if it has
    /// minimums.
    ///
    /// # Safety
    /// The CPU has the instruction set of `L`, and `from` is valid for reads of `BYTES` bytes;
    /// it need not be aligned.
    unsafe fn load<L: Lanes>(from: *const u8, scale: f32, min: f32) -> L;
}

macro_rules! format {
    ($name:ident, $dtype:expr, |$from:ident, $scale:pat_param, $min:pat_param| $load:expr) => {
        struct $name;
        impl Format for $name {
            const BYTES: usize = $dtype.quants_bytes(GROUP);
            const SCALED: bool = $dtype.is_grouped();
            const OUTLIERS: bool = matches!($dtype, DType::Q4c);
            #[inline(always)]
            unsafe fn load<L: Lanes>($from: *const u8, $scale: f32, $min: f32) -> L {
                // SAFETY: the caller guarantees the instruction set and `BYTES` bytes.
                unsafe { $load }
            }
        }
    };
}
format!(F32, DType::F32, |from, _, _| L::load_f32(from));
format!(F16, DType::F16, |from, _, _| L::load_f16(from));
format!(BF16, DType::BF16, |from, _, _| L::load_bf16(from));
format!(Q8, DType::Q8, |from, scale, _| L::load_q8(from, scale));
format!(Q4, DType::Q4, |from, scale, _| L::load_q4(from, scale));
format!(Q4k, DType::Q4k, |from, scale, min| L::load_q4k(
    from, scale, min
));
format!(Q8c, DType::Q8c, |from, scale, _| L::load_q8(from, scale));
format!(Q4c, DType::Q4c, |from, scale, _| L::load_q4(from, scale));
format!(Mxfp4, DType::Mxfp4, |from, scale, _| L::load_mxfp4(
    from, scale
));

/// Visits the first `groups` groups of a row, all of which must be full.
///
/// # Safety
/// The CPU has the instruction set of `L`; the row and what the visitor leads to have these
/// groups, all of them full.
#[inline(always)]
unsafe fn walk<L: Lanes>(row: Row<'_>, groups: usize, visitor: &mut impl Visitor<L>) {
    debug_assert!(groups * GROUP <= row.len());
    // SAFETY: passed on from the caller.
    unsafe {
        match row.dtype() {
            DType::F32 => walk_as::<L, F32>(row, groups, visitor),
            DType::F16 => walk_as::<L, F16>(row, groups, visitor),
            DType::BF16 => walk_as::<L, BF16>(row, groups, visitor),
            DType::Q8 => walk_as::<L, Q8>(row, groups, visitor),
            DType::Q4 => walk_as::<L, Q4>(row, groups, visitor),
            DType::Q4k => walk_as::<L, Q4k>(row, groups, visitor),
            DType::Q8c => walk_as::<L, Q8c>(row, groups, visitor),
            DType::Q4c => walk_as::<L, Q4c>(row, groups, visitor),
            DType::Mxfp4 => walk_as::<L, Mxfp4>(row, groups, visitor),
            DType::Block(_) => unreachable!("checked by the dispatcher"),
        }
    }
}

/// Groups of a row of the format `F` that are read one after the other.
struct Block<F> {
    /// Their quants.
    from: *const u8,
    scales: [f32; GROUPS],
    mins: [f32; GROUPS],
    /// Their weights, with outliers in their place, if the format has any.
    patched: [[f32; GROUP]; GROUPS],
    format: PhantomData<F>,
}

// Methods, as only a named function can force inlining.
impl<F: Format> Block<F> {
    /// Group `k` without outliers.
    ///
    /// # Safety
    /// The CPU has the instruction set of `L`, and the block has that group.
    #[inline(always)]
    unsafe fn stored<L: Lanes>(&self, k: usize) -> L {
        // SAFETY: passed on from the caller.
        unsafe {
            let (scale, min) = (*self.scales.get_unchecked(k), *self.mins.get_unchecked(k));
            F::load::<L>(self.from.add(k * F::BYTES), scale, min)
        }
    }

    /// Group `k`.
    ///
    /// # Safety
    /// As for [`Block::stored`].
    #[inline(always)]
    unsafe fn load<L: Lanes>(&self, k: usize) -> L {
        // SAFETY: passed on from the caller.
        unsafe {
            if F::OUTLIERS {
                L::load_f32(self.patched.get_unchecked(k).as_ptr().cast())
            } else {
                self.stored(k)
            }
        }
    }
}

/// [`walk`] of a row in the format `F`.
///
/// # Safety
/// As for [`walk`].
#[inline(always)]
unsafe fn walk_as<L: Lanes, F: Format>(row: Row<'_>, groups: usize, visitor: &mut impl Visitor<L>) {
    let quants = row.quants().as_ptr();
    let mut done = 0;
    while done < groups {
        let count = GROUPS.min(groups - done);
        // SAFETY: `Row` holds `groups * BYTES` bytes of quants and one scale per group,
        // and every index below is under `groups`. The caller guarantees the ISA.
        unsafe {
            let (scales, mins) = if F::SCALED {
                factors_of::<L>(row, done, count)
            } else {
                ([1.0; GROUPS], [0.0; GROUPS])
            };
            let mut block = Block::<F> {
                from: quants.add(done * F::BYTES),
                scales,
                mins,
                patched: [[0.0; GROUP]; GROUPS],
                format: PhantomData,
            };
            if F::OUTLIERS {
                for k in 0..count {
                    let weights: L = block.stored(k);
                    weights.store_f32(block.patched[k].as_mut_ptr().cast());
                }
                let weights = &mut block.patched.as_flattened_mut()[..count * GROUP];
                Outliers::of(row).patch(done * GROUP, weights);
            }
            let mut k = 0;
            while k + 1 < count {
                visitor.group::<0>(done + k, block.load(k));
                visitor.group::<1>(done + k + 1, block.load(k + 1));
                k += 2;
            }
            if k < count {
                visitor.group::<0>(done + k, block.load(k));
            }
        }
        done += count;
    }
}

/// The last `row.len() % 32` weights of a row, then zeros, whatever the padding of the stored
/// group.
///
/// # Safety
/// The CPU has the instruction set of `L`.
#[inline(always)]
unsafe fn last_group<L: Lanes>(row: Row<'_>) -> [f32; GROUP] {
    let (quants, scale, min) = LastGroup::of(row).parts();
    let mut weights = [0.0f32; GROUP];
    // SAFETY: `quants` is as long as the longest group, `weights` takes 128 bytes; the
    // caller guarantees the ISA.
    unsafe {
        let from = quants.as_ptr();
        let lanes = match row.dtype() {
            DType::F32 => L::load_f32(from),
            DType::F16 => L::load_f16(from),
            DType::BF16 => L::load_bf16(from),
            DType::Q8 => L::load_q8(from, scale),
            DType::Q4 => L::load_q4(from, scale),
            DType::Q4k => L::load_q4k(from, scale, min),
            DType::Q8c => L::load_q8(from, scale),
            DType::Q4c => L::load_q4(from, scale),
            DType::Mxfp4 => L::load_mxfp4(from, scale),
            DType::Block(_) => unreachable!("checked by the dispatcher"),
        };
        lanes.store_f32(weights.as_mut_ptr().cast());
    }
    Outliers::of(row).patch(row.len() / GROUP * GROUP, &mut weights);
    weights[row.len() % GROUP..].fill(0.0);
    weights
}

struct Dot<L> {
    lanes: [L; 2],
    x: *const f32,
}

impl<L: Lanes> Visitor<L> for Dot<L> {
    #[inline(always)]
    unsafe fn group<const HALF: usize>(&mut self, group: usize, weights: L) {
        // SAFETY: `x` is as long as the row, so group `group` of it is readable.
        unsafe {
            let x = L::load_f32(self.x.add(group * GROUP).cast());
            self.lanes[HALF] = weights.mul_add(x, self.lanes[HALF]);
        }
    }
}

/// Sum of `row[i] * x[i]` by the lane rule.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `x.len() == row.len()`.
#[inline(always)]
pub(super) unsafe fn dot<L: Lanes>(row: Row<'_>, x: &[f32]) -> f32 {
    debug_assert_eq!(row.len(), x.len());
    let full = x.len() / GROUP;
    // SAFETY: `full` groups of the row and of `x` exist; the padded copies hold a group.
    unsafe {
        let mut visitor = Dot {
            lanes: [L::zero(); 2],
            x: x.as_ptr(),
        };
        walk(row, full, &mut visitor);
        let mut lanes = visitor.lanes;
        if !x.len().is_multiple_of(LANES) {
            // The padded half-chunks are computed too: fma(0, 0, -0.0) is +0.0, and every
            // implementation must perform that step.
            let mut tail = [L::zero(); 2];
            let mut tail_x = [L::zero(); 2];
            if !x.len().is_multiple_of(GROUP) {
                let weights = last_group::<L>(row);
                let mut padded = [0.0f32; GROUP];
                padded[..x.len() % GROUP].copy_from_slice(&x[full * GROUP..]);
                tail[full % 2] = L::load_f32(weights.as_ptr().cast());
                tail_x[full % 2] = L::load_f32(padded.as_ptr().cast());
            }
            if full.is_multiple_of(2) {
                lanes[0] = tail[0].mul_add(tail_x[0], lanes[0]);
            }
            lanes[1] = tail[1].mul_add(tail_x[1], lanes[1]);
        }
        L::reduce(lanes[0], lanes[1])
    }
}

struct Axpy<L> {
    a: L,
    y: *mut f32,
}

impl<L: Lanes> Visitor<L> for Axpy<L> {
    #[inline(always)]
    unsafe fn group<const HALF: usize>(&mut self, group: usize, weights: L) {
        // SAFETY: `y` is as long as the row, so group `group` of it is accessible.
        unsafe {
            let y = self.y.add(group * GROUP).cast::<u8>();
            self.a.mul_add(weights, L::load_f32(y)).store_f32(y);
        }
    }
}

/// `y[i] = fma(a, row[i], y[i])`.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `y.len() == row.len()`.
#[inline(always)]
pub(super) unsafe fn axpy<L: Lanes>(a: f32, row: Row<'_>, y: &mut [f32]) {
    debug_assert_eq!(row.len(), y.len());
    let full = y.len() / GROUP;
    // SAFETY: `full` groups of the row and of `y` exist.
    unsafe {
        walk(
            row,
            full,
            &mut Axpy {
                a: L::splat(a),
                y: y.as_mut_ptr(),
            },
        );
        if !y.len().is_multiple_of(GROUP) {
            let weights = last_group::<L>(row);
            for (y, w) in y[full * GROUP..].iter_mut().zip(weights) {
                *y = a.mul_add(w, *y);
            }
        }
    }
}

struct Dequantize {
    out: *mut f32,
}

impl<L: Lanes> Visitor<L> for Dequantize {
    #[inline(always)]
    unsafe fn group<const HALF: usize>(&mut self, group: usize, weights: L) {
        // SAFETY: `out` is as long as the row, so group `group` of it is writable.
        unsafe { weights.store_f32(self.out.add(group * GROUP).cast()) }
    }
}

/// `out[i] = row[i]`, exact.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `out.len() == row.len()`.
#[inline(always)]
pub(super) unsafe fn dequantize<L: Lanes>(row: Row<'_>, out: &mut [f32]) {
    debug_assert_eq!(row.len(), out.len());
    let full = out.len() / GROUP;
    // SAFETY: `full` groups of the row and of `out` exist.
    unsafe {
        walk::<L>(
            row,
            full,
            &mut Dequantize {
                out: out.as_mut_ptr(),
            },
        );
        if !out.len().is_multiple_of(GROUP) {
            let weights = last_group::<L>(row);
            let rest = &mut out[full * GROUP..];
            rest.copy_from_slice(&weights[..rest.len()]);
        }
    }
}

/// Writes `src` as f16, rounded to nearest even.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `dst.len() == 2 * src.len()`.
#[inline(always)]
pub(super) unsafe fn f32_to_f16_bytes<L: Lanes>(src: &[f32], dst: &mut [u8]) {
    debug_assert_eq!(2 * src.len(), dst.len());
    let mut values = src.chunks_exact(GROUP);
    let mut halves = dst.chunks_exact_mut(2 * GROUP);
    for (value, half) in values.by_ref().zip(halves.by_ref()) {
        // SAFETY: the chunks are one group long; the caller guarantees the ISA.
        unsafe { L::load_f32(value.as_ptr().cast()).store_f16(half.as_mut_ptr()) }
    }
    let rest = values.remainder();
    if !rest.is_empty() {
        let mut padded = [0.0f32; GROUP];
        padded[..rest.len()].copy_from_slice(rest);
        let mut bytes = [0u8; 2 * GROUP];
        // SAFETY: both buffers are one group long; the caller guarantees the ISA.
        unsafe { L::load_f32(padded.as_ptr().cast()).store_f16(bytes.as_mut_ptr()) }
        halves
            .into_remainder()
            .copy_from_slice(&bytes[..2 * rest.len()]);
    }
}
