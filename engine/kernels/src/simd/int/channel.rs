//! Rows with one scale times tokens with one scale, by the channel rule of the crate's
//! `channel.rs`: the sums of all groups are added as integers, scales come last.

use crate::{
    ActivationsRef, Chunk, Row,
    channel::{Outliers, scale_of},
    dtype::MAX_OUTLIERS,
    matrix::Rows,
};

/// The scale of a token; 0 of one without elements.
#[inline(always)]
pub(super) fn scale_of_token(x: &[Chunk]) -> f32 {
    x.first().map_or(0.0, |chunk| chunk.scales[0])
}

/// A sum, of so large a row and token scale.
#[inline(always)]
pub(super) fn scaled(sum: i32, row: f32, token: f32) -> f32 {
    sum as f32 * (row * token)
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
