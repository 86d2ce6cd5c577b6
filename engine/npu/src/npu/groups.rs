//! Products of groups of experts.

use std::borrow::Cow;

use ort::session::SessionInputValue;

use super::tensors::{rows_as_read, tensor};
use super::{Npu, whole, wrong_sums};
use crate::error::Error;
use crate::graph::{GROUP, Numbers};
use crate::groups::{GroupForm, GroupRuns, GroupTile, Lens, NAMES, pieces};
use crate::operands::{Operands, Sums};
use crate::trial::Trial;

/// Copies `items` to the front of `target` and fills the rest with zeros.
fn fill<T: Copy + Default>(target: &mut [T], items: &[T]) {
    let (front, rest) = target.split_at_mut(items.len());
    front.copy_from_slice(items);
    rest.fill(T::default());
}

impl Npu {
    /// The graphs of a group form; empty before its rows are prepared.
    fn group_tiles(&self, group: GroupForm) -> Vec<GroupTile> {
        let numbers = self.numbers.get(&group.form);
        numbers.map_or_else(Vec::new, |&numbers| group.tiles(numbers))
    }

    /// Whether the graphs of a group form are ready.
    pub fn has_groups(&self, group: GroupForm) -> bool {
        let tiles = self.group_tiles(group);
        !tiles.is_empty() && (tiles.iter()).all(|&tile| self.groups.contains_key(&(group, tile)))
    }

    /// Compiles and tries the graphs of a group form that are missing.
    ///
    /// # Errors
    /// The provider cannot compute a graph as a whole, computes wrong sums, or has no memory.
    pub fn prepare_groups(&mut self, group: GroupForm) -> Result<(), Error> {
        let unprepared = || Error::broken("such rows are not prepared");
        let numbers = *self.numbers.get(&group.form).ok_or_else(unprepared)?;
        for tile in group.tiles(numbers) {
            if self.groups.contains_key(&(group, tile)) {
                continue;
            }
            let model = group.model(tile, numbers).ok_or_else(unprepared)?;
            let session = self.compiled_session(&model)?;
            self.groups.insert((group, tile), session);
            self.compiled += 1;
            (self.progress)();
            if let Err(e) = self.try_group(group, tile) {
                self.groups.remove(&(group, tile));
                return Err(e);
            }
            (self.progress)();
        }
        Ok(())
    }

    /// Runs a graph once with full experts, except for a single token of the last, and checks that its sums are exact.
    fn try_group(&mut self, group: GroupForm, tile: GroupTile) -> Result<(), Error> {
        let trials: Vec<Trial> = (0..tile.experts)
            .map(|expert| {
                let last = expert > 0 && expert + 1 == tile.experts;
                let tokens = if last { 1 } else { group.capacity };
                Trial::new(group.form, [tile.height, tokens], expert as u64)
            })
            .collect();
        let operands: Vec<Operands<'_>> = trials.iter().map(Trial::operands).collect();
        let mut apart = 0.0f64;
        self.group_tile(group, tile, 0, &operands, |expert, sums| {
            apart = apart.max(trials[expert].apart(&sums));
        })?;
        match apart > 0.0 {
            false => Ok(()),
            true => Err(wrong_sums(self.provider)),
        }
    }

    /// Multiplies the rows of several experts with up to `capacity` tokens each. Calls `then` with an expert's index and
    /// the sums of some of its rows.
    ///
    /// # Errors
    /// The form is not prepared, lengths do not match, or the provider fails.
    pub fn multiply_group(
        &mut self,
        group: GroupForm,
        experts: &[Operands<'_>],
        mut then: impl FnMut(usize, Sums<'_>),
    ) -> Result<GroupRuns, Error> {
        for expert in experts {
            let counts = expert.counts(group.form);
            let fits = |[rows, tokens]: [usize; 2]| rows == group.rows && tokens <= group.capacity;
            if !counts.is_some_and(fits) {
                return Err(Error::broken("experts of other lengths than the graphs'"));
            }
        }
        let tiles = self.group_tiles(group);
        let mut result = match tiles.is_empty() {
            true => Err(Error::broken("there are no graphs of such experts")),
            false => Ok(GroupRuns::default()),
        };
        pieces(experts.len(), &tiles, |first, tile| {
            let Ok(done) = &mut result else { return };
            let end = experts.len().min(first + tile.experts);
            done.rows += (tile.experts * group.capacity) as u64;
            for row in (0..group.rows).step_by(tile.height) {
                let ran =
                    self.group_tile(group, tile, row, &experts[first..end], |expert, sums| {
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

    /// Runs a graph for rows from `row` on of its experts. Missing experts have the first one's weights and no tokens.
    fn group_tile(
        &mut self,
        group: GroupForm,
        tile: GroupTile,
        row: usize,
        experts: &[Operands<'_>],
        mut then: impl FnMut(usize, Sums<'_>),
    ) -> Result<(), Error> {
        let (form, height, capacity) = (group.form, tile.height, group.capacity);
        let rows = row..group.rows.min(row + height);
        let unprepared = || Error::broken("such experts are not prepared");
        let numbers = *self.numbers.get(&form).ok_or_else(unprepared)?;
        self.gather(group, tile, numbers, row, experts);
        let session = self.groups.get_mut(&(group, tile)).ok_or_else(unprepared)?;
        let lens = Lens::of(group, tile, numbers);
        let integers = numbers == Numbers::Integers;
        let in_place = rows.len() == height && !form.is_unpacked(numbers);
        let inputs_each = 2 + 2 * usize::from(form.outliers() > 0);
        let mut inputs: Vec<(Cow<'_, str>, SessionInputValue<'_>)> =
            Vec::with_capacity(tile.experts * inputs_each);
        for place in 0..tile.experts {
            let expert = &experts[if place < experts.len() { place } else { 0 }];
            let names = &NAMES[place];
            let weights = match in_place {
                true => &expert.rows[rows.start * form.row_bytes..rows.end * form.row_bytes],
                false => &self.rows[place * lens.rows..][..lens.rows],
            };
            let weights = rows_as_read(&form, numbers, height, weights)?;
            let x = &self.tokens[place * lens.tokens..][..lens.tokens];
            let x = match integers {
                true => tensor([capacity, form.groups, GROUP], x)?,
                false => tensor([form.float_row_bytes(), capacity], x)?,
            };
            inputs.push(((&names.weights).into(), weights.into()));
            inputs.push(((&names.tokens).into(), x.into()));
            if let count @ 1.. = form.outliers() {
                let [outliers, picked] = [0, 1].map(|i| {
                    let len = lens.outliers[i];
                    &self.outliers[i][place * len..][..len]
                });
                let outliers = tensor([height, count], outliers)?;
                let shape = if integers {
                    [capacity, count]
                } else {
                    [count, capacity]
                };
                let picked = tensor(shape, picked)?;
                inputs.push(((&names.outliers).into(), outliers.into()));
                inputs.push(((&names.picked).into(), picked.into()));
            }
        }
        self.runs += 1;
        let outputs = session.run(inputs).map_err(Error::of)?;
        for (place, expert) in experts.iter().enumerate() {
            let found = outputs.get(&NAMES[place].sums);
            let sums = whole(form, numbers, found, height * capacity, &mut self.sums)?;
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

    /// Copies a graph's inputs to buffers in its shape: tokens and outliers, and rows that need padding or unpacking.
    fn gather(
        &mut self,
        group: GroupForm,
        tile: GroupTile,
        numbers: Numbers,
        row: usize,
        experts: &[Operands<'_>],
    ) {
        let lens = Lens::of(group, tile, numbers);
        let rows = row..group.rows.min(row + tile.height);
        let (len, count) = (group.form.row_bytes, group.form.outliers());
        self.tokens.resize(tile.experts * lens.tokens, 0);
        let (form, integers) = (group.form, numbers == Numbers::Integers);
        let unpacked = form.is_unpacked(numbers);
        let gathered = rows.len() < tile.height || unpacked;
        (self.rows).resize(
            if gathered {
                tile.experts * lens.rows
            } else {
                0
            },
            0,
        );
        for (room, len) in self.outliers.iter_mut().zip(lens.outliers) {
            room.resize(tile.experts * len, 0);
        }
        for place in 0..tile.experts {
            let none = Operands {
                tokens: &[],
                outliers: [experts[0].outliers[0], &[]],
                ..experts[0]
            };
            let expert = experts.get(place).unwrap_or(&none);
            let range = |len: usize| place * len..(place + 1) * len;
            let tokens = &mut self.tokens[range(lens.tokens)];
            match integers {
                true => fill(tokens, expert.tokens),
                false => form.put_across(expert.tokens, group.capacity, tokens),
            }
            let stored = &expert.rows[rows.start * len..rows.end * len];
            match gathered.then(|| &mut self.rows[range(lens.rows)]) {
                Some(gathered) if unpacked => form.unpack(stored, gathered),
                Some(gathered) => fill(gathered, stored),
                None => {}
            }
            let [outliers, picked] = expert.outliers;
            let outliers = &outliers[rows.start * count..rows.end * count];
            fill(&mut self.outliers[0][range(lens.outliers[0])], outliers);
            let target = &mut self.outliers[1][range(lens.outliers[1])];
            match integers {
                true => fill(target, picked),
                false => form.put_picked(picked, group.capacity, target),
            }
        }
    }
}
