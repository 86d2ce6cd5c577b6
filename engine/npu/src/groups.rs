//! Graphs of several experts (NPUMoE §4.2): one launch instead of one per expert.
//!
//! ```text
//! expert 0   weights ‖ tokens [capacity, groups, 32] ─ nodes of `graph.rs` ─▶ sums
//! expert 1   weights ‖ tokens                        ─ the same nodes      ─▶ sums          with the prefix "1."
//! …
//! ```
//!
//! Each expert has its own inputs, so its weights need no copy. A graph holds as many rows per expert as [`RUN_BYTES`]
//! allows. Numbers of experts that save no runs get no graph.

use std::array;
use std::collections::HashMap;
use std::sync::LazyLock;

use ort::session::Session;
use serde::{Deserialize, Serialize};

use crate::graph::{Form, GROUP, Numbers, OUTLIERS, PICKED, SUMS, TOKENS, Tile, WEIGHTS};
use crate::onnx::Graph;
use crate::tiles::RUN_BYTES;

/// Experts per graph, in descending order.
pub const GROUP_SIZES: [usize; 4] = [16, 8, 4, 1];

/// Shape of the experts of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupForm {
    /// Layout of rows.
    pub form: Form,
    /// Rows of each expert's matrix.
    pub rows: usize,
    /// Maximum tokens per expert.
    pub capacity: usize,
}

/// Size of a graph: experts, and rows of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GroupTile {
    pub experts: usize,
    pub height: usize,
}

/// Counters of a group's runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupRuns {
    /// Runs of graphs.
    pub runs: u64,
    /// Token places of the experts in these graphs, used or padded, each counted once per expert.
    pub rows: u64,
}

impl GroupForm {
    fn tile(&self, height: usize) -> Tile {
        Tile {
            height,
            width: self.capacity,
        }
    }

    /// Minimum number of runs for all rows in a graph of `experts` experts; `None` if not even 8 rows fit.
    fn parts(&self, experts: usize, numbers: Numbers) -> Option<usize> {
        let most = self.rows.div_ceil(8).max(1);
        let fits = |parts: &usize| {
            let tile = self.tile(self.rows.div_ceil(*parts));
            experts * self.form.bytes(tile, numbers) <= RUN_BYTES
        };
        (1..=most).find(fits)
    }

    /// The graphs in descending order of experts; empty if no expert fits.
    pub(crate) fn tiles(&self, numbers: Numbers) -> Vec<GroupTile> {
        let mut tiles = Vec::new();
        let mut fewest = f64::INFINITY;
        if self.rows == 0 || self.capacity == 0 {
            return tiles;
        }
        for experts in GROUP_SIZES.into_iter().rev() {
            let Some(parts) = self.parts(experts, numbers) else {
                continue;
            };
            let runs = parts as f64 / experts as f64;
            if runs < fewest {
                let height = self.rows.div_ceil(parts);
                tiles.push(GroupTile { experts, height });
                fewest = runs;
            }
        }
        tiles.reverse();
        tiles
    }

    /// The ONNX model of a graph; `None` if these numbers do not support the form.
    pub(crate) fn model(&self, tile: GroupTile, numbers: Numbers) -> Option<Vec<u8>> {
        let expert_tile = self.tile(tile.height);
        let mut experts = 0..tile.experts;
        let graph = experts.try_fold(Graph::new("experts"), |graph, expert| {
            let graph = graph.prefixed(prefix(expert));
            self.form.added(graph, expert_tile, numbers)
        });
        graph.map(|graph| graph.model())
    }
}

/// Prefix of the names of an expert's values.
fn prefix(expert: usize) -> String {
    format!("{expert}.")
}

/// Names of an expert's inputs and output.
pub(crate) struct ExpertNames {
    pub weights: String,
    pub tokens: String,
    pub outliers: String,
    pub picked: String,
    pub sums: String,
}

/// Names for each expert of a graph, built once.
pub(crate) static NAMES: LazyLock<[ExpertNames; GROUP_SIZES[0]]> = LazyLock::new(|| {
    array::from_fn(|expert| {
        let name = |value: &str| prefix(expert) + value;
        ExpertNames {
            weights: name(WEIGHTS),
            tokens: name(TOKENS),
            outliers: name(OUTLIERS),
            picked: name(PICKED),
            sums: name(SUMS),
        }
    })
});

/// Divides `count` experts among graphs: the largest of which at least three quarters are used, else the smallest. Calls
/// `then` with the first expert and the graph.
pub(crate) fn pieces(count: usize, tiles: &[GroupTile], mut then: impl FnMut(usize, GroupTile)) {
    let mut first = 0;
    while first < count {
        let left = count - first;
        let filled = |tile: &&GroupTile| 4 * left >= 3 * tile.experts;
        let Some(&tile) = tiles.iter().find(filled).or(tiles.last()) else {
            return;
        };
        then(first, tile);
        first += tile.experts;
    }
}

/// Lengths of an expert's inputs.
pub(crate) struct Lens {
    pub rows: usize,
    pub tokens: usize,
    pub outliers: [usize; 2],
}

impl Lens {
    pub fn of(group: GroupForm, tile: GroupTile, numbers: Numbers) -> Self {
        let count = group.form.outliers();
        let [row, token] = match numbers {
            Numbers::Integers => [group.form.row_bytes, group.form.groups * GROUP],
            Numbers::Floats(_) => [group.form.float_row_bytes(); 2],
        };
        Self {
            rows: tile.height * row,
            tokens: group.capacity * token,
            outliers: [tile.height, group.capacity].map(|items| items * count),
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
            let group = form(groups, nibbles, summed, rows, capacity);
            let tiles = group.tiles(numbers);
            prop_assert_eq!(group.parts(1, numbers).is_none(), tiles.is_empty());
            let mut before = 0.0;
            for tile in tiles {
                let bytes = tile.experts * group.form.bytes(group.tile(tile.height), numbers);
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
        let group = form(8, false, Summed::ByGroup, 160, 64);
        let tiles = group.tiles(Numbers::Integers);
        let shapes: Vec<_> = tiles
            .iter()
            .map(|tile| [tile.experts, tile.height])
            .collect();
        assert_eq!(shapes, [[8, 160], [4, 160], [1, 160]]);
        let experts_by_graph = |count| {
            let mut sizes = Vec::new();
            pieces(count, &tiles, |_, tile| sizes.push(tile.experts));
            sizes
        };
        assert_eq!(experts_by_graph(1), [1]);
        assert_eq!(experts_by_graph(2), [1, 1]);
        assert_eq!(experts_by_graph(3), [4]);
        assert_eq!(experts_by_graph(5), [4, 1]);
        assert_eq!(experts_by_graph(6), [8]);
        assert_eq!(experts_by_graph(12), [8, 4]);
        assert_eq!(experts_by_graph(0), []);
    }
}
