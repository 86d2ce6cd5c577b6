//! Rows with one scale times tokens with one scale, by the channel rule of the crate's
//! `channel.rs`: the sums of all groups are added as integers, scales come last.

use crate::{
    ActivationsRef, Chunk, Row,
    channel::{Outliers, scale_of},
    dtype::{DType, MAX_OUTLIERS},
    excess::{EXCESSES, element},
    matrix::Rows,
    q4k::nibble,
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

/// The excess of a token, as floats.
#[derive(Clone, Copy, Default)]
struct Gathered {
    count: usize,
    elements: [usize; EXCESSES],
    values: [f32; EXCESSES],
    /// Which outlier of the rows stands for the element, if one does.
    outliers: [Option<usize>; EXCESSES],
}

impl Gathered {
    /// The excess of `x`, one token. `None` if two outliers stand for one element.
    #[inline(always)]
    fn of(x: ActivationsRef<'_>, outliers: Outliers<'_>) -> Option<Gathered> {
        let (mut all, scale) = (Gathered::default(), scale_of_token(x.chunks()));
        for its in x.excess().iter().flatten().filter(|its| its.steps != 0) {
            let element = its.element as usize;
            let places = outliers.each().enumerate();
            let mut here = places.filter(|&(_, (_, at))| at == element);
            all.elements[all.count] = element;
            all.values[all.count] = its.steps as f32 * scale;
            all.outliers[all.count] = here.next().map(|(place, _)| place);
            all.count += 1;
            if here.next().is_some() {
                return None;
            }
        }
        Some(all)
    }

    /// The product with the row of which an element, with its outlier, is `weight`.
    #[inline(always)]
    fn product(&self, weight: impl Fn(usize, Option<usize>) -> f32) -> f32 {
        let of = |i: usize| weight(self.elements[i], self.outliers[i]) * self.values[i];
        (0..self.count).fold(0.0, |sum, i| sum + of(i))
    }
}

/// Calls `place` with row, token and the product of the row with the token's excess, for all tokens that have one.
#[inline(always)]
pub(super) fn add_excess<R: Rows>(
    rows: R,
    xs: ActivationsRef<'_>,
    mut place: impl FnMut(usize, usize, f32),
) {
    if rows.count() == 0 {
        return;
    }
    let outliers = Outliers::of(rows.at(0));
    for t in 0..xs.tokens() {
        let x = xs.range(t, 1);
        let gathered = Gathered::of(x, outliers);
        if gathered.is_some_and(|gathered| gathered.count == 0) {
            continue;
        }
        for r in 0..rows.count() {
            let row = rows.at(r);
            let (quants, scale) = (row.quants(), scale_of(row));
            // By `element` alone, which looks at the format for each of them, prompts in q8c take 1.45 times as long.
            let product = match (row.dtype(), gathered) {
                (DType::Q8c, Some(all)) => all.product(|i, _| f32::from(quants[i] as i8) * scale),
                (DType::Q4c, Some(all)) if Outliers::of(row).channels == outliers.channels => {
                    let its = Outliers::of(row);
                    all.product(|i, outlier| {
                        let dense = f32::from(nibble(quants, i) as i8 - 8) * scale;
                        let quant = outlier.map(|place| f32::from(its.quants[place] as i8));
                        quant.map_or(dense, |quant| dense + quant * its.scale)
                    })
                }
                (_, Some(all)) => all.product(|i, _| element(row, i)),
                (_, None) => {
                    let none = Outliers::of(Row::f32(&[]));
                    let all = Gathered::of(x, none).unwrap_or_default();
                    all.product(|i, _| element(row, i))
                }
            };
            place(r, t, product);
        }
    }
}
