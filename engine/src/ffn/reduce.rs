//! Reduction of the clusters' partial sums, in fixed order of units and clusters per element.

use std::ops::Range;

use emberflow_kernels::{Compute, Lane, Lanes, prefetch};

use super::pairs::Unit;
use super::recent;
use super::state::Ffn;
use super::units::{BankWork, LayerInput, Rows};

/// Elements per work item.
const PIECE: usize = 1024;

/// Prefetch distance in partials.
const AHEAD: usize = 2;

/// The partial sums of a group of items.
struct Group<'a> {
    items: Range<usize>,
    units: &'a [Unit],
    work: &'a [BankWork<'a>],
    used: &'a [bool],
    partials: &'a [f32],
    /// Elements per item, and per row.
    width: usize,
    d: usize,
}

impl Ffn {
    /// `out += weight × partial` for each item of the group in order. The calling thread first
    /// releases the bytes of computed items.
    pub(super) fn reduce(
        &mut self,
        on: &Compute,
        at: &LayerInput<'_>,
        items: Range<usize>,
        width: usize,
        out: &mut [f32],
    ) {
        let used = &mut self.schedule.used;
        used.clear();
        used.extend(items.clone().map(|item| self.store.is_needed(item)));
        let group = Group {
            partials: &self.partials[..items.len() * width],
            units: &self.units,
            work: at.units,
            used,
            width,
            d: self.shape.format.d,
            items,
        };
        let (store, done) = (&mut self.store, &mut self.schedule.done);
        let done = recent::Done {
            items: done,
            units: &self.units,
            work: at.units,
            pairs: &self.pairs,
            recent: &self.recent,
        };
        let mut done = Some(done);
        let mut release = || _ = done.take().map(|done| done.release(store));
        // Units over some rows are added row by row.
        let plain = at.units.iter().all(is_plain);
        let lanes = Lanes {
            units: out.len().div_ceil(PIECE),
            first: Lane::new(out, PIECE),
            second: Lane::<u8>::none(),
            third: Lane::<u8>::none(),
        };
        let add = |p: usize, out: &mut [f32], _: &mut [u8], _: &mut [u8]| {
            if plain {
                group.add_plain(p * PIECE, out)
            } else {
                group.add_rows(p * PIECE, out)
            }
        };
        (on.workers).for_each_part_then(lanes, 1, &add, &mut |_, _, _, _| release());
    }
}

/// Whether a unit takes all rows with weight 1.
pub(super) fn is_plain(work: &BankWork<'_>) -> bool {
    matches!(work.rows, Rows::All(_)) && work.weights.is_none()
}

impl Group<'_> {
    fn used(&self) -> impl Iterator<Item = usize> {
        let used = self.used.iter().enumerate();
        used.filter(|(_, used)| **used).map(|(i, _)| i)
    }

    /// Adds elements from `first` on of items that take all rows.
    fn add_plain(&self, first: usize, out: &mut [f32]) {
        let len = out.len();
        let part = |i: usize| &self.partials[i * self.width + first..][..len];
        for i in self.used() {
            // About half of the partials are in another core's cache.
            if i + AHEAD < self.used.len() {
                prefetch(bytemuck::cast_slice(part(i + AHEAD)));
            }
            for (y, p) in out.iter_mut().zip(part(i)) {
                *y += p;
            }
        }
    }

    /// Adds elements from `first` on, row by row.
    fn add_rows(&self, first: usize, out: &mut [f32]) {
        let (mut at, mut rest) = (first, out);
        while !rest.is_empty() {
            let (row, column) = (at / self.d, at % self.d);
            let (here, behind) = rest.split_at_mut((self.d - column).min(rest.len()));
            at += here.len();
            self.add_row(row, column, here);
            rest = behind;
        }
    }

    /// Adds elements of row `row` of the pass, from `column` on.
    fn add_row(&self, row: usize, column: usize, out: &mut [f32]) {
        for i in self.used() {
            let item = self.items.start + i;
            let unit = self.units.partition_point(|unit| unit.first <= item) - 1;
            let work = &self.work[unit];
            let Some(place) = work.rows.place(row) else {
                continue;
            };
            let weight = work.weights.map_or(1.0, |weights| weights[place]);
            let first = i * self.width + place * self.d + column;
            let part = &self.partials[first..][..out.len()];
            for (y, p) in out.iter_mut().zip(part) {
                *y += weight * p;
            }
        }
    }
}
