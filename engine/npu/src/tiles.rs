//! Which graphs there are, and how rows and tokens are divided among them.

use std::ops::Range;

use arrayvec::ArrayVec;

use crate::graph::{Form, GROUP, Numbers, Summed, Tile};
use crate::onnx::Graph;

/// Numbers of tokens that graphs have.
pub const WIDTHS: [usize; 4] = [1, 32, 128, 256];

/// Numbers of rows, the first where a graph has one token.
const HEIGHTS: [usize; 2] = [1024, 128];

/// Most graphs of a form.
const MOST_TILES: usize = WIDTHS.len() + HEIGHTS.len() - 1;

/// Most bytes of a run: its inputs, each also transposed or as floats, and its sums.
pub const RUN_BYTES: usize = 8 << 20;

impl Form {
    /// Bytes of a run.
    pub(crate) fn bytes(&self, tile: Tile, numbers: Numbers) -> usize {
        let Tile { height, width } = tile;
        if numbers != Numbers::Integers {
            return self.float_bytes(tile);
        }
        let weights = height * (self.row_bytes + 3 * self.groups * GROUP);
        let sums = 4 * height * width * self.sums();
        let outliers = 2 * (height + width) * self.outliers();
        weights + outliers + 2 * width * self.groups * GROUP + sums
    }

    /// A graph, and what multiplies a tile; `None` if there is nothing with such numbers.
    pub(crate) fn added(&self, graph: Graph, tile: Tile, numbers: Numbers) -> Option<Graph> {
        match (numbers, self.summed) {
            (Numbers::Floats(floats), _) => self.float_added(graph, tile, floats),
            (Numbers::Integers, Summed::ByGroup) => Some(self.by_group(graph, tile)),
            (Numbers::Integers, Summed::ByRow(_)) => Some(self.by_row(graph, tile)),
        }
    }

    /// The graphs for this form: by width, the widest first, and of one width the highest first. Of rows that are too long for
    /// the widest graphs, and of very long ones, there are fewer.
    pub(crate) fn tiles(&self, numbers: Numbers) -> Vec<Tile> {
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
                let fits = |&height: &usize| self.bytes(tile(height), numbers) <= RUN_BYTES;
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

/// Pieces of one size, of rows or of tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pieces {
    pub size: usize,
    /// Seconds of a piece, also of a short one.
    pub seconds: f64,
}

/// The division of a number of rows or tokens into pieces that takes the least time: a short piece is padded, or smaller ones
/// follow (HeteroInfer §4.2, padding and pipe).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Division {
    count: usize,
    /// How many pieces of each size, the largest first. Only the last piece of all may be short.
    pieces: ArrayVec<(usize, Pieces), { WIDTHS.len() }>,
    /// Seconds of all pieces.
    pub seconds: f64,
}

impl Division {
    /// Divides `count` among pieces of sizes that descend, each a multiple of the next.
    pub fn new(count: usize, sizes: impl DoubleEndedIterator<Item = Pieces>) -> Self {
        let mut worth: ArrayVec<Pieces, { WIDTHS.len() }> = ArrayVec::new();
        for large in sizes.rev() {
            let filled = |small: &Pieces| (large.size / small.size) as f64 * small.seconds;
            // Where smaller ones that fill it are faster, it is never better.
            if worth
                .last()
                .map(filled)
                .is_none_or(|all| large.seconds <= all)
            {
                worth.push(large);
            }
        }
        // A short piece of one size has no others behind it, so the count is rounded up to that size; and as many pieces as
        // fill a larger one are never better than that one.
        let ends_with = |last: usize| {
            let mut left = count.next_multiple_of(worth[last].size);
            let pieces = worth[last..].iter().rev().map(|&pieces| {
                let number = left / pieces.size;
                left %= pieces.size;
                (number, pieces)
            });
            let pieces: ArrayVec<_, { WIDTHS.len() }> = pieces.collect();
            let seconds = pieces.iter().map(|(n, of)| *n as f64 * of.seconds).sum();
            Self {
                count,
                pieces,
                seconds,
            }
        };
        let all = (0..worth.len()).rev().map(ends_with);
        let none = Self {
            count,
            pieces: ArrayVec::new(),
            seconds: f64::INFINITY,
        };
        all.fold(none, |least, of| match of.seconds < least.seconds {
            true => of,
            false => least,
        })
    }

    /// Calls `then` with the range of each piece and its size.
    pub fn each(&self, mut then: impl FnMut(Range<usize>, usize)) {
        let mut at = 0;
        for (number, pieces) in &self.pieces {
            for _ in 0..*number {
                let end = self.count.min(at + pieces.size);
                then(at..end, pieces.size);
                at = end;
            }
        }
    }
}

/// The graphs for a form in the order of [`Form::tiles`], and the seconds of a run of each.
#[derive(Debug, Clone, Default)]
pub(crate) struct TimedTiles(pub ArrayVec<(Tile, f64), MOST_TILES>);

impl TimedTiles {
    /// The division of rows among the graphs of a width.
    fn rows(&self, count: usize, width: usize) -> Division {
        let of_width = self.0.iter().filter(|(tile, _)| tile.width == width);
        let pieces = of_width.map(|&(tile, seconds)| Pieces {
            size: tile.height,
            seconds,
        });
        Division::new(count, pieces)
    }

    /// Divides rows and tokens among graphs: calls `then` with each run's rows and tokens.
    pub fn divide(
        &self,
        [rows, tokens]: [usize; 2],
        mut then: impl FnMut(Tile, [Range<usize>; 2]),
    ) {
        let widths = WIDTHS.into_iter().rev();
        let widths = widths.filter(|&width| self.0.iter().any(|(tile, _)| tile.width == width));
        let widths = widths.map(|width| Pieces {
            size: width,
            seconds: self.rows(rows, width).seconds,
        });
        Division::new(tokens, widths).each(|its_tokens, width| {
            self.rows(rows, width).each(|its_rows, height| {
                then(Tile { height, width }, [its_rows, its_tokens.clone()]);
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::graph::{Floats, Summed, Weights};

    /// Sizes, each a multiple of the next, with any times.
    fn any_sizes() -> impl Strategy<Value = Vec<Pieces>> {
        let chain = prop::sample::subsequence(vec![1024usize, 256, 128, 32, 8, 1], 1..=4);
        let timed = chain.prop_flat_map(|sizes| {
            let seconds = prop::collection::vec(1e-6..1e-2, sizes.len());
            (Just(sizes), seconds)
        });
        timed.prop_map(|(sizes, seconds)| {
            let both = sizes.into_iter().zip(seconds);
            both.map(|(size, seconds)| Pieces { size, seconds })
                .collect()
        })
    }

    /// The least time by trying all: of each count from those of smaller ones.
    fn by_trying(count: usize, sizes: &[Pieces]) -> f64 {
        let mut least = vec![0.0f64];
        for n in 1..=count {
            let with = |of: &Pieces| of.seconds + least[n.saturating_sub(of.size)];
            least.push(sizes.iter().map(with).fold(f64::INFINITY, f64::min));
        }
        least[count]
    }

    proptest! {
        #[test]
        fn divisions_cover_everything_once_in_the_least_time(
            count in 0usize..3000,
            sizes in any_sizes(),
        ) {
            let division = Division::new(count, sizes.iter().copied());
            let (mut end, mut seconds) = (0, 0.0);
            division.each(|piece, size| {
                assert_eq!(piece.start, end);
                let of = sizes.iter().find(|of| of.size == size).unwrap();
                assert!(!piece.is_empty() && piece.len() <= size);
                // Only the last one is short.
                assert!(piece.len() == size || piece.end == count);
                end = piece.end;
                seconds += of.seconds;
            });
            prop_assert_eq!(end, count);
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b;
            prop_assert!(close(seconds, division.seconds));
            for of in &sizes {
                let alone = count.div_ceil(of.size) as f64 * of.seconds;
                prop_assert!(seconds <= alone * (1.0 + 1e-9), "{:?}", of);
            }
            prop_assert!(close(seconds, by_trying(count, &sizes)));
        }

        #[test]
        fn runs_cover_rows_times_tokens(
            rows in 0usize..1500,
            tokens in 0usize..600,
            seconds in prop::array::uniform5(1e-6..1e-2),
        ) {
            let tiles = [(128, 256), (128, 128), (128, 32), (1024, 1), (128, 1)];
            let tiles = tiles.map(|(height, width)| Tile { height, width });
            let timed = TimedTiles(tiles.into_iter().zip(seconds).collect());
            let (mut pairs, mut all) = (0, 0.0);
            timed.divide([rows, tokens], |tile, [its_rows, its_tokens]| {
                assert!(its_rows.len() <= tile.height && its_rows.end <= rows);
                assert!(its_tokens.len() <= tile.width && its_tokens.end <= tokens);
                pairs += its_rows.len() * its_tokens.len();
                all += timed.0.iter().find(|of| of.0 == tile).unwrap().1;
            });
            prop_assert_eq!(pairs, rows * tokens);
            for &(tile, seconds) in &timed.0 {
                let runs = rows.div_ceil(tile.height) * tokens.div_ceil(tile.width);
                prop_assert!(all <= runs as f64 * seconds * (1.0 + 1e-9), "{:?}", tile);
            }
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
            for numbers in [Numbers::Integers, Numbers::Floats(Floats::Single)] {
                let tiles = form.tiles(numbers);
                prop_assert!(tiles.iter().any(|tile| tile.width == 1));
                for tile in tiles {
                    prop_assert!(form.bytes(tile, numbers) <= RUN_BYTES, "{:?}", tile);
                }
            }
        }
    }

    #[test]
    fn padding_or_smaller_graphs_by_their_times() {
        let of = |count, seconds: [f64; 4]| {
            let sizes = [256, 128, 32, 1].into_iter().zip(seconds);
            let sizes = sizes.map(|(size, seconds)| Pieces { size, seconds });
            let mut taken = Vec::new();
            Division::new(count, sizes).each(|_, size| taken.push(size));
            taken
        };
        // A run takes as long as 32 tokens.
        let launch = [288.0, 160.0, 64.0, 33.0];
        assert_eq!(of(1, launch), [1]);
        assert_eq!(of(2, launch), [32]);
        assert_eq!(of(33, launch), [32, 1]);
        assert_eq!(of(40, launch), [32, 32]);
        assert_eq!(of(100, launch), [128]);
        assert_eq!(of(300, launch), [256, 32, 32]);
        assert_eq!(of(0, launch), []);
        // It costs nothing: no padding.
        let free = [256.0, 128.0, 32.0, 1.0];
        assert_eq!(of(40, free), [&[32][..], &[1; 8]].concat());
        // All take as long.
        assert_eq!(of(40, [1.0; 4]), [256]);
        // A slow size is left out.
        assert_eq!(of(300, [9.0, 9.0, 1.0, 1.0]), [32; 10]);
    }
}
