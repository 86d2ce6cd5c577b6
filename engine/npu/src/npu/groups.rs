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

use std::borrow::Cow;

use ort::session::{Session, SessionInputValue};

use super::{Npu, Operands, Sums, tensor};
use crate::error::Error;
use crate::graph::{Form, GROUP, OUTLIERS, PICKED, SUMS, TOKENS, Tile, WEIGHTS, Weights};
use crate::onnx::Graph;
use crate::tiles::RUN_BYTES;

/// Numbers of experts that graphs have, the largest first.
pub const GROUP_SIZES: [usize; 4] = [16, 8, 4, 1];

/// Matrices of a form with `rows` rows each, and a graph's tokens of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
pub(super) struct GroupTile {
    experts: usize,
    height: usize,
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
    fn parts(&self, experts: usize) -> Option<usize> {
        let most = self.rows.div_ceil(8).max(1);
        let fits = |parts: &usize| {
            let tile = self.tile(self.rows.div_ceil(*parts));
            experts * self.form.bytes(tile) <= RUN_BYTES
        };
        (1..=most).find(fits)
    }

    /// The graphs, by number of experts, the largest first; none if no expert fits.
    fn tiles(&self) -> Vec<GroupTile> {
        let mut all = Vec::new();
        let mut fewest = f64::INFINITY;
        for experts in GROUP_SIZES.into_iter().rev() {
            let Some(parts) = self.parts(experts) else {
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

    /// Whether there are graphs of this form.
    pub fn is_computed(&self) -> bool {
        self.rows > 0 && self.capacity > 0 && self.parts(1).is_some()
    }

    fn model(&self, tile: GroupTile) -> Vec<u8> {
        let its = self.tile(tile.height);
        let experts = 0..tile.experts;
        let graph = experts.fold(Graph::new("experts"), |graph, expert| {
            let graph = graph.prefixed(prefix(expert));
            self.form.added(graph, its)
        });
        graph.model()
    }
}

/// Begins the names of an expert's values.
fn prefix(expert: usize) -> String {
    format!("{expert}.")
}

/// Divides `count` experts among graphs of so many each, the largest first: a graph that at least three quarters of its
/// experts fill, else smaller ones. Calls `then` with the first expert and the graph.
fn pieces(count: usize, tiles: &[GroupTile], mut then: impl FnMut(usize, GroupTile)) {
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

/// Copies `items`, of `len` values each, to the front of a place for `count` of them, and fills the rest with zeros.
fn fill<T: Copy + Default>(to: &mut [T], items: &[T]) {
    let (front, rest) = to.split_at_mut(items.len());
    front.copy_from_slice(items);
    rest.fill(T::default());
}

impl Npu {
    /// Makes the graphs of a group form, unless there are some.
    ///
    /// # Errors
    /// The provider does not take one as a whole, or has no memory for it.
    pub fn prepare_groups(&mut self, of: GroupForm) -> Result<(), Error> {
        for tile in of.tiles() {
            if !self.groups.contains_key(&(of, tile)) {
                let session = self.session(&of.model(tile))?;
                self.groups.insert((of, tile), session);
                self.compiled += 1;
            }
        }
        Ok(())
    }

    /// Multiplies the rows of several experts with their own tokens, at most `capacity` of each: calls `then` with an
    /// expert's number and the sums of some of its rows.
    ///
    /// # Errors
    /// The form is not prepared, lengths do not fit it, or the provider fails.
    pub fn multiply_group(
        &mut self,
        of: GroupForm,
        experts: &[Operands<'_>],
        mut then: impl FnMut(usize, Sums<'_>),
    ) -> Result<GroupRuns, Error> {
        for expert in experts {
            let counts = expert.counts(of.form);
            let fits = |[rows, tokens]: [usize; 2]| rows == of.rows && tokens <= of.capacity;
            if !counts.is_some_and(fits) {
                return Err(Error::broken("experts of other lengths than the graphs'"));
            }
        }
        let tiles = of.tiles();
        let mut result = match tiles.is_empty() {
            true => Err(Error::broken("there are no graphs of such experts")),
            false => Ok(GroupRuns::default()),
        };
        pieces(experts.len(), &tiles, |first, tile| {
            let Ok(done) = &mut result else { return };
            let end = experts.len().min(first + tile.experts);
            done.rows += (tile.experts * of.capacity) as u64;
            for row in (0..of.rows).step_by(tile.height) {
                let ran = self.group_tile(of, tile, row, &experts[first..end], |expert, sums| {
                    then(first + expert, sums)
                });
                match ran {
                    Ok(()) => done.runs += 1,
                    Err(e) => {
                        result = Err(e);
                        return;
                    }
                }
            }
        });
        result
    }

    /// Multiplies the rows from `row` on of a graph's experts. Experts that are missing have the weights of the first one,
    /// and no tokens.
    fn group_tile(
        &mut self,
        of: GroupForm,
        tile: GroupTile,
        row: usize,
        experts: &[Operands<'_>],
        mut then: impl FnMut(usize, Sums<'_>),
    ) -> Result<(), Error> {
        let (form, height, capacity) = (of.form, tile.height, of.capacity);
        let rows = row..of.rows.min(row + height);
        self.gather(of, tile, row, experts);
        let session = self.groups.get_mut(&(of, tile));
        let session = session.ok_or_else(|| Error::broken("such experts are not prepared"))?;
        let lens = Lens::of(of, tile);
        let mut inputs: Vec<(Cow<'_, str>, SessionInputValue<'_>)> = Vec::new();
        for place in 0..tile.experts {
            let its = &experts[if place < experts.len() { place } else { 0 }];
            let name = |of: &str| Cow::from(format!("{}{of}", prefix(place)));
            let weights = match rows.len() == height {
                true => &its.rows[rows.start * form.row_bytes..rows.end * form.row_bytes],
                false => &self.rows[place * lens.rows..][..lens.rows],
            };
            let shape = [height, form.row_bytes];
            let weights = match form.weights {
                Weights::Bytes => tensor(shape, bytemuck::cast_slice::<u8, i8>(weights))?,
                Weights::Nibbles(_) => tensor(shape, weights)?,
            };
            let x = &self.tokens[place * lens.tokens..][..lens.tokens];
            inputs.push((name(WEIGHTS), weights.into()));
            inputs.push((
                name(TOKENS),
                tensor([capacity, form.groups, GROUP], x)?.into(),
            ));
            if let count @ 1.. = form.outliers() {
                let [outliers, picked] = [0, 1].map(|i| {
                    let len = lens.outliers[i];
                    &self.outliers[i][place * len..][..len]
                });
                inputs.push((name(OUTLIERS), tensor([height, count], outliers)?.into()));
                inputs.push((name(PICKED), tensor([capacity, count], picked)?.into()));
            }
        }
        self.runs += 1;
        let outputs = session.run(inputs).map_err(Error::of)?;
        for (place, expert) in experts.iter().enumerate() {
            let name = format!("{}{SUMS}", prefix(place));
            let sums = outputs.get(&name);
            let sums = sums.ok_or_else(|| Error::broken("no sums came out"))?;
            let (_, sums) = sums.try_extract_tensor::<i32>().map_err(Error::of)?;
            if sums.len() != form.sums() * height * capacity {
                return Err(Error::broken("sums of another shape came out"));
            }
            let tokens = 0..expert.tokens.len() / (form.groups * GROUP);
            then(
                place,
                Sums {
                    rows: rows.clone(),
                    tokens,
                    sums,
                    group: height * capacity,
                    width: capacity,
                },
            );
        }
        Ok(())
    }

    /// Gathers what a graph's experts do not have in its shape: tokens and outliers, and rows where they are fewer.
    fn gather(&mut self, of: GroupForm, tile: GroupTile, row: usize, experts: &[Operands<'_>]) {
        let lens = Lens::of(of, tile);
        let rows = row..of.rows.min(row + tile.height);
        let (len, count) = (of.form.row_bytes, of.form.outliers());
        self.tokens.resize(tile.experts * lens.tokens, 0);
        let short = rows.len() < tile.height;
        (self.rows).resize(if short { tile.experts * lens.rows } else { 0 }, 0);
        for (room, len) in self.outliers.iter_mut().zip(lens.outliers) {
            room.resize(tile.experts * len, 0);
        }
        for place in 0..tile.experts {
            let none = Operands {
                tokens: &[],
                outliers: [experts[0].outliers[0], &[]],
                ..experts[0]
            };
            let its = experts.get(place).unwrap_or(&none);
            let at = |len: usize| place * len..(place + 1) * len;
            fill(&mut self.tokens[at(lens.tokens)], its.tokens);
            if short {
                let some = &its.rows[rows.start * len..rows.end * len];
                fill(&mut self.rows[at(lens.rows)], some);
            }
            let [outliers, picked] = its.outliers;
            let some = &outliers[rows.start * count..rows.end * count];
            fill(&mut self.outliers[0][at(lens.outliers[0])], some);
            fill(&mut self.outliers[1][at(lens.outliers[1])], picked);
        }
    }
}

/// Lengths of an expert's inputs.
struct Lens {
    rows: usize,
    tokens: usize,
    outliers: [usize; 2],
}

impl Lens {
    fn of(of: GroupForm, tile: GroupTile) -> Self {
        let count = of.form.outliers();
        Self {
            rows: tile.height * of.form.row_bytes,
            tokens: of.capacity * of.form.groups * GROUP,
            outliers: [tile.height, of.capacity].map(|items| items * count),
        }
    }
}

/// Graphs of groups.
pub(super) type GroupSessions = std::collections::HashMap<(GroupForm, GroupTile), Session>;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::graph::Summed;

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
            rows in 1usize..3000,
            capacity in prop::sample::select(vec![16usize, 32, 64, 128, 256, 512]),
        ) {
            let of = form(groups, nibbles, summed, rows, capacity);
            let tiles = of.tiles();
            prop_assert_eq!(of.is_computed(), !tiles.is_empty());
            let mut before = 0.0;
            for tile in tiles {
                let bytes = tile.experts * of.form.bytes(of.tile(tile.height));
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
        let tiles = of.tiles();
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
