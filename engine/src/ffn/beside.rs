//! A layer of which a [lane](crate::lane) takes a part: the offer, bytes that pass, and results.
//!
//! Without a lane nothing here is called.

use std::ops::Range;

use emberflow_kernels::Compute;

use super::pairs::{Inputs, Unit};
use super::reduce::is_plain;
use super::state::{Ffn, clusters_per_group};
use super::units::{BankWork, LayerInput, Rows};
use crate::error::Error;
use crate::lane::{Collect, HiddenRows, Lane, Offer, PickedTokens, Share, UnitRows, Work};
use crate::store::Step;

impl<'a> BankWork<'a> {
    /// The unit's first `count` rows, and the rest.
    fn split(&self, count: usize) -> [Self; 2] {
        let (first, others) = self.rows.split(count);
        let halves = |values: Option<&'a [f32]>| match values.map(|values| values.split_at(count)) {
            Some((first, others)) => [Some(first), Some(others)],
            None => [None; 2],
        };
        let (weights, scales) = (halves(self.weights), halves(self.scales));
        let part = |rows, i: usize| Self {
            rows,
            weights: weights[i],
            scales: scales[i],
            ..*self
        };
        [part(first, 0), part(others, 1)]
    }
}

impl<'a> Rows<'a> {
    /// The first `count` rows, and the rest.
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

    pub(super) fn picked(self) -> PickedTokens<'a> {
        match self {
            Self::All(rows) => PickedTokens::From(0, rows),
            Self::From(first, rows) => PickedTokens::From(first, rows),
            Self::Some(rows) => PickedTokens::List(rows),
        }
    }
}

/// A layer's units, with rows whose hidden values a lane computes as units of their own. `part`: those rows of a unit.
pub(super) fn split_units<'a>(
    units: &[BankWork<'a>],
    part: impl Fn(&BankWork<'a>) -> Option<HiddenRows>,
) -> Vec<BankWork<'a>> {
    let mut all = Vec::with_capacity(2 * units.len());
    for unit in units {
        let Some(part) = part(unit) else {
            all.push(*unit);
            continue;
        };
        let [first, others] = unit.split(part.tokens);
        all.push(BankWork {
            hidden: Some(part),
            ..first
        });
        if others.rows.len() > 0 {
            all.push(others);
        }
    }
    all
}

impl Ffn {
    /// Number of leading rows of a pass for which a lane computes all clusters.
    pub fn rows_beside(&self, rows: usize) -> usize {
        self.lane.as_ref().map_or(0, |lane| lane.rows(rows))
    }

    /// Offers a layer to the lane.
    pub(super) fn offer(&mut self, at: &LayerInput<'_>) -> Result<Share, Error> {
        let Some(lane) = &mut self.lane else {
            return Ok(Share::Clusters);
        };
        // An observer of neurons needs the CPU's values.
        let seen = self.record.is_some();
        let by_rows = match at.units {
            [unit] if is_plain(unit) && !seen => Some(unit.bank),
            _ => None,
        };
        // Lanes know neither the pairs that a predictor selects among experts nor scaled inputs.
        let plain = self.predictors.is_none() && !seen;
        let chosen = plain && at.units.iter().all(|unit| unit.scales.is_none());
        let first = self.store.layout.banks_of(at.number).start;
        let visited = at.units.iter().filter(|_| chosen);
        let visited = visited.map(|unit| ((unit.bank - first) as usize, unit.rows.len()));
        let experts: Vec<(usize, usize)> = match self.store.layout.has_experts() {
            true => visited.collect(),
            false => Vec::new(),
        };
        let offer = Offer {
            layer: at.number,
            rows: at.input.tokens(),
            by_rows,
            experts: &experts,
        };
        let share = lane.offer(&offer, &mut self.store.outside);
        self.store.keep_failure(share)
    }

    /// Calls `then` with the lane, the layer's work and the partial sums, if there is a lane. Its errors are the store's.
    fn with_lane(
        &mut self,
        on: &Compute,
        inputs: Inputs<'_>,
        then: impl FnOnce(&mut dyn Lane, &Work<'_>, &mut [f32]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (units, pairs) = (&self.units, &self.pairs);
        let Some(lane) = &mut self.lane else {
            return Ok(());
        };
        let rows = units.iter().enumerate().map(|(i, unit)| {
            let wanted = unit.wanted(&pairs.wanted);
            unit.rows_of(inputs.of(i), wanted)
        });
        let rows: Vec<UnitRows<'_>> = rows.collect();
        let first: Vec<usize> = units.iter().map(|unit| unit.first).collect();
        let at_once = match units[..] {
            [unit] => {
                let (clusters, d) = (unit.end - unit.first, self.shape.format.d);
                clusters_per_group(unit.rows.max(1), d, clusters, on.threads())
            }
            _ => 0,
        };
        let beside = inputs.beside.rows.zip(units.first());
        let work = Work {
            outside: &self.store.outside,
            units: &rows,
            first: &first,
            total: is_total(units, inputs),
            at_once,
            rows: beside.map(|((input, _), unit)| {
                let wanted = pairs.wanted_beside;
                unit.rows_of(input, wanted.map(|_| &pairs.wanted[unit.words_end()..]))
            }),
            experts: inputs.beside.experts,
        };
        let outcome = then(&mut **lane, &work, &mut self.partials);
        self.store.keep_failure(outcome)
    }

    /// Selects the pairs of the rows that the lane computes, and has it begin with experts.
    pub(super) fn start_beside(&mut self, on: &Compute, inputs: Inputs<'_>) -> Result<(), Error> {
        self.name_beside(on, inputs);
        match inputs.beside.experts {
            None => Ok(()),
            Some(_) => self.with_lane(on, inputs, |lane, work, _| {
                lane.collect(work, Collect::Nothing)
            }),
        }
    }

    /// Begins a group of units. Returns the number of clusters, the first ones, of which the lane gives the total.
    pub(super) fn begin_beside(
        &mut self,
        on: &Compute,
        inputs: Inputs<'_>,
        out: &mut [f32],
    ) -> Result<usize, Error> {
        let own = match (is_total(&self.units, inputs), self.units.first()) {
            (true, Some(unit)) => self.store.outside.computes(unit.bank),
            _ => 0,
        };
        self.with_lane(on, inputs, |lane, work, _| {
            lane.begin(work, 0..own);
            match work.rows {
                // Then it computes other rows.
                Some(_) => lane.collect(work, Collect::Total(out)),
                None => lane.collect(work, Collect::Nothing),
            }
        })?;
        Ok(own)
    }

    /// Adds the total of the clusters that the lane computes for the CPU's rows: `out` begins with it.
    pub(super) fn collect_total(
        &mut self,
        on: &Compute,
        inputs: Inputs<'_>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        self.with_lane(on, inputs, |lane, work, _| {
            lane.collect(work, Collect::Total(out))
        })
    }

    /// Takes the sums of the rows that the lane computes with all clusters.
    pub(super) fn collect_rows(
        &mut self,
        on: &Compute,
        inputs: Inputs<'_>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        self.with_lane(on, inputs, |lane, work, _| {
            lane.collect(work, Collect::Rows(out))
        })
    }

    /// Begins a group of items.
    pub(super) fn begin_items(
        &mut self,
        on: &Compute,
        inputs: Inputs<'_>,
        items: &Range<usize>,
    ) -> Result<(), Error> {
        let overlaps = |unit: &&Unit| unit.first < items.end && unit.end > items.start;
        let end = |unit: &Unit| {
            let part = unit.hidden?;
            Some(part.first + part.tokens * unit.neurons)
        };
        let hidden = self.units.iter().filter(overlaps).filter_map(end).max();
        self.with_lane(on, inputs, |lane, work, _| {
            lane.begin(work, items.clone());
            match hidden {
                Some(end) => lane.collect(work, Collect::Hidden(end)),
                None => lane.collect(work, Collect::Nothing),
            }
        })
    }

    /// Advances the lane, and takes its finished sums of the group's items, or all of them if it `waits`.
    pub(super) fn collect_items(
        &mut self,
        on: &Compute,
        inputs: Inputs<'_>,
        items: &Range<usize>,
        width: usize,
        waits: bool,
    ) -> Result<(), Error> {
        self.with_lane(on, inputs, |lane, work, sums| {
            let clusters = Collect::Clusters {
                items: items.clone(),
                sums,
                width,
                waits,
            };
            lane.collect(work, clusters)?;
            match waits {
                true => lane.collect(work, Collect::Room),
                false => Ok(()),
            }
        })
    }

    /// Hands complete clusters to a lane that needs their bytes.
    pub(super) fn pass_ready(&mut self, on: &Compute, inputs: Inputs<'_>) -> Result<(), Error> {
        let Some(lane) = self.lane.as_mut().filter(|_| inputs.beside.rows.is_some()) else {
            return Ok(());
        };
        for &(item, step) in &self.schedule.ready {
            // Such layers have one unit, whose clusters are the items.
            let cluster = item as usize;
            if step == Step::Sums && lane.needs(cluster) {
                let passed = (self.store).with_rows(cluster, |rows| lane.arrived(cluster, rows));
                self.store.keep_failure(passed)?;
                self.store.intact()?;
            }
        }
        self.with_lane(on, inputs, |lane, work, _| {
            lane.collect(work, Collect::Nothing)
        })
    }
}

/// Whether a lane gives the total of its clusters: of the only unit, with weight 1.
fn is_total(units: &[Unit], inputs: Inputs<'_>) -> bool {
    units.len() == 1 && is_plain(&inputs.at.units[0])
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
                    hidden: None,
                })
                .collect();
            let part = |unit: &BankWork<'_>| {
                let tokens = capacities[unit.bank as usize]?.min(unit.rows.len());
                Some(HiddenRows { tokens, first: 0 })
            };
            let split = split_units(&units, part);
            let mut found = Vec::new();
            for unit in &split {
                let len = unit.rows.len();
                prop_assert!(len > 0 && unit.weights.is_some_and(|weights| weights.len() == len));
                if let Some(part) = unit.hidden {
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
