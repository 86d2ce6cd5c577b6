//! Retention after prefill: which neurons of a pass stay resident for the next token.
//!
//! A prompt touches far more neurons than the token after it, which needs mostly the neurons of the
//! prompt's last tokens and those that fire often. Only these stay: other reads become the
//! first eviction victims, and resident neurons keep their eviction priority.

use super::mask;
use super::pairs::{Pairs, Unit};
use super::units::{BankWork, Rows};
use crate::cluster::CLUSTER;
use crate::store::NeuronStore;
use std::ops::Range;

/// Tokens at the end of each sequence's pass whose neurons stay.
pub(crate) const RECENT: usize = 2;

/// The last rows of each sequence of a pass.
pub(super) struct Recent {
    ends: Vec<Range<usize>>,
    rows: usize,
    /// Rows of the pass before those that units take.
    skipped: usize,
}

impl Recent {
    /// For passes of up to `rows` rows.
    pub fn new(rows: usize) -> Self {
        Self {
            ends: Vec::with_capacity(rows),
            rows: 0,
            skipped: 0,
        }
    }

    /// From here on units take no row before row `rows` of the pass.
    pub fn skip(&mut self, rows: usize) {
        self.skipped = rows;
    }

    /// Index of the pass's row `row` among the rows that units take.
    pub(super) fn own(&self, row: usize) -> Option<usize> {
        row.checked_sub(self.skipped)
    }

    /// Index of the pass's row `row` among the rows of a unit.
    fn place(&self, rows: Rows<'_>, row: usize) -> Option<usize> {
        rows.place(self.own(row)?)
    }

    /// Bytes that [`Recent::new`] allocates.
    pub fn bytes_for(rows: usize) -> u64 {
        (rows * size_of::<Range<usize>>()) as u64
    }

    /// Begins a pass over consecutive sequences of `rows` rows each. Returns the total.
    pub fn begin_pass(&mut self, rows: impl Iterator<Item = usize>) -> usize {
        self.ends.clear();
        let mut end = 0;
        self.ends.extend(rows.map(|rows| {
            end += rows;
            end - rows.min(RECENT)..end
        }));
        self.rows = end;
        end
    }

    /// The last rows of each sequence.
    pub fn ends(&self) -> &[Range<usize>] {
        &self.ends
    }

    /// Whether the last rows visit a bank that `rows` visit.
    pub(super) fn visits(&self, rows: Rows<'_>) -> bool {
        self.ends.len() == self.rows
            || (self.ends.iter().cloned().flatten()).any(|row| self.place(rows, row).is_some())
    }

    /// Whether the next token is likely to need a neuron that `fires(place)`: it fired for one of a
    /// sequence's last rows, or for at least half of the unit's rows.
    fn keeps(&self, rows: Rows<'_>, fires: impl Fn(usize) -> bool) -> bool {
        if self.ends.len() == self.rows {
            // All sequences have one row.
            return true;
        }
        let last = |row: usize| self.place(rows, row).is_some_and(&fires);
        let all = rows.len();
        self.ends.iter().any(|end| end.clone().any(&last))
            || 2 * (0..all).filter(|&place| fires(place)).count() >= all
    }
}

/// Computed items that still hold their slots, and the state that decides which neurons stay.
pub(super) struct Done<'a> {
    pub items: &'a mut Vec<u32>,
    pub units: &'a [Unit],
    pub work: &'a [BankWork<'a>],
    pub pairs: &'a Pairs,
    pub recent: &'a Recent,
}

impl Done<'_> {
    /// Releases the items' bytes; false when there are none.
    pub fn release(self, store: &mut NeuronStore) -> bool {
        let any = !self.items.is_empty();
        for item in self.items.drain(..) {
            let item = item as usize;
            let number = self.units.partition_point(|unit| unit.first <= item) - 1;
            let unit = &self.units[number];
            let (gates, wanted) = (
                unit.gates(&self.pairs.gates),
                unit.wanted(&self.pairs.wanted),
            );
            let known = store.gates_known(item);
            let words = mask::words(unit.rows);
            let again = self.recent.visits(self.work[number].rows);
            store.release(item, again, |neuron| {
                let (n, c) = (neuron as usize, neuron as usize / CLUSTER);
                self.recent
                    .keeps(self.work[number].rows, |place| match wanted {
                        _ if known => gates[n * unit.rows + place] != 0.0,
                        Some(wanted) => {
                            let wanted = &wanted[c * words..][..words];
                            mask::has(wanted, unit.rows, n % CLUSTER, place)
                        }
                        None => true,
                    })
            });
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefill_retains_neurons_of_its_end_or_of_most_rows() {
        let mut recent = Recent::new(16);
        assert_eq!(recent.begin_pass([6, 1].into_iter()), 7);
        let all = Rows::All(7);
        let keeps = |rows: &[usize]| recent.keeps(all, |place| rows.contains(&place));
        assert!(!keeps(&[0, 1, 3]));
        assert!(keeps(&[4]) && keeps(&[5]) && keeps(&[6]));
        assert!(keeps(&[0, 1, 2, 3]));
        // An expert chosen by only some rows.
        let some = Rows::Some(&[0, 2, 5]);
        assert!(!recent.keeps(some, |place| place == 0));
        assert!(recent.keeps(some, |place| place == 2));
        assert!(recent.keeps(some, |place| place < 2));
    }

    #[test]
    fn single_tokens_retain_all_their_neurons() {
        let mut recent = Recent::new(4);
        recent.begin_pass([1, 1, 1].into_iter());
        assert!(recent.keeps(Rows::All(3), |_| false));
    }
}
