//! One row times one token or a few: the decode case, bound by memory bandwidth.
//!
//! A row is read once for all tokens. A tile of up to [`TILE`] tokens shares its decoded weights,
//! each token with its own chains. Where transposed weights are faster from some tokens on, see
//! `avx512_few`.

use super::{
    channel,
    form::{Form, with_form},
    unit::{Chunks, Unit},
};
use crate::{
    ActivationsRef, Chunk, Row,
    activations::{CHUNK, CHUNK_GROUPS},
    channel::scale_of,
    columns::Columns,
    dtype::{GROUP, super_bytes},
    matrix::Rows,
    q4k,
};

/// Prefetch distance in bytes. 4 to 64 KiB are equally fast; without prefetching a core reaches
/// half the memory bandwidth.
const AHEAD: usize = 8192;
pub(super) const CACHE_LINE: usize = 64;
/// Tokens of the largest tile.
const TILE: usize = 3;

/// Chunks of a row whose scales and minimums are widened once for all tiles; a longer row's others
/// are widened by every tile.
const WIDENED: usize = 32;

/// The scales and minimums of the first chunks of a q4k row.
type Widened<U> = [[<U as Unit>::Chains; 2]; WIDENED];

/// Sum of `row · x` by the chain rule.
///
/// # Safety
/// The CPU has the instruction set of `U`; the row is grouped, and `x` has a chunk for
/// every 512 elements of it.
#[inline(always)]
pub(super) unsafe fn dot<U: Unit>(row: Row<'_>, x: &[Chunk]) -> f32 {
    debug_assert_eq!(x.len(), row.len().div_ceil(CHUNK));
    // SAFETY: passed on from the caller; there is one token.
    let [sum] =
        unsafe { with_form!(row.dtype(), F => tile::<U, F, 1>(row, [x.as_ptr()], None, None)) };
    sum
}

/// [`dot`] of a row whose exact sums are known, as many as [`DType::sums`](crate::DType::sums) says.
///
/// # Safety
/// As for [`dot`]; there are all sums of the row.
#[inline(always)]
pub(super) unsafe fn of_sums<U: Unit>(row: Row<'_>, sums: &[i32], x: &[Chunk]) -> f32 {
    // SAFETY: passed on from the caller.
    unsafe { with_form!(row.dtype(), F => of_sums_as::<U, F>(row, sums, x)) }
}

/// [`of_sums`] in the format `F`.
///
/// # Safety
/// As for [`of_sums`].
#[inline(always)]
unsafe fn of_sums_as<U: Unit, F: Form>(row: Row<'_>, sums: &[i32], x: &[Chunk]) -> f32 {
    const { assert!(size_of::<U::Sums>() == size_of::<[i32; CHUNK_GROUPS]>()) };
    if F::CHANNEL {
        return channel::of_sums(row, sums, x);
    }
    let scales_bytes = const { F::DTYPE.scales_bytes(CHUNK) };
    // SAFETY: chunk `k` of the row has the scales of its groups; sums are 16 i32.
    unsafe {
        let mut chains = U::zero();
        for (k, (sums, x)) in sums.chunks(CHUNK_GROUPS).zip(x).enumerate() {
            let mut all = [0; CHUNK_GROUPS];
            all[..sums.len()].copy_from_slice(sums);
            let its_sums = all.as_ptr().cast::<U::Sums>().read_unaligned();
            let scales = row.scales().as_ptr().add(k * scales_bytes);
            let Factors { scales, mins } = factors_of::<U, F>(scales, sums.len(), None);
            chains = U::add(chains, its_sums, scales, x);
            if let Some(mins) = mins {
                chains = U::less(chains, mins, x);
            }
        }
        U::fold(chains)
    }
}

/// [`dot`] of every row.
///
/// # Safety
/// As for [`dot`]; all rows have the same format, and `y` has an element for each.
#[inline(always)]
pub(super) unsafe fn dots<U: Unit, R: Rows>(rows: R, x: &[Chunk], y: &mut [f32]) {
    debug_assert_eq!(rows.count(), y.len());
    if y.is_empty() {
        return;
    }
    // SAFETY: passed on from the caller; there is one token.
    unsafe { with_form!(rows.at(0).dtype(), F => dots_as::<U, R, F>(rows, x, y)) }
}

/// [`dots`] of at least one row, in the format `F`.
///
/// # Safety
/// As for [`dots`].
#[inline(always)]
unsafe fn dots_as<U: Unit, R: Rows, F: Form>(rows: R, x: &[Chunk], y: &mut [f32]) {
    let distance = begin::<U, R>(rows);
    let last = rows.count() - 1;
    for (r, y) in y.iter_mut().enumerate() {
        let ahead = rows.at((r + distance).min(last));
        // SAFETY: passed on from the caller; there is one token.
        [*y] = unsafe { tile::<U, F, 1>(rows.at(r), [x.as_ptr()], Some(ahead), None) };
    }
}

/// [`dot`] of every row and every token: `y.row(t)[r] = row r · token t`.
///
/// # Safety
/// As for [`dot`] and each token; there is at least one row, all rows have the same format, in the format `F`, and `y` has a row for each token and a column for each weight row.
#[inline(always)]
pub(super) unsafe fn dots_tokens<U: Unit, R: Rows, F: Form>(
    rows: R,
    xs: ActivationsRef<'_>,
    y: &mut Columns<'_, f32>,
) {
    let (first, stride) = (xs.chunks().as_ptr(), xs.n().div_ceil(CHUNK));
    let distance = begin::<U, R>(rows);
    let last = rows.count() - 1;
    // SAFETY: the caller guarantees the instruction set.
    let mut room = unsafe { [[U::zero(); 2]; WIDENED] };
    for r in 0..rows.count() {
        let mut ahead = Some(rows.at((r + distance).min(last)));
        // SAFETY: passed on from the caller.
        let widened = unsafe { widen::<U, F>(rows.at(r), xs.tokens(), &mut room) };
        let mut t = 0;
        while t < xs.tokens() {
            let width = TILE.min(xs.tokens() - t);
            let mut these = [first; TILE];
            for i in 0..width {
                these[i] = first.wrapping_add((t + i) * stride);
            }
            // SAFETY: the tokens from `t` to `t + width` exist.
            let sums = unsafe { upto::<U, F>(rows.at(r), &these[..width], ahead.take(), widened) };
            for (i, &sum) in sums[..width].iter().enumerate() {
                y.row_mut(t + i)[r] = sum;
            }
            t += width;
        }
    }
}

/// [`dot`] of the pairs of row `r` and token `t` whose bit `t` is set in the `r`-th of the masks;
/// each has a word for 64 tokens. `out[r × tokens + t]` becomes the product, or zero.
///
/// # Safety
/// As for [`dot`] and each token; all rows have the same format, `out` has an element for each
/// pair, and no bit beyond the tokens is set.
#[inline(always)]
pub(super) unsafe fn pairs<U: Unit>(
    rows: &[Row<'_>],
    xs: ActivationsRef<'_>,
    masks: &[u64],
    out: &mut [f32],
) {
    let Some(row) = rows.first() else { return };
    // SAFETY: passed on from the caller.
    unsafe { with_form!(row.dtype(), F => pairs_as::<U, F>(rows, xs, masks, out)) }
}

/// [`pairs`] of at least one row, in the format `F`.
///
/// # Safety
/// As for [`pairs`].
#[inline(always)]
unsafe fn pairs_as<U: Unit, F: Form>(
    rows: &[Row<'_>],
    xs: ActivationsRef<'_>,
    masks: &[u64],
    out: &mut [f32],
) {
    let (first, stride) = (xs.chunks().as_ptr(), xs.n().div_ceil(CHUNK));
    let (tokens, words) = (xs.tokens(), xs.tokens().div_ceil(64));
    let distance = begin::<U, &[Row<'_>]>(rows);
    let last = rows.len() - 1;
    // SAFETY: the caller guarantees the instruction set.
    let mut room = unsafe { [[U::zero(); 2]; WIDENED] };
    for (r, out) in out.chunks_exact_mut(tokens).enumerate() {
        let mut ahead = Some(rows[(r + distance).min(last)]);
        out.fill(0.0);
        let mask = &masks[r * words..(r + 1) * words];
        let named = mask.iter().map(|word| word.count_ones() as usize).sum();
        // SAFETY: passed on from the caller.
        let widened = unsafe { widen::<U, F>(rows[r], named, &mut room) };
        let (mut word, mut bits) = (0, mask[0]);
        loop {
            // The next tokens of the row.
            let (mut these, mut at, mut width) = ([first; TILE], [0; TILE], 0);
            while width < TILE {
                if bits == 0 {
                    word += 1;
                    if word >= words {
                        break;
                    }
                    bits = mask[word];
                    continue;
                }
                at[width] = 64 * word + bits.trailing_zeros() as usize;
                these[width] = first.wrapping_add(at[width] * stride);
                bits &= bits - 1;
                width += 1;
            }
            if width == 0 {
                break;
            }
            // SAFETY: the caller guarantees the tokens that are named.
            let sums = unsafe { upto::<U, F>(rows[r], &these[..width], ahead.take(), widened) };
            for i in 0..width {
                out[at[i]] = sums[i];
            }
        }
    }
}

/// [`tile`] of 1 to [`TILE`] tokens; the other sums are zero.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn upto<U: Unit, F: Form>(
    row: Row<'_>,
    xs: &[*const Chunk],
    ahead: Option<Row<'_>>,
    widened: Option<&Widened<U>>,
) -> [f32; TILE] {
    let mut sums = [0.0; TILE];
    // SAFETY: passed on from the caller.
    unsafe {
        match *xs {
            [a] => [sums[0]] = tile::<U, F, 1>(row, [a], ahead, widened),
            [a, b] => [sums[0], sums[1]] = tile::<U, F, 2>(row, [a, b], ahead, widened),
            [a, b, c] => sums = tile::<U, F, TILE>(row, [a, b, c], ahead, widened),
            _ => {}
        }
    }
    sums
}

/// Widens the scales and minimums of a row, where the format has any and more than one tile of
/// `tokens` reads them.
///
/// # Safety
/// The CPU has the instruction set of `U`; the row has the format `F`.
#[inline(always)]
unsafe fn widen<'a, U: Unit, F: Form>(
    row: Row<'_>,
    tokens: usize,
    room: &'a mut Widened<U>,
) -> Option<&'a Widened<U>> {
    if !F::MINS || tokens <= TILE {
        return None;
    }
    let groups = row.len().div_ceil(GROUP);
    for (k, first) in (0..groups).step_by(CHUNK_GROUPS).take(WIDENED).enumerate() {
        // SAFETY: the row has the scales of so many groups from chunk `k` on.
        unsafe {
            let scales = row
                .scales()
                .as_ptr()
                .add(F::DTYPE.scales_bytes(first * GROUP));
            room[k] = factors::<U>(scales, CHUNK_GROUPS.min(groups - first));
        }
    }
    Some(room)
}

/// Prefetches the first rows, but for the very first one, which is needed at once. Returns how many
/// rows to prefetch ahead.
#[inline(always)]
pub(super) fn begin<U: Unit, R: Rows>(rows: R) -> usize {
    let bytes = rows.at(0).quants().len().max(1);
    let distance = AHEAD.div_ceil(bytes);
    for r in 1..distance.min(rows.count()) {
        prefetch_row::<U>(rows.at(r));
    }
    distance
}

/// Prefetches all of a row.
#[inline(always)]
pub(super) fn prefetch_row<U: Unit>(row: Row<'_>) {
    for part in [row.quants(), row.scales()] {
        for line in (0..part.len()).step_by(CACHE_LINE) {
            U::prefetch(part.as_ptr().wrapping_add(line));
        }
    }
}

/// Prefetches chunk `k` of a row in the format `F`.
#[inline(always)]
pub(super) fn prefetch_chunk<U: Unit, F: Form>(row: Row<'_>, k: usize) {
    let bytes = const { F::DTYPE.quants_bytes(CHUNK) };
    let scales_bytes = const { F::DTYPE.scales_bytes(CHUNK) };
    let (quants, scales) = (row.quants().as_ptr(), row.scales().as_ptr());
    for line in (0..bytes).step_by(CACHE_LINE) {
        U::prefetch(quants.wrapping_add(k * bytes + line));
    }
    U::prefetch(scales.wrapping_add(k * scales_bytes));
}

/// The products of a row, in the format `F`, and `T` tokens; prefetches the row
/// `ahead`. `widened` holds its factors, if they were widened already.
///
/// # Safety
/// As for [`dot`] and each of `T` tokens; `ahead` is not read.
#[inline(always)]
unsafe fn tile<U: Unit, F: Form, const T: usize>(
    row: Row<'_>,
    xs: Chunks<T>,
    ahead: Option<Row<'_>>,
    widened: Option<&Widened<U>>,
) -> [f32; T] {
    if F::CHANNEL {
        // SAFETY: passed on from the caller.
        return unsafe { channel_tile::<U, F, T>(row, xs, ahead) };
    }
    let known = |k: usize| widened.and_then(|widened| widened.get(k)).copied();
    let bytes = const { F::DTYPE.quants_bytes(CHUNK) };
    let scales_bytes = const { F::DTYPE.scales_bytes(CHUNK) };
    // Every full chunk of a row has all its groups; the last chunk may be short.
    let groups = row.len().div_ceil(GROUP);
    let (full, rest) = (groups / CHUNK_GROUPS, groups % CHUNK_GROUPS);
    let (quants, scales) = (row.quants().as_ptr(), row.scales().as_ptr());
    // SAFETY: chunk `k < full` of the row has all its bytes, the last one its groups; each token
    // has as many chunks.
    unsafe {
        let mut chains = [U::zero(); T];
        for k in 0..full {
            if let Some(ahead) = ahead {
                prefetch_chunk::<U, F>(ahead, k);
            }
            let (quants, scales) = (quants.add(k * bytes), scales.add(k * scales_bytes));
            let factors = factors_of::<U, F>(scales, CHUNK_GROUPS, known(k));
            step::<U, F, T>(&mut chains, quants, factors, CHUNK_GROUPS, further(xs, k));
        }
        if rest > 0 {
            let (quants, scales) = (quants.add(full * bytes), scales.add(full * scales_bytes));
            let factors = factors_of::<U, F>(scales, rest, known(full));
            step::<U, F, T>(&mut chains, quants, factors, rest, further(xs, full));
        }
        let mut sums = [0.0; T];
        for t in 0..T {
            sums[t] = U::fold(chains[t]);
        }
        sums
    }
}

/// The products of a row, in the format `F`, and `T` tokens, without outliers; prefetches the row
/// `ahead`.
///
/// # Safety
/// The CPU has the instruction set of `U`; the row has the format `F`, and each of `T` tokens a chunk
/// for every 512 elements of it; `ahead` is not read.
#[inline(always)]
unsafe fn channel_tile<U: Unit, F: Form, const T: usize>(
    row: Row<'_>,
    xs: Chunks<T>,
    ahead: Option<Row<'_>>,
) -> [f32; T] {
    let bytes = const { F::DTYPE.quants_bytes(CHUNK) };
    let groups = row.len().div_ceil(GROUP);
    if groups == 0 {
        return [0.0; T];
    }
    // SAFETY: chunk `k` of the row has `count` groups, and each token that chunk; sums are 16 i32, of
    // which any bits are some.
    unsafe {
        const { assert!(size_of::<U::Sums>() == size_of::<[i32; CHUNK_GROUPS]>()) };
        let mut all = [std::mem::zeroed::<U::Sums>(); T];
        for (k, first) in (0..groups).step_by(CHUNK_GROUPS).enumerate() {
            if let Some(ahead) = ahead {
                prefetch_chunk::<U, F>(ahead, k);
            }
            let count = CHUNK_GROUPS.min(groups - first);
            let (quants, xs) = (row.quants().as_ptr().add(k * bytes), further(xs, k));
            if F::NIBBLES {
                let sums = U::nibbles_tokens::<F, T>(quants, count, xs);
                for t in 0..T {
                    all[t] = U::both(all[t], sums[t]);
                }
            } else {
                for t in 0..T {
                    all[t] = U::both(all[t], U::q8(quants, count, &*xs[t]));
                }
            }
        }
        let mut products = [0.0; T];
        for t in 0..T {
            let sums: [i32; CHUNK_GROUPS] = std::mem::transmute_copy(&all[t]);
            let sum = sums.into_iter().fold(0, i32::wrapping_add);
            products[t] = channel::scaled(sum, scale_of(row), (*xs[t]).scales[0]);
        }
        products
    }
}

/// The chunks `k` further on.
#[inline(always)]
pub(super) fn further<const T: usize>(mut xs: Chunks<T>, k: usize) -> Chunks<T> {
    for t in 0..T {
        xs[t] = xs[t].wrapping_add(k);
    }
    xs
}

/// What the quants of up to 16 groups are multiplied by.
pub(super) struct Factors<U: Unit> {
    pub scales: U::Chains,
    /// Of a format that has them.
    pub mins: Option<U::Chains>,
}

/// The scales of `groups <= 16` groups, and the minimums where the format has them; `known` if they
/// were widened already.
///
/// # Safety
/// As for [`Unit::scales`] or [`factors`].
#[inline(always)]
pub(super) unsafe fn factors_of<U: Unit, F: Form>(
    scales: *const u8,
    groups: usize,
    known: Option<[U::Chains; 2]>,
) -> Factors<U> {
    // SAFETY: passed on from the caller.
    unsafe {
        if !F::MINS {
            return Factors {
                scales: scales_of::<U, F>(scales, groups),
                mins: None,
            };
        }
        let [scales, mins] = match known {
            Some(known) => known,
            None => factors::<U>(scales, groups),
        };
        Factors {
            scales,
            mins: Some(mins),
        }
    }
}

/// Adds `groups` groups in the format `F` and one chunk of each token's activations.
///
/// # Safety
/// As for [`Unit::nibbles`] or [`Unit::q8`], of each of `T` tokens.
#[inline(always)]
unsafe fn step<U: Unit, F: Form, const T: usize>(
    chains: &mut [U::Chains; T],
    quants: *const u8,
    Factors { scales, mins }: Factors<U>,
    groups: usize,
    xs: Chunks<T>,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        if F::NIBBLES {
            let sums = U::nibbles_tokens::<F, T>(quants, groups, xs);
            for t in 0..T {
                chains[t] = U::add(chains[t], sums[t], scales, &*xs[t]);
                if let Some(mins) = mins {
                    chains[t] = U::less(chains[t], mins, &*xs[t]);
                }
            }
            return;
        }
        for t in 0..T {
            let x = &*xs[t];
            chains[t] = U::add(chains[t], U::q8(quants, groups, x), scales, x);
        }
    }
}

/// The scales of `groups <= 16` groups of a format without minimums; the other ones are zero.
///
/// # Safety
/// The CPU has the instruction set of `U`, and `scales` is valid for reads of what so many groups
/// take.
#[inline(always)]
pub(super) unsafe fn scales_of<U: Unit, F: Form>(scales: *const u8, groups: usize) -> U::Chains {
    // SAFETY: passed on from the caller.
    unsafe {
        match F::FLOATS {
            true => U::exponents(scales, groups),
            false => U::scales(scales, groups),
        }
    }
}

/// The scales and the minimums of `groups <= 16` groups of q4k; the other ones are zero.
///
/// # Safety
/// The CPU has the instruction set of `U`, and `scales` is valid for reads of what so many groups
/// take.
#[inline(always)]
pub(super) unsafe fn factors<U: Unit>(scales: *const u8, groups: usize) -> [U::Chains; 2] {
    // SAFETY: passed on from the caller.
    unsafe {
        if groups == CHUNK_GROUPS {
            return U::super_blocks(scales);
        }
        let bytes = std::slice::from_raw_parts(scales, super_bytes(groups));
        let (scales, mins) = q4k::factors::<CHUNK_GROUPS>(bytes, groups, 0, groups);
        [U::chains(&scales), U::chains(&mins)]
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
