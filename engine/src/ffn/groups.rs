//! Experts that a device computes in groups: their units' first rows, of which it computes Gate and Up; the CPU computes the
//! units' other rows, the other units, and Down of all. See [`lanes`](crate::lanes).

use arrayvec::ArrayVec;

use super::pairs::{Inputs, Unit};
use super::state::Ffn;
use super::units::{BankWork, LayerInput, Rows};
use crate::device::{MOST_EXPERTS, PickedTokens};
use crate::error::Error;
use crate::lanes::{DeviceLane, GroupUnit, InGroup, Queued};

impl<'a> BankWork<'a> {
    /// The unit's first `count` rows, and the others.
    fn split(&self, count: usize) -> [Self; 2] {
        let (first, others) = self.rows.split(count);
        let of = |values: Option<&'a [f32]>| match values.map(|values| values.split_at(count)) {
            Some((first, others)) => [Some(first), Some(others)],
            None => [None; 2],
        };
        let (weights, scales) = (of(self.weights), of(self.scales));
        let part = |rows, i: usize| Self {
            rows,
            weights: weights[i],
            scales: scales[i],
            ..*self
        };
        [part(first, 0), part(others, 1)]
    }
}

impl Rows<'_> {
    /// The first `count` rows, and the others.
    fn split(self, count: usize) -> (Self, Self) {
        match self {
            Self::All(rows) => (Self::From(0, count), Self::From(count, rows - count)),
            Self::From(first, rows) => (
                Self::From(first, count),
                Self::From(first + count, rows - count),
            ),
            Self::Some(rows) => {
                let (first, others) = rows.split_at(count);
                (Self::Some(first), Self::Some(others))
            }
        }
    }

    fn picked(&self) -> PickedTokens<'_> {
        match self {
            Self::All(rows) => PickedTokens::From(0, *rows),
            Self::From(first, rows) => PickedTokens::From(*first, *rows),
            Self::Some(rows) => PickedTokens::List(rows),
        }
    }
}

/// The units of a layer, those that a group computes apart from what is beyond their capacity. `part`: what a group computes
/// of an expert.
fn split_units<'a>(
    units: &[BankWork<'a>],
    part: impl Fn(&BankWork<'a>) -> Option<InGroup>,
) -> Vec<BankWork<'a>> {
    let mut all = Vec::with_capacity(2 * units.len());
    for unit in units {
        let Some(part) = part(unit) else {
            all.push(*unit);
            continue;
        };
        let [first, others] = unit.split(part.tokens);
        all.push(BankWork {
            group: Some(part),
            ..first
        });
        if others.rows.len() > 0 {
            all.push(others);
        }
    }
    all
}

impl Ffn {
    /// Begins the groups that a device computes of a layer. The layer's units then, or none without groups.
    ///
    /// # Errors
    /// A device's, unless the CPU can go on.
    pub(super) fn begin_groups<'a>(
        &mut self,
        at: &LayerInput<'a>,
    ) -> Result<Vec<BankWork<'a>>, Error> {
        // Devices know neither the pairs that a predictor wants nor scaled inputs, and an observer needs the CPU's values.
        let plain = self.predictors.is_none() && self.record.is_none();
        let [lane] = &mut self.lanes[..] else {
            return Ok(Vec::new());
        };
        if !plain || at.units.iter().any(|unit| unit.scales.is_some()) {
            return Ok(Vec::new());
        }
        let first = self.store.layout.banks_of(at.number).start;
        let expert = |unit: &BankWork<'_>| (unit.bank - first) as usize;
        let visited = at.units.iter().map(|unit| (expert(unit), unit.rows.len()));
        if !lane.begin_groups([at.number, at.input.tokens()], visited)? {
            return Ok(Vec::new());
        }
        let groups = lane.groups();
        let part = |unit: &BankWork<'a>| groups.and_then(|of| of.part(expert(unit)));
        Ok(split_units(at.units, part))
    }

    /// Submits the next group, if a device is free. Waits for those with the first `until` hidden values.
    pub(super) fn go_on_groups(
        &mut self,
        inputs: Inputs<'_>,
        until: Option<usize>,
    ) -> Result<(), Error> {
        if inputs.grouped.is_empty() {
            return Ok(());
        }
        let first = self.store.layout.banks_of(inputs.at.number).start;
        for lane in &mut self.lanes {
            while let Some(group) = lane.next_group(until)? {
                submit(lane, group, first, inputs)?;
            }
        }
        Ok(())
    }

    /// Waits for the hidden values of some units.
    pub(super) fn wait_for_groups(
        &mut self,
        inputs: Inputs<'_>,
        items: &std::ops::Range<usize>,
    ) -> Result<(), Error> {
        let here = |unit: &&Unit| unit.first < items.end && unit.end > items.start;
        let end = |unit: &Unit| {
            let part = unit.group?;
            Some(part.hidden + part.tokens * unit.neurons)
        };
        let units = self.units.iter().filter(here);
        match units.filter_map(end).max() {
            Some(end) => self.go_on_groups(inputs, Some(end)),
            None => Ok(()),
        }
    }
}

/// Submits a group of the layer whose banks begin at `first`.
fn submit(
    lane: &mut DeviceLane,
    group: Queued,
    first: u32,
    inputs: Inputs<'_>,
) -> Result<(), Error> {
    let units = inputs.grouped;
    let unit = |&expert: &usize| {
        let bank = first + expert as u32;
        let at = units.partition_point(|unit| unit.bank < bank);
        let unit = units.get(at).filter(|unit| unit.bank == bank)?;
        Some(GroupUnit {
            bank,
            tokens: unit.rows.picked(),
            bias: [unit.bias.gate, unit.bias.up],
        })
    };
    let experts: ArrayVec<GroupUnit<'_>, MOST_EXPERTS> =
        group.experts.iter().filter_map(unit).collect();
    lane.submit_group(group, &experts, inputs.at.input)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ffn::Bias;

    proptest! {
        /// Every route is in one unit, with its weight; a group has the first tokens of an expert.
        #[test]
        fn routes_are_in_one_unit_each(
            visits in prop::collection::vec(prop::collection::vec(any::<bool>(), 24), 1..9),
            capacities in prop::collection::vec(prop::option::of(1usize..30), 9),
        ) {
            let rows: Vec<Vec<u32>> = (visits.iter())
                .map(|of| (0..24).filter(|&row| of[row as usize]).collect())
                .collect();
            let weights: Vec<Vec<f32>> = (rows.iter().enumerate())
                .map(|(i, rows)| rows.iter().map(|&row| (24 * i) as f32 + row as f32).collect())
                .collect();
            let units: Vec<BankWork<'_>> = (rows.iter().zip(&weights).enumerate())
                .filter(|(_, (rows, _))| !rows.is_empty())
                .map(|(i, (rows, weights))| BankWork {
                    bank: i as u32,
                    rows: if rows.len() == 24 { Rows::All(24) } else { Rows::Some(rows) },
                    weights: Some(weights),
                    scales: None,
                    bias: Bias::NONE,
                    group: None,
                })
                .collect();
            let part = |unit: &BankWork<'_>| {
                let tokens = capacities[unit.bank as usize]?.min(unit.rows.len());
                Some(InGroup { tokens, hidden: 0 })
            };
            let split = split_units(&units, part);
            let mut found = Vec::new();
            for unit in &split {
                let len = unit.rows.len();
                prop_assert!(len > 0 && unit.weights.is_some_and(|weights| weights.len() == len));
                if let Some(part) = unit.group {
                    prop_assert_eq!(part.tokens, len);
                    prop_assert!(Some(len) <= capacities[unit.bank as usize]);
                }
                let picked: Vec<usize> = unit.rows.picked().each().collect();
                for (place, &row) in picked.iter().enumerate() {
                    prop_assert_eq!(unit.rows.row(place), row);
                    prop_assert_eq!(unit.rows.place(row), Some(place));
                    found.push((unit.bank, row as u32, unit.weights.unwrap()[place]));
                }
            }
            let all: Vec<_> = (rows.iter().zip(&weights).enumerate())
                .flat_map(|(i, (rows, weights))| {
                    rows.iter().zip(weights).map(move |(&row, &weight)| (i as u32, row, weight))
                })
                .collect();
            prop_assert_eq!(found, all);
            prop_assert!(split.is_sorted_by_key(|unit| unit.bank));
        }
    }
}
