//! Rows with one scale times tokens with one scale, by the channel rule of the crate's
//! `channel.rs`: the sums of all groups are added as integers, scales come last.

use super::{
    dot::{Chunks, Unit, further, prefetch_chunk},
    form::Form,
    gemm::{MAX_ROWS, Out, Panel, Step, Tile, Tokens},
};
use crate::{
    ActivationsRef, Chunk, Row,
    activations::{CHUNK, CHUNK_GROUPS},
    channel::{Outliers, scale_of},
    dtype::{GROUP, MAX_OUTLIERS},
    matrix::Rows,
};

/// The scale of a token; 0 of one without elements.
#[inline(always)]
fn scale_of_token(x: &[Chunk]) -> f32 {
    x.first().map_or(0.0, |chunk| chunk.scales[0])
}

/// A sum, of so large a row and token scale.
#[inline(always)]
fn scaled(sum: i32, row: f32, token: f32) -> f32 {
    sum as f32 * (row * token)
}

/// The products of a row, in the format `F`, and `T` tokens, without outliers; prefetches the row
/// `ahead`.
///
/// # Safety
/// The CPU has the instruction set of `U`; the row has the format `F`, and each of `T` tokens a chunk
/// for every 512 elements of it; `ahead` is not read.
#[inline(always)]
pub(super) unsafe fn tile<U: Unit, F: Form, const T: usize>(
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
            products[t] = scaled(sum, scale_of(row), (*xs[t]).scales[0]);
        }
        products
    }
}

/// The product of a row and a token whose sums are known: of all elements, and of the outliers if there
/// are any.
#[inline(always)]
pub(super) fn of_sums(row: Row<'_>, sums: &[i32], x: &[Chunk]) -> f32 {
    let token = scale_of_token(x);
    let product = scaled(sums[0], scale_of(row), token);
    match sums.get(1) {
        Some(&more) => product + scaled(more, Outliers::of(row).scale, token),
        None => product,
    }
}

/// Calls `place` with row, token and what the row's outliers add to the product, for all rows and
/// tokens.
#[inline(always)]
pub(super) fn add_outliers<R: Rows>(
    rows: R,
    xs: ActivationsRef<'_>,
    mut place: impl FnMut(usize, usize, f32),
) {
    let mut first = 0;
    while first < rows.count() {
        // Rows of a matrix have the same outliers: a token's are gathered once for all of them.
        let channels = Outliers::of(rows.at(first)).channels;
        let alike = |&r: &usize| Outliers::of(rows.at(r)).channels == channels;
        let count = 1 + (first + 1..rows.count()).take_while(alike).count();
        for t in 0..xs.tokens() {
            let x = xs.range(t, 1).chunks();
            let mut gathered = [0i8; MAX_OUTLIERS];
            for (to, (_, channel)) in gathered.iter_mut().zip(Outliers::of(rows.at(first)).each()) {
                *to = ActivationsRef::quant(x, channel).unwrap_or(0);
            }
            for r in first..first + count {
                let its = Outliers::of(rows.at(r));
                let products = its.quants.iter().zip(&gathered);
                let products = products.map(|(&q, &x)| i32::from(q as i8) * i32::from(x));
                place(r, t, scaled(products.sum(), its.scale, scale_of_token(x)));
            }
        }
        first += count;
    }
}

/// Of rows without elements.
static NO_SCALES: [f32; MAX_ROWS] = [0.0; MAX_ROWS];

/// Writes the scales of a panel's rows behind the quants of its first group.
///
/// # Safety
/// The panel is packed for so many rows.
#[inline(always)]
pub(super) unsafe fn pack_scales(rows: &[Row<'_>], panel: Panel) {
    if panel.groups == 0 {
        return;
    }
    for (r, &row) in rows.iter().enumerate() {
        // SAFETY: a group has room for the scales of all rows, and is aligned.
        unsafe {
            let to = panel.group(0).add(rows.len() * GROUP).cast::<f32>();
            to.add(r).write(scale_of(row));
        }
    }
}

/// `P` panels times `T` tokens, without outliers.
///
/// # Safety
/// The CPU has the instruction set of `K`. [`Tile::pack`] and [`pack_scales`] have packed `P` panels one
/// after the other in memory, with the same `F`; they have as many groups as the activations, which are
/// of `T` tokens.
#[inline(always)]
pub(super) unsafe fn panels<K: Tile, F: Form, const P: usize, const T: usize>(
    panel: Panel,
    xs: ActivationsRef<'_>,
    out: &mut Out<'_, '_>,
) {
    let (stride, apart) = (xs.n().div_ceil(CHUNK), panel.bytes());
    // SAFETY: the panels hold all their groups, and every group has its chunk; sums are an i32 for each
    // row, of which any bits are some.
    unsafe {
        const { assert!(size_of::<K::Sums>() == K::ROWS * size_of::<i32>()) };
        let mut all = [[std::mem::zeroed::<K::Sums>(); T]; P];
        for m in 0..CHUNK_GROUPS.min(panel.groups) {
            let mut group = panel.group(m).cast_const();
            let first = xs.chunks().as_ptr();
            let mut x = Tokens { first, stride };
            for _ in 0..panel.chain_len(m) {
                let sums = K::sums::<F, P, T>(Step { group, apart, x, m });
                for p in 0..P {
                    for t in 0..T {
                        all[p][t] = K::more(all[p][t], sums[p][t]);
                    }
                }
                group = group.add(panel.group_bytes);
                x.first = x.first.wrapping_add(1);
            }
        }
        for p in 0..P {
            let width = K::ROWS.min(out.width - p * K::ROWS);
            let scales = match panel.groups {
                0 => NO_SCALES.as_ptr(),
                _ => panel.group(0).add(p * apart + K::ROWS * GROUP).cast(),
            };
            for t in 0..T {
                let token = scale_of_token(xs.range(t, 1).chunks());
                let sums = (&raw const all[p][t]).cast::<i32>();
                let row = &mut out.y.row_mut(out.t + t)[out.r + p * K::ROWS..][..width];
                for (r, y) in row.iter_mut().enumerate() {
                    *y = scaled(sums.add(r).read_unaligned(), *scales.add(r), token);
                }
            }
        }
    }
}
