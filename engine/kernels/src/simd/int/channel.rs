//! Rows with one scale times tokens with one scale, by the channel rule of the crate's
//! `channel.rs`: the sums of all groups are added as integers, scales come last.

use std::ops::Range;

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
/// are any. That of no elements is +0, whatever the sign of the row's scale.
#[inline(always)]
pub(super) fn of_sums(row: Row<'_>, sums: &[i32], x: &[Chunk]) -> f32 {
    if x.is_empty() {
        return 0.0;
    }
    let token = scale_of_token(x);
    let product = scaled(sums[0], scale_of(row), token);
    match sums.get(1) {
        Some(&more) => product + scaled(more, Outliers::of(row).scale, token),
        None => product,
    }
}

/// Rows of a block: where there are several tokens, an integer or a weight of each lies beside those of the others.
const BLOCK: usize = 16;

/// Tokens from which blocks are faster than row by row.
const SEVERAL: usize = 4;

/// Most tokens of a tile, whose elements are gathered once for all rows.
const TILE: usize = 64;

/// Most outliers of a row of a block: those of 8192 elements. Of longer rows they are a small part of the work.
const TOGETHER: usize = 128;

/// Blocks of rows; the last one may be short.
#[inline(always)]
fn blocks(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(BLOCK)
        .map(move |first| first..end.min(first + BLOCK))
}

/// Calls `place` with a row, a token and what the outliers of some rows from that one on add to the products, for all rows and
/// tokens.
#[inline(always)]
pub(super) fn add_outliers<R: Rows>(
    rows: R,
    xs: ActivationsRef<'_>,
    mut place: impl FnMut(usize, usize, &[f32]),
) {
    let mut first = 0;
    while first < rows.count() {
        // Rows of a matrix have the same outliers: a token's are gathered once for all of them.
        let channels = Outliers::of(rows.at(first)).channels;
        let alike = |&r: &usize| Outliers::of(rows.at(r)).channels == channels;
        let end = first + 1 + (first + 1..rows.count()).take_while(alike).count();
        match xs.tokens() < SEVERAL || channels.len() > TOGETHER {
            true => outliers_by_row(rows, first..end, xs, &mut place),
            false => outliers_by_block(rows, first..end, xs, &mut place),
        }
        first = end;
    }
}

/// [`add_outliers`] of rows with the same ones, row by row.
#[inline(always)]
fn outliers_by_row<R: Rows>(
    rows: R,
    some: Range<usize>,
    xs: ActivationsRef<'_>,
    mut place: impl FnMut(usize, usize, &[f32]),
) {
    for t in 0..xs.tokens() {
        let x = xs.range(t, 1).chunks();
        let mut gathered = [0i8; MAX_OUTLIERS];
        let of_first = Outliers::of(rows.at(some.start)).each();
        for (to, (_, channel)) in gathered.iter_mut().zip(of_first) {
            *to = ActivationsRef::quant(x, channel).unwrap_or(0);
        }
        for r in some.clone() {
            let its = Outliers::of(rows.at(r));
            let products = its.quants.iter().zip(&gathered);
            let products = products.map(|(&q, &x)| i32::from(q as i8) * i32::from(x));
            place(
                r,
                t,
                &[scaled(products.sum(), its.scale, scale_of_token(x))],
            );
        }
    }
}

/// [`add_outliers`] of rows with the same ones, at most [`TOGETHER`], block by block.
#[inline(always)]
fn outliers_by_block<R: Rows>(
    rows: R,
    some: Range<usize>,
    xs: ActivationsRef<'_>,
    mut place: impl FnMut(usize, usize, &[f32]),
) {
    let mut gathered = [[0i8; TOGETHER]; TILE];
    let mut quants = [[0i8; BLOCK]; TOGETHER];
    for first in (0..xs.tokens()).step_by(TILE) {
        let tokens = first..xs.tokens().min(first + TILE);
        for (t, gathered) in tokens.clone().zip(&mut gathered) {
            let x = xs.range(t, 1).chunks();
            let of_first = Outliers::of(rows.at(some.start)).each();
            for (to, (_, channel)) in gathered.iter_mut().zip(of_first) {
                *to = ActivationsRef::quant(x, channel).unwrap_or(0);
            }
        }
        for block in blocks(some.clone()) {
            let (mut count, mut scales) = (0, [0.0; BLOCK]);
            for (lane, r) in block.clone().enumerate() {
                let its = Outliers::of(rows.at(r));
                (count, scales[lane]) = (its.quants.len(), its.scale);
                for (to, &quant) in quants.iter_mut().zip(its.quants) {
                    to[lane] = quant as i8;
                }
            }
            for (t, gathered) in tokens.clone().zip(&gathered) {
                let mut sums = [0i32; BLOCK];
                for (quants, &x) in quants[..count].iter().zip(gathered) {
                    for (sum, &quant) in sums.iter_mut().zip(quants) {
                        *sum += i32::from(quant) * i32::from(x);
                    }
                }
                let token = scale_of_token(xs.range(t, 1).chunks());
                let products: [f32; BLOCK] =
                    std::array::from_fn(|lane| scaled(sums[lane], scales[lane], token));
                place(block.start, t, &products[..block.len()]);
            }
        }
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

/// Calls `place` with a row, a token and the products of some rows from that one on with the token's excess, for all tokens that
/// have one.
#[inline(always)]
pub(super) fn add_excess<R: Rows>(
    rows: R,
    xs: ActivationsRef<'_>,
    place: impl FnMut(usize, usize, &[f32]),
) {
    if rows.count() == 0 {
        return;
    }
    match xs.tokens() < SEVERAL {
        true => excess_by_row(rows, xs, place),
        false => excess_by_block(rows, xs, place),
    }
}

/// [`add_excess`] row by row.
#[inline(always)]
fn excess_by_row<R: Rows>(
    rows: R,
    xs: ActivationsRef<'_>,
    mut place: impl FnMut(usize, usize, &[f32]),
) {
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
            place(r, t, &[product]);
        }
    }
}

/// A token's excess: which of the tile's elements, and how much.
#[derive(Clone, Copy, Default)]
struct OfTile {
    count: usize,
    places: [u8; EXCESSES],
    values: [f32; EXCESSES],
}

/// Most elements of a tile: most tokens exceed their scales in the same few.
const ELEMENTS: usize = 64;

/// The excess of some tokens, and the elements that it is of, each once.
struct Tile {
    tokens: [OfTile; TILE],
    elements: [usize; ELEMENTS],
    count: usize,
}

impl Tile {
    /// From token `first` on, as many tokens as fit: at least one. Returns where the next tile begins.
    #[inline(always)]
    fn fill(&mut self, xs: ActivationsRef<'_>, first: usize) -> usize {
        self.count = 0;
        let end = xs.tokens().min(first + TILE);
        for t in first..end {
            if self.count + EXCESSES > ELEMENTS {
                return t;
            }
            let x = xs.range(t, 1);
            let scale = scale_of_token(x.chunks());
            let mut token = OfTile::default();
            for its in x.excess().iter().flatten().filter(|its| its.steps != 0) {
                let place = self.place(its.element as usize);
                (token.places[token.count], token.values[token.count]) =
                    (place as u8, its.steps as f32 * scale);
                token.count += 1;
            }
            self.tokens[t - first] = token;
        }
        end
    }

    /// The place of an element, of which there are fewer than [`ELEMENTS`] or which is known.
    #[inline(always)]
    fn place(&mut self, element: usize) -> usize {
        let known = self.elements[..self.count]
            .iter()
            .position(|&known| known == element);
        known.unwrap_or_else(|| {
            self.elements[self.count] = element;
            self.count += 1;
            self.count - 1
        })
    }
}

/// [`add_excess`] block by block: each weight that meets an excess is decoded once for a tile of tokens.
#[inline(always)]
fn excess_by_block<R: Rows>(
    rows: R,
    xs: ActivationsRef<'_>,
    mut place: impl FnMut(usize, usize, &[f32]),
) {
    let mut tile = Tile {
        tokens: [OfTile::default(); TILE],
        elements: [0; ELEMENTS],
        count: 0,
    };
    let mut weights = [[0.0f32; BLOCK]; ELEMENTS];
    let mut first = 0;
    while first < xs.tokens() {
        let end = tile.fill(xs, first);
        let elements = &tile.elements[..tile.count];
        let standing = Standing::of(Outliers::of(rows.at(0)), elements);
        for block in blocks(0..rows.count()) {
            for (lane, r) in block.clone().enumerate() {
                decode(rows.at(r), elements, &standing, &mut weights, lane);
            }
            for (t, token) in (first..end).zip(&tile.tokens) {
                if token.count == 0 {
                    continue;
                }
                let mut products = [0.0f32; BLOCK];
                let excess = token.places.iter().zip(&token.values);
                for (&at, &value) in excess.take(token.count) {
                    for (product, weight) in products.iter_mut().zip(&weights[usize::from(at)]) {
                        *product += weight * value;
                    }
                }
                place(block.start, t, &products[..block.len()]);
            }
        }
        first = end;
    }
}

/// The outliers that stand for the elements of a tile, in rows that have theirs in the same channels.
struct Standing<'a> {
    channels: &'a [[u8; 2]],
    /// Which outlier, and for which of the elements.
    pairs: [[u16; 2]; ELEMENTS],
    count: usize,
}

impl<'a> Standing<'a> {
    /// `None` if there are too many, as in no row that was packed.
    #[inline(always)]
    fn of(outliers: Outliers<'a>, elements: &[usize]) -> Option<Self> {
        let (mut pairs, mut count) = ([[0; 2]; ELEMENTS], 0);
        for (place, (_, channel)) in outliers.each().enumerate() {
            for (i, &element) in elements.iter().enumerate() {
                if element == channel {
                    *pairs.get_mut(count)? = [place as u16, i as u16];
                    count += 1;
                }
            }
        }
        Some(Self {
            channels: outliers.channels,
            pairs,
            count,
        })
    }
}

/// Writes the weights of these elements of a row to a lane.
#[inline(always)]
fn decode(
    row: Row<'_>,
    elements: &[usize],
    standing: &Option<Standing<'_>>,
    weights: &mut [[f32; BLOCK]; ELEMENTS],
    lane: usize,
) {
    let (quants, scale, its) = (row.quants(), scale_of(row), Outliers::of(row));
    let each = elements.iter().zip(&mut *weights);
    match (row.dtype(), standing) {
        (DType::Q8c, _) => {
            for (&at, weight) in each {
                weight[lane] = f32::from(quants[at] as i8) * scale;
            }
        }
        (DType::Q4c, Some(standing)) if its.channels == standing.channels => {
            for (&at, weight) in each {
                weight[lane] = f32::from(nibble(quants, at) as i8 - 8) * scale;
            }
            for &[place, i] in &standing.pairs[..standing.count] {
                let quant = f32::from(its.quants[usize::from(place)] as i8);
                weights[usize::from(i)][lane] += quant * its.scale;
            }
        }
        _ => {
            for (&at, weight) in each {
                weight[lane] = element(row, at);
            }
        }
    }
}
