//! Which graphs there are, and how rows and tokens are divided among them.

use std::ops::Range;

use crate::graph::{Form, GROUP, Tile};

/// Numbers of tokens that graphs have.
pub const WIDTHS: [usize; 4] = [1, 32, 128, 256];

/// Numbers of rows, the first where a graph has one token.
const HEIGHTS: [usize; 2] = [1024, 128];

/// Most bytes of a run: its inputs, each also transposed, and its sums.
pub const RUN_BYTES: usize = 8 << 20;

impl Form {
    /// Bytes of a run.
    pub(crate) fn bytes(&self, tile: Tile) -> usize {
        let Tile { height, width } = tile;
        let weights = height * (self.row_bytes + 3 * self.groups * GROUP);
        let sums = 4 * height * width * self.sums();
        let outliers = 2 * (height + width) * self.outliers();
        weights + outliers + 2 * width * self.groups * GROUP + sums
    }

    /// The graphs for this form: by width, the widest first, and of one width the highest first. Of rows that are too long for
    /// the widest graphs, and of very long ones, there are fewer.
    pub(crate) fn tiles(&self) -> Vec<Tile> {
        let mut all = Vec::new();
        for width in WIDTHS.into_iter().rev() {
            let heights = match width {
                1 => &HEIGHTS[..],
                _ => &HEIGHTS[1..],
            };
            for &most in heights {
                let halves = std::iter::successors(Some(most), |&height| Some(height / 2));
                let mut heights = halves.take_while(|&height| height >= 8);
                let tile = |height| Tile { height, width };
                let fits = |&height: &usize| self.bytes(tile(height)) <= RUN_BYTES;
                match heights.find(fits) {
                    Some(height) => all.push(tile(height)),
                    // Something has to compute it.
                    None if width == 1 => all.push(tile(8)),
                    None => {}
                }
            }
        }
        all.dedup();
        all
    }
}

/// Rows or tokens that a run could compute in the time that launching it takes.
const LAUNCH: usize = 32;

/// The size of the next piece when `left` are left, and the cost of all pieces: the smallest size that takes all of them, or
/// the largest that is full, whichever costs less with what remains.
fn next(left: usize, sizes: &[usize]) -> Option<(usize, usize)> {
    let whole = sizes.iter().rfind(|&&size| size >= left);
    let whole = whole.map(|&size| (size, size + LAUNCH));
    let full = sizes.iter().find(|&&size| size < left).map(|&size| {
        let most = whole.map_or(1, |(_, cost)| cost);
        // Many small pieces are no choice; where there is no other their cost does not matter.
        let rest = match left - size > most / LAUNCH * size {
            true => most,
            false => next(left - size, sizes).map_or(0, |(_, cost)| cost),
        };
        (size, size + LAUNCH + rest)
    });
    [whole, full].into_iter().flatten().min_by_key(|of| of.1)
}

/// Divides `count` among pieces of sizes that descend, at the least cost; pieces may be short. Calls `then` with the range of
/// each piece and its size.
pub(crate) fn divide(count: usize, sizes: &[usize], mut then: impl FnMut(Range<usize>, usize)) {
    let mut at = 0;
    while let Some((size, _)) = next(count - at, sizes).filter(|_| at < count) {
        let end = count.min(at + size);
        then(at..end, size);
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::graph::{Summed, Weights};

    proptest! {
        #[test]
        fn pieces_cover_everything_once(
            count in 0usize..2000,
            sizes in prop::sample::subsequence(vec![1024usize, 256, 128, 32, 1], 1..=5),
        ) {
            let mut end = 0;
            divide(count, &sizes, |piece, size| {
                assert_eq!(piece.start, end);
                assert!(!piece.is_empty() && piece.len() <= size && sizes.contains(&size));
                // Only the last one is short.
                assert!(piece.len() == size || piece.end == count);
                end = piece.end;
            });
            prop_assert_eq!(end, count);
        }

        #[test]
        fn runs_stay_within_their_bytes(
            groups in 1usize..2000,
            nibbles: bool,
            summed in prop_oneof![Just(Summed::ByGroup), (0usize..1000).prop_map(Summed::ByRow)],
        ) {
            let weights = if nibbles { Weights::Nibbles(8) } else { Weights::Bytes };
            let row_bytes = groups * (weights.group_bytes() + 2);
            let form = Form { weights, summed, groups, row_bytes };
            let tiles = form.tiles();
            prop_assert!(tiles.iter().any(|tile| tile.width == 1));
            for tile in tiles {
                prop_assert!(form.bytes(tile) <= RUN_BYTES, "{:?}", tile);
            }
        }
    }

    #[test]
    fn tokens_take_few_graphs() {
        let of = |count| {
            let mut sizes = Vec::new();
            divide(count, &[256, 128, 32, 1], |_, size| sizes.push(size));
            sizes
        };
        assert_eq!(of(1), [1]);
        assert_eq!(of(2), [32]);
        assert_eq!(of(32), [32]);
        assert_eq!(of(33), [32, 1]);
        assert_eq!(of(40), [32, 32]);
        assert_eq!(of(100), [128]);
        assert_eq!(of(300), [256, 32, 32]);
        assert_eq!(of(0), []);
    }
}
