//! Attention of several queries over the keys and values of one head.
//!
//! Query heads that share a key head, and the tokens of a chunk, process a stored vector together,
//! so it is read and decoded once for all of them.
//!
//! ```text
//! keys     blocks of 32 positions: [element][32 positions]
//! values   [position][width], the width a multiple of 32
//! ```
//!
//! With the positions of a key block adjacent, the scores of 32 positions are the 32 lanes of one
//! accumulator: no sum across lanes is needed.

use super::{
    lanes::Lanes,
    stored::{BF16, F16, F32, LINE, Stored, prefetch},
    strided::Strided,
};
use crate::{
    cpu::{Cpu, Isa},
    dtype::{DType, GROUP},
};

/// Positions of values processed by all columns and queries before the next ones: few, so that
/// memory is read nearly in order.
const SPAN: usize = 16;

/// Prefetch distance for keys and values, in bytes.
const AHEAD: usize = 8 << 10;

/// The entry points of one instruction set. Its registers hold the accumulators of `$queries`
/// queries over a block of keys, or of `$mixes` queries over `$groups` groups of values.
macro_rules! entry_points {
    ([$($feature:tt)*] $lanes:ty, $queries:literal, $mixes:literal, $groups:literal) => {
        use super::Head;

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd) fn scores(keys: Head<'_>, queries: &[f32], scores: &mut [f32], stride: usize) {
            // SAFETY: the features are enabled here; the dispatcher checked the lengths.
            unsafe { super::scores::<$lanes, $queries>(keys, queries, scores, stride) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd) fn mix(values: Head<'_>, weights: &[f32], stride: usize, out: &mut [f32]) {
            // SAFETY: as above.
            unsafe { super::mix::<$lanes, $mixes, $groups>(values, weights, stride, out) }
        }
    };
}

// avx2: 8 sums, 4 registers of keys or values and 1 factor of the 16 registers; avx512: 16 sums
// and 2 keys, or 16 sums and 4 values, of the 32; neon: 16 sums, 8 of keys or values and 1 factor.
super::per_instruction_set!(entry_points, portable: 1, 1, 1; avx2: 2, 2, 1; avx512: 8, 4, 2; neon: 2, 2, 1);

/// The stored keys or values of one head.
#[derive(Clone, Copy)]
pub(crate) struct Head<'a> {
    pub dtype: DType,
    pub bytes: &'a [u8],
    /// Elements of a vector.
    pub width: usize,
}

/// Bytes of 32 stored elements.
fn group_bytes(dtype: DType) -> usize {
    assert!(
        !dtype.is_grouped(),
        "no attention over {dtype} keys and values"
    );
    dtype.quants_bytes(GROUP)
}

pub(crate) fn key_scores(
    cpu: Cpu,
    head: Head<'_>,
    queries: &[f32],
    scores: &mut [f32],
    stride: usize,
) {
    let Head {
        dtype,
        bytes: keys,
        width: head_dim,
    } = head;
    let block = head_dim.saturating_mul(group_bytes(dtype));
    if queries.is_empty() || keys.is_empty() {
        return;
    }
    assert!(
        block > 0 && keys.len().is_multiple_of(block) && queries.len().is_multiple_of(head_dim),
        "{} bytes of keys and {} elements of queries for heads of {head_dim}",
        keys.len(),
        queries.len()
    );
    let (positions, count) = (keys.len() / block * GROUP, queries.len() / head_dim);
    let end = (count - 1).checked_mul(stride);
    let end = end.and_then(|at| at.checked_add(positions));
    assert!(
        stride >= positions && end.is_some_and(|end| end <= scores.len()),
        "{} scores at stride {stride} for {positions} positions of {count} queries",
        scores.len()
    );
    dispatch!(cpu, scores(head, queries, scores, stride))
}

pub(crate) fn mix_values(
    cpu: Cpu,
    head: Head<'_>,
    weights: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    let Head {
        dtype,
        bytes: values,
        width,
    } = head;
    let row = (width / GROUP).saturating_mul(group_bytes(dtype));
    if out.is_empty() || values.is_empty() {
        return;
    }
    assert!(
        row > 0
            && width.is_multiple_of(GROUP)
            && values.len().is_multiple_of(row)
            && out.len().is_multiple_of(width),
        "{} bytes of values and {} sums for rows of {width}",
        values.len(),
        out.len()
    );
    let (positions, last) = (values.len() / row, out.len() / width - 1);
    let end = last
        .checked_mul(stride)
        .and_then(|at| at.checked_add(positions));
    assert!(
        end.is_some_and(|end| end <= weights.len()),
        "{} weights at stride {stride} for {positions} positions",
        weights.len()
    );
    dispatch!(cpu, mix(head, weights, stride, out))
}

/// Row `q` of `scores` becomes the products of query `q` with every position of `keys`.
///
/// # Safety
/// The CPU has the instruction set of `L`. `keys` is whole blocks of its width in elements;
/// `queries` is `q × width`; `q` rows of `scores` begin every `stride` elements, which
/// is no less than the positions of `keys`, and the last of them has as many.
#[inline(always)]
unsafe fn scores<L: Lanes, const Q: usize>(
    keys: Head<'_>,
    queries: &[f32],
    scores: &mut [f32],
    stride: usize,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        match keys.dtype {
            DType::F32 => scores_as::<L, F32, Q>(keys, queries, scores, stride),
            DType::F16 => scores_as::<L, F16, Q>(keys, queries, scores, stride),
            DType::BF16 => scores_as::<L, BF16, Q>(keys, queries, scores, stride),
            _ => {}
        }
    }
}

/// [`scores`] of keys in the format `S`.
///
/// # Safety
/// As for [`scores`].
#[inline(always)]
unsafe fn scores_as<L: Lanes, S: Stored, const Q: usize>(
    keys: Head<'_>,
    queries: &[f32],
    scores: &mut [f32],
    stride: usize,
) {
    let head_dim = keys.width;
    let count = queries.len() / head_dim;
    for (block, keys) in keys.bytes.chunks_exact(head_dim * S::BYTES).enumerate() {
        let mut q = 0;
        while q < count {
            // SAFETY: a tile takes no more queries than are left, each with `head_dim`
            // elements and with 32 scores at this block; the caller guarantees the rest.
            unsafe {
                let from = Strided {
                    base: queries.as_ptr().add(q * head_dim),
                    stride: head_dim,
                };
                let to = Strided {
                    base: scores.as_mut_ptr().add(q * stride + block * GROUP),
                    stride,
                };
                q += match count - q {
                    left if left >= Q => score_tile::<L, S, Q>(keys, from, to, Q),
                    left @ 5.. if Q == 8 => score_tile::<L, S, Q>(keys, from, to, left),
                    left @ 3..=4 if Q > 4 => score_tile::<L, S, 4>(keys, from, to, left),
                    left @ 2.. if Q > 2 => score_tile::<L, S, 2>(keys, from, to, left.min(2)),
                    _ => score_tile::<L, S, 1>(keys, from, to, 1),
                };
            }
        }
    }
}

/// The scores of `count <= Q` queries for one block of positions. Returns `count`. Strides are in
/// elements; unused rows of the tile repeat the last query.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `1 <= count <= Q`. `keys` holds `head_dim`
/// groups of 32 elements, `head_dim` being the stride of `queries`, which is valid for reads of
/// `count` vectors of as many elements; `scores` is valid for writes of 32 elements every stride, `count` times, and
/// nothing else refers to them.
#[inline(always)]
unsafe fn score_tile<L: Lanes, S: Stored, const Q: usize>(
    keys: &[u8],
    queries: Strided<*const f32>,
    scores: Strided<*mut f32>,
    count: usize,
) -> usize {
    let (keys, head_dim) = (keys.as_ptr(), queries.stride);
    // SAFETY: the caller guarantees the instruction set and all elements.
    unsafe {
        let mut sums = [L::zero(); Q];
        for d in 0..head_dim {
            fetch_group::<S>(keys.wrapping_add(d * S::BYTES + AHEAD));
            let keys = S::load::<L>(keys.add(d * S::BYTES), 1.0, 0.0);
            for (q, sum) in sums.iter_mut().enumerate() {
                let query = queries.base.add(q.min(count - 1) * head_dim);
                *sum = L::splat(*query.add(d)).mul_add(keys, *sum);
            }
        }
        for (q, sum) in sums.into_iter().enumerate() {
            sum.store_f32(scores.base.add(q.min(count - 1) * scores.stride).cast());
        }
    }
    count
}

#[inline(always)]
fn fetch_group<S: Stored>(from: *const u8) {
    for at in (0..S::BYTES).step_by(LINE) {
        prefetch(from.wrapping_add(at));
    }
}

/// Adds `weights[q * stride + p] · value p` for every position `p` in order to row `q` of
/// `out`.
///
/// # Safety
/// The CPU has the instruction set of `L`. The width of `values` is a multiple of 32, they are
/// `positions × width`, `out` is `q × width`, and `weights` has all the elements named.
#[inline(always)]
unsafe fn mix<L: Lanes, const Q: usize, const G: usize>(
    values: Head<'_>,
    weights: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    // SAFETY: passed on from the caller.
    unsafe {
        match values.dtype {
            DType::F32 => mix_as::<L, F32, Q, G>(values, weights, stride, out),
            DType::F16 => mix_as::<L, F16, Q, G>(values, weights, stride, out),
            DType::BF16 => mix_as::<L, BF16, Q, G>(values, weights, stride, out),
            _ => {}
        }
    }
}

/// [`mix`] of values in the format `S`.
///
/// # Safety
/// As for [`mix`].
#[inline(always)]
unsafe fn mix_as<L: Lanes, S: Stored, const Q: usize, const G: usize>(
    values: Head<'_>,
    weights: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    let width = values.width;
    let (groups, count) = (width / GROUP, out.len() / width);
    let row = groups * S::BYTES;
    for (span, values) in values.bytes.chunks(SPAN * row).enumerate() {
        let here = values.len() / row;
        let mut g = 0;
        while g < groups {
            // SAFETY: no more groups than are left; the caller guarantees the rest.
            unsafe {
                let values = Strided {
                    base: values.as_ptr().add(g * S::BYTES),
                    stride: row,
                };
                let weights = Strided {
                    base: weights[span * SPAN..].as_ptr(),
                    stride,
                };
                let out = Strided {
                    base: out.as_mut_ptr().add(g * GROUP),
                    stride: width,
                };
                g += if groups - g >= G {
                    mix_groups::<L, S, Q, G>(values, weights, here, out, count)
                } else {
                    mix_groups::<L, S, Q, 1>(values, weights, here, out, count)
                };
            }
        }
    }
}

/// Adds values to `G` groups of all `count` sums. Returns `G`.
///
/// # Safety
/// The CPU has the instruction set of `L`. `values` is valid for reads of `G` groups every
/// stride, `positions` times; `out` is valid for reads and writes of `G` groups every stride,
/// `count` times, and nothing else refers to them. `weights` is valid for reads of `positions`
/// elements every stride, `count` times.
#[inline(always)]
unsafe fn mix_groups<L: Lanes, S: Stored, const Q: usize, const G: usize>(
    values: Strided<*const u8>,
    weights: Strided<*const f32>,
    positions: usize,
    out: Strided<*mut f32>,
    count: usize,
) -> usize {
    let mut q = 0;
    while q < count {
        // SAFETY: a tile takes no more queries than are left; the caller guarantees the
        // rest.
        unsafe {
            let weights = Strided {
                base: weights.base.add(q * weights.stride),
                ..weights
            };
            let out = Strided {
                base: out.base.add(q * out.stride),
                ..out
            };
            q += match count - q {
                left if left >= Q => mix_tile::<L, S, Q, G>(values, weights, positions, out, Q),
                left @ 3.. if Q == 4 => {
                    mix_tile::<L, S, Q, G>(values, weights, positions, out, left)
                }
                2.. if Q > 2 => mix_tile::<L, S, 2, G>(values, weights, positions, out, 2),
                _ => mix_tile::<L, S, 1, G>(values, weights, positions, out, 1),
            };
        }
    }
    G
}

/// Adds `positions` values to `G` groups of `count <= Q` sums. Returns `count`. What is left of
/// the tile repeats the last query.
///
/// # Safety
/// As for [`mix_groups`], and `1 <= count <= Q`.
#[inline(always)]
unsafe fn mix_tile<L: Lanes, S: Stored, const Q: usize, const G: usize>(
    values: Strided<*const u8>,
    weights: Strided<*const f32>,
    positions: usize,
    out: Strided<*mut f32>,
    count: usize,
) -> usize {
    let (row, width) = (values.stride, out.stride);
    // SAFETY: the caller guarantees the instruction set and all elements.
    unsafe {
        let out = |q: usize, g: usize| {
            out.base
                .add(q.min(count - 1) * width + g * GROUP)
                .cast::<u8>()
        };
        let mut sums = [[L::zero(); G]; Q];
        for (q, sums) in sums.iter_mut().enumerate() {
            for (g, sum) in sums.iter_mut().enumerate() {
                *sum = L::load_f32(out(q, g));
            }
        }
        for p in 0..positions {
            let mut value = [L::zero(); G];
            for (g, value) in value.iter_mut().enumerate() {
                fetch_group::<S>(values.base.wrapping_add(p * row + g * S::BYTES + AHEAD));
                *value = S::load::<L>(values.base.add(p * row + g * S::BYTES), 1.0, 0.0);
            }
            for (q, sums) in sums.iter_mut().enumerate() {
                let weight = L::splat(*weights.base.add(q.min(count - 1) * weights.stride + p));
                for (sum, value) in sums.iter_mut().zip(value) {
                    *sum = weight.mul_add(value, *sum);
                }
            }
        }
        for (q, sums) in sums.into_iter().enumerate() {
            for (g, sum) in sums.into_iter().enumerate() {
                sum.store_f32(out(q, g));
            }
        }
    }
    count
}
