//! Location and stored value of a presented number: the inverse of reading, for writers.

use super::found::Layout;

impl Layout {
    /// The stored element presented in this row and column, of a tensor with this many rows and
    /// columns.
    pub(crate) fn place(self, [row, col]: [usize; 2], [rows, cols]: [usize; 2]) -> usize {
        let by_row = |row: usize| row * cols + col;
        match self {
            Self::AsIs | Self::PlusOne | Self::Negative | Self::NegativeLog => by_row(row),
            Self::Transposed => col * rows + row,
            Self::EveryRow(place) => by_row(2 * row + place),
            Self::EveryElement(place) => 2 * by_row(row) + place,
            Self::TransposedEvery(place) => 2 * (col * rows + row) + place,
            Self::TransposedPart { first, stored } => col * stored + first + row,
            Self::Grouped(groups) => by_row(groups.stored_row(row, rows)),
            Self::GroupedElements(groups) => groups.stored_row(col, cols),
            Self::Interleaved(heads) => by_row(heads.stored(row)),
            Self::InterleavedColumns(heads) => row * cols + heads.stored(col),
            Self::TransposedHeads { stored, cols: rank } => {
                (row / rank * stored + col) * rank + row % rank
            }
        }
    }

    /// Whether each presented row is a stored row.
    pub(crate) fn keeps_rows(self) -> bool {
        match self {
            Self::AsIs
            | Self::PlusOne
            | Self::Negative
            | Self::NegativeLog
            | Self::EveryRow(_)
            | Self::Grouped(_)
            | Self::Interleaved(_) => true,
            Self::Transposed
            | Self::EveryElement(_)
            | Self::TransposedEvery(_)
            | Self::TransposedPart { .. }
            | Self::GroupedElements(_)
            | Self::InterleavedColumns(_)
            | Self::TransposedHeads { .. } => false,
        }
    }

    /// The stored value of a number presented as `value`.
    pub(crate) fn stored(self, value: f32) -> f32 {
        match self {
            Self::PlusOne => value - 1.0,
            Self::Negative => -value,
            Self::NegativeLog => log_of(value),
            _ => value,
        }
    }
}

/// `-exp(log)` as it is read.
pub(super) fn rate(log: f32) -> f32 {
    -libm::exp(f64::from(log)) as f32
}

/// The logarithm from which `rate` is read, exact if there is one.
fn log_of(rate_read: f32) -> f32 {
    let about = libm::log(-f64::from(rate_read)) as f32;
    let steps = (0..64i32).flat_map(|step| [step, -step]);
    let mut near = steps.map(|n| f32::from_bits(about.to_bits().wrapping_add_signed(n)));
    near.find(|&log| rate(log) == rate_read).unwrap_or(about)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{RotaryHeads, RowGroups};

    #[test]
    fn every_element_has_a_place_of_its_own() {
        let groups = RowGroups {
            stored: 5,
            parts: [[1, 2], [4, 1], [0, 0]],
        };
        let heads = RotaryHeads {
            head_dim: 6,
            first: 1,
            rotated: 4,
        };
        let part = Layout::TransposedPart {
            first: 3,
            stored: 11,
        };
        let keys = Layout::TransposedHeads { stored: 7, cols: 3 };
        for (layout, [rows, cols], stored) in [
            (Layout::AsIs, [6, 4], 24),
            (Layout::Transposed, [6, 4], 24),
            (Layout::EveryRow(1), [6, 4], 48),
            (Layout::EveryElement(1), [6, 1], 12),
            (Layout::TransposedEvery(1), [6, 4], 48),
            (part, [6, 4], 44),
            (Layout::Grouped(groups), [6, 4], 40),
            (Layout::GroupedElements(groups), [1, 6], 10),
            (Layout::Interleaved(heads), [12, 4], 48),
            (Layout::InterleavedColumns(heads), [1, 12], 12),
            (Layout::InterleavedColumns(heads), [3, 6], 18),
            (keys, [6, 4], 42),
        ] {
            let all = (0..rows).flat_map(|row| (0..cols).map(move |col| [row, col]));
            let mut places: Vec<usize> = all.map(|at| layout.place(at, [rows, cols])).collect();
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), rows * cols, "{layout:?}");
            assert!(places.iter().all(|&place| place < stored), "{layout:?}");
        }
    }

    #[test]
    fn a_rate_gives_a_logarithm_that_reads_back() {
        for log in (-400..400).map(|n| n as f32 / 57.0) {
            let read = rate(log);
            assert_eq!(rate(Layout::NegativeLog.stored(read)), read, "{log}");
        }
        assert_eq!(Layout::PlusOne.stored(1.25), 0.25);
        assert_eq!(Layout::Negative.stored(2.0), -2.0);
    }
}
