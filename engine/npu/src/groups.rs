//! Graphs of several experts in one run (NPUMoE, §4.2): a launch for all of them instead of one for each.
//!
//! ```text
//! expert 0   weights ‖ tokens [capacity, groups, 32] ─ nodes of `graph.rs` ─▶ sums
//! expert 1   weights ‖ tokens                        ─ the same nodes      ─▶ sums          names begin with "1."
//! …
//! ```
//!
//! Each expert has inputs of its own, so that its weights are read where they lie. A graph holds as many rows of each expert
//! as the bytes of a run allow; there is none of a number of experts that saves no runs.

use std::array;
use std::collections::HashMap;
use std::sync::LazyLock;

use ort::session::Session;
use serde::{Deserialize, Serialize};

use crate::graph::{Form, GROUP, Numbers, OUTLIERS, PICKED, SUMS, TOKENS, Tile, WEIGHTS};
use crate::onnx::Graph;
use crate::tiles::RUN_BYTES;

/// Numbers of experts that graphs have, the largest first.
pub const GROUP_SIZES: [usize; 4] = [16, 8, 4, 1];

/// Matrices of a form with `rows` rows each, and a graph's tokens of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupForm {
    /// Form of the rows.
    pub form: Form,
    /// Rows of an expert's matrix.
    pub rows: usize,
    /// Tokens of an expert.
    pub capacity: usize,
}

/// Which graph: experts, and rows of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GroupTile {
    pub experts: usize,
    pub height: usize,
}

/// What of a group was run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupRuns {
    /// Runs of graphs.
    pub runs: u64,
    /// Tokens of the graphs' experts, once for each expert of a group, with and without a token in them.
    pub rows: u64,
}

impl GroupForm {
    fn tile(&self, height: usize) -> Tile {
        Tile {
            height,
            width: self.capacity,
        }
    }

    /// The fewest parts that an expert's rows have in a graph of `experts` experts; `None` if no part fits.
    fn parts(&self, experts: usize, numbers: Numbers) -> Option<usize> {
        let most = self.rows.div_ceil(8).max(1);
        let fits = |parts: &usize| {
            let tile = self.tile(self.rows.div_ceil(*parts));
            experts * self.form.bytes(tile, numbers) <= RUN_BYTES
        };
        (1..=most).find(fits)
    }

    /// The graphs, by number of experts, the largest first; none if no expert fits.
    pub(crate) fn tiles(&self, numbers: Numbers) -> Vec<GroupTile> {
        let mut all = Vec::new();
        let mut fewest = f64::INFINITY;
        if self.rows == 0 || self.capacity == 0 {
            return all;
        }
        for experts in GROUP_SIZES.into_iter().rev() {
            let Some(parts) = self.parts(experts, numbers) else {
                continue;
            };
            let runs = parts as f64 / experts as f64;
            if runs < fewest {
                let height = self.rows.div_ceil(parts);
                all.push(GroupTile { experts, height });
                fewest = runs;
            }
        }
        all.reverse();
        all
    }

    /// The model of a graph; `None` if there is none with such numbers.
    pub(crate) fn model(&self, tile: GroupTile, numbers: Numbers) -> Option<Vec<u8>> {
        let its = self.tile(tile.height);
        let mut experts = 0..tile.experts;
        let graph = experts.try_fold(Graph::new("experts"), |graph, expert| {
            let graph = graph.prefixed(prefix(expert));
            self.form.added(graph, its, numbers)
        });
        graph.map(|graph| graph.model())
    }
}

/// Begins the names of an expert's values.
fn prefix(expert: usize) -> String {
    format!("{expert}.")
}

/// Names of an expert's inputs and output in a graph.
pub(crate) struct ExpertNames {
    pub weights: String,
    pub tokens: String,
    pub outliers: String,
    pub picked: String,
    pub sums: String,
}

/// Those of each expert of a graph, made once.
pub(crate) static NAMES: LazyLock<[ExpertNames; GROUP_SIZES[0]]> = LazyLock::new(|| {
    array::from_fn(|expert| {
        let name = |of: &str| prefix(expert) + of;
        ExpertNames {
            weights: name(WEIGHTS),
            tokens: name(TOKENS),
            outliers: name(OUTLIERS),
            picked: name(PICKED),
            sums: name(SUMS),
        }
    })
});

/// Divides `count` experts among graphs of so many each, the largest first: a graph that at least three quarters of its
/// experts fill, else smaller ones. Calls `then` with the first expert and the graph.
pub(crate) fn pieces(count: usize, tiles: &[GroupTile], mut then: impl FnMut(usize, GroupTile)) {
    let mut at = 0;
    while at < count {
        let left = count - at;
        let filled = |tile: &&GroupTile| 4 * left >= 3 * tile.experts;
        let Some(&tile) = tiles.iter().find(filled).or(tiles.last()) else {
            return;
        };
        then(at, tile);
        at += tile.experts;
    }
}

/// Lengths of an expert's inputs.
pub(crate) struct Lens {
    pub rows: usize,
    pub tokens: usize,
    pub outliers: [usize; 2],
}

impl Lens {
    pub fn of(of: GroupForm, tile: GroupTile, numbers: Numbers) -> Self {
        let count = of.form.outliers();
        let [row, token] = match numbers {
            Numbers::Integers => [of.form.row_bytes, of.form.groups * GROUP],
            Numbers::Floats(_) => [of.form.float_row_bytes(); 2],
        };
        Self {
            rows: tile.height * row,
            tokens: of.capacity * token,
            outliers: [tile.height, of.capacity].map(|items| items * count),
        }
    }
}

/// Graphs of groups.
pub(crate) type GroupSessions = HashMap<(GroupForm, GroupTile), Session>;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::graph::{Floats, Summed, Weights};

    fn form(
        groups: usize,
        nibbles: bool,
        summed: Summed,
        rows: usize,
        capacity: usize,
    ) -> GroupForm {
        let weights = if nibbles {
            Weights::Nibbles(8)
        } else {
            Weights::Bytes
        };
        let row_bytes = groups * weights.group_bytes() + 2;
        let form = Form {
            weights,
            summed,
            groups,
            row_bytes,
        };
        GroupForm {
            form,
            rows,
            capacity,
        }
    }

    proptest! {
        #[test]
        fn graphs_of_groups_stay_within_their_bytes_and_save_runs(
            groups in 1usize..200,
            nibbles: bool,
            summed in prop_oneof![Just(Summed::ByGroup), (0usize..100).prop_map(Summed::ByRow)],
            numbers in prop::sample::select(vec![Numbers::Integers, Numbers::Floats(Floats::Single)]),
            rows in 1usize..3000,
            capacity in prop::sample::select(vec![16usize, 32, 64, 128, 256, 512]),
        ) {
            let of = form(groups, nibbles, summed, rows, capacity);
            let tiles = of.tiles(numbers);
            prop_assert_eq!(of.parts(1, numbers).is_none(), tiles.is_empty());
            let mut before = 0.0;
            for tile in tiles {
                let bytes = tile.experts * of.form.bytes(of.tile(tile.height), numbers);
                prop_assert!(bytes <= RUN_BYTES, "{:?}", tile);
                let runs = rows.div_ceil(tile.height) as f64 / tile.experts as f64;
                prop_assert!(runs > before, "{:?}", tile);
                before = runs;
            }
        }

        #[test]
        fn experts_are_in_one_graph_each(
            count in 0usize..200,
            sizes in prop::sample::subsequence(GROUP_SIZES[..3].to_vec(), 0..=3),
        ) {
            let tiles: Vec<GroupTile> = sizes.into_iter().chain([1])
                .map(|experts| GroupTile { experts, height: 8 }).collect();
            let (mut end, mut places) = (0, 0);
            pieces(count, &tiles, |first, tile| {
                assert_eq!(first, end);
                end = count.min(first + tile.experts);
                places += tile.experts;
            });
            prop_assert_eq!(end, count);
            prop_assert!(places <= count.div_ceil(3) * 4, "{} {}", count, places);
        }
    }

    #[test]
    fn nearly_full_graphs_are_taken() {
        let of = form(8, false, Summed::ByGroup, 160, 64);
        let tiles = of.tiles(Numbers::Integers);
        let all: Vec<_> = tiles
            .iter()
            .map(|tile| [tile.experts, tile.height])
            .collect();
        assert_eq!(all, [[8, 160], [4, 160], [1, 160]]);
        let of = |count| {
            let mut sizes = Vec::new();
            pieces(count, &tiles, |_, tile| sizes.push(tile.experts));
            sizes
        };
        assert_eq!(of(1), [1]);
        assert_eq!(of(2), [1, 1]);
        assert_eq!(of(3), [4]);
        assert_eq!(of(5), [4, 1]);
        assert_eq!(of(6), [8]);
        assert_eq!(of(12), [8, 4]);
        assert_eq!(of(0), []);
    }
}
