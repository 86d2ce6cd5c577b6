//! Sizes of graphs, and the division of rows and tokens among them.

use std::ops::Range;

use arrayvec::ArrayVec;

use crate::graph::{Form, GROUP, Numbers, Summed, Tile};
use crate::onnx::Graph;

/// Tokens per graph.
pub const WIDTHS: [usize; 4] = [1, 32, 128, 256];

/// Rows per graph; the first height only with one token.
const HEIGHTS: [usize; 2] = [1024, 128];

/// Maximum graphs per form.
const MOST_TILES: usize = WIDTHS.len() + HEIGHTS.len() - 1;

/// Maximum memory of a run in bytes: inputs, also transposed or as floats, and sums.
pub const RUN_BYTES: usize = 8 << 20;

impl Form {
    /// Memory of a run in bytes.
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

    /// Adds the nodes that multiply a tile; `None` if these numbers do not support the form.
    pub(crate) fn added(&self, graph: Graph, tile: Tile, numbers: Numbers) -> Option<Graph> {
        match (numbers, self.summed) {
            (Numbers::Floats(floats), _) => self.float_added(graph, tile, floats),
            (Numbers::Integers, Summed::ByGroup) => Some(self.by_group(graph, tile)),
            (Numbers::Integers, Summed::ByRow(_)) => Some(self.by_row(graph, tile)),
        }
    }

    /// The graphs for this form, by descending width and then height. Long rows have fewer rows per graph, or no wide graphs.
    pub(crate) fn tiles(&self, numbers: Numbers) -> Vec<Tile> {
        let mut tiles = Vec::new();
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
                    Some(height) => tiles.push(tile(height)),
                    // Every form needs a graph.
                    None if width == 1 => tiles.push(tile(8)),
                    None => {}
                }
            }
        }
        tiles.dedup();
        tiles
    }
}

/// A size of pieces, of rows or tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pieces {
    pub size: usize,
    /// Seconds per piece, full or padded.
    pub seconds: f64,
}

/// The fastest division of rows or tokens into pieces: the last piece is padded, or smaller ones follow (HeteroInfer §4.2,
/// padding and pipe).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Division {
    count: usize,
    /// Number of pieces of each size, in descending order. Only the very last piece may be short.
    pieces: ArrayVec<(usize, Pieces), { WIDTHS.len() }>,
    /// Seconds of all pieces.
    pub seconds: f64,
}

impl Division {
    /// Divides `count` into pieces. Sizes descend, and each is a multiple of the next.
    pub fn new(count: usize, sizes: impl DoubleEndedIterator<Item = Pieces>) -> Self {
        let mut worth: ArrayVec<Pieces, { WIDTHS.len() }> = ArrayVec::new();
        for large in sizes.rev() {
            let filled = |small: &Pieces| (large.size / small.size) as f64 * small.seconds;
            // A size is useless if smaller pieces that fill it are faster.
            if worth
                .last()
                .map(filled)
                .is_none_or(|seconds| large.seconds <= seconds)
            {
                worth.push(large);
            }
        }
        // For each smallest size used, `last`: the count is rounded up to it, and larger pieces are used wherever they fit,
        // since they are at least as fast as the smaller ones that fill them.
        let ends_with = |last: usize| {
            let mut left = count.next_multiple_of(worth[last].size);
            let pieces = worth[last..].iter().rev().map(|&pieces| {
                let number = left / pieces.size;
                left %= pieces.size;
                (number, pieces)
            });
            let pieces: ArrayVec<_, { WIDTHS.len() }> = pieces.collect();
            let seconds = pieces.iter().map(|(n, piece)| *n as f64 * piece.seconds);
            let seconds = seconds.sum();
            Self {
                count,
                pieces,
                seconds,
            }
        };
        let divisions = (0..worth.len()).rev().map(ends_with);
        let none = Self {
            count,
            pieces: ArrayVec::new(),
            seconds: f64::INFINITY,
        };
        divisions.fold(none, |best, next| match next.seconds < best.seconds {
            true => next,
            false => best,
        })
    }

    /// Calls `then` with the range of each piece and its size.
    pub fn each(&self, mut then: impl FnMut(Range<usize>, usize)) {
        let mut start = 0;
        for (number, pieces) in &self.pieces {
            for _ in 0..*number {
                let end = self.count.min(start + pieces.size);
                then(start..end, pieces.size);
                start = end;
            }
        }
    }
}

/// The graphs for a form in the order of [`Form::tiles`], with the seconds of a run.
#[derive(Debug, Clone, Default)]
pub(crate) struct TimedTiles(pub ArrayVec<(Tile, f64), MOST_TILES>);

impl TimedTiles {
    /// Divides rows among the graphs of a width.
    fn rows(&self, count: usize, width: usize) -> Division {
        let graphs = self.0.iter().filter(|(tile, _)| tile.width == width);
        let pieces = graphs.map(|&(tile, seconds)| Pieces {
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
        Division::new(tokens, widths).each(|run_tokens, width| {
            self.rows(rows, width).each(|run_rows, height| {
                then(Tile { height, width }, [run_rows, run_tokens.clone()]);
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::graph::{Floats, Summed, Weights};

    /// Descending sizes, each a multiple of the next, with random times.
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

    /// The least time by dynamic programming.
    fn by_trying(count: usize, sizes: &[Pieces]) -> f64 {
        let mut least = vec![0.0f64];
        for n in 1..=count {
            let with = |piece: &Pieces| piece.seconds + least[n.saturating_sub(piece.size)];
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
                let pieces = sizes.iter().find(|pieces| pieces.size == size).unwrap();
                assert!(!piece.is_empty() && piece.len() <= size);
                // Only the last one is short.
                assert!(piece.len() == size || piece.end == count);
                end = piece.end;
                seconds += pieces.seconds;
            });
            prop_assert_eq!(end, count);
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b;
            prop_assert!(close(seconds, division.seconds));
            for pieces in &sizes {
                let alone = count.div_ceil(pieces.size) as f64 * pieces.seconds;
                prop_assert!(seconds <= alone * (1.0 + 1e-9), "{:?}", pieces);
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
            let (mut pairs, mut total) = (0, 0.0);
            timed.divide([rows, tokens], |tile, [run_rows, run_tokens]| {
                assert!(run_rows.len() <= tile.height && run_rows.end <= rows);
                assert!(run_tokens.len() <= tile.width && run_tokens.end <= tokens);
                pairs += run_rows.len() * run_tokens.len();
                total += timed.0.iter().find(|graph| graph.0 == tile).unwrap().1;
            });
            prop_assert_eq!(pairs, rows * tokens);
            for &(tile, seconds) in &timed.0 {
                let runs = rows.div_ceil(tile.height) * tokens.div_ceil(tile.width);
                prop_assert!(total <= runs as f64 * seconds * (1.0 + 1e-9), "{:?}", tile);
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
        let sizes_of = |count, seconds: [f64; 4]| {
            let sizes = [256, 128, 32, 1].into_iter().zip(seconds);
            let sizes = sizes.map(|(size, seconds)| Pieces { size, seconds });
            let mut taken = Vec::new();
            Division::new(count, sizes).each(|_, size| taken.push(size));
            taken
        };
        // A launch costs as much as 32 tokens.
        let launch = [288.0, 160.0, 64.0, 33.0];
        assert_eq!(sizes_of(1, launch), [1]);
        assert_eq!(sizes_of(2, launch), [32]);
        assert_eq!(sizes_of(33, launch), [32, 1]);
        assert_eq!(sizes_of(40, launch), [32, 32]);
        assert_eq!(sizes_of(100, launch), [128]);
        assert_eq!(sizes_of(300, launch), [256, 32, 32]);
        assert_eq!(sizes_of(0, launch), []);
        // Free launches: no padding.
        let free = [256.0, 128.0, 32.0, 1.0];
        assert_eq!(sizes_of(40, free), [&[32][..], &[1; 8]].concat());
        // All sizes take the same time.
        assert_eq!(sizes_of(40, [1.0; 4]), [256]);
        // Slow sizes are not used.
        assert_eq!(sizes_of(300, [9.0, 9.0, 1.0, 1.0]), [32; 10]);
    }
}
