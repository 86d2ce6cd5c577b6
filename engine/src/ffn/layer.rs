//! One layer's FFN: from units of work to their weighted sum.

use emberflow_kernels::Compute;

use super::beside::split_units;
use super::pairs::{Beside, UnitInput};
use super::state::Ffn;
use super::units::{BankWork, LayerInput, Rows};
use crate::error::Error;
use crate::lane::{ExpertTokens, Experts, HiddenRows, Share};

/// `out[row] += weight × bias` of Down for each unit and each of its rows of `d` elements.
pub(crate) fn add_down_biases(units: &[BankWork<'_>], d: usize, out: &mut [f32]) {
    for work in units.iter().filter(|work| !work.bias.down.is_empty()) {
        for (row, out) in out.chunks_exact_mut(d).enumerate() {
            let Some(place) = work.rows.place(row) else {
                continue;
            };
            let weight = work.weights.map_or(1.0, |weights| weights[place]);
            for (y, b) in out.iter_mut().zip(work.bias.down) {
                *y += weight * b;
            }
        }
    }
}

impl Ffn {
    /// `out[row] = Σ weight × FFN(input[row])` over the units of the row. Units are computed in
    /// groups, so that the buffers need not hold all experts of a layer.
    pub fn layer(
        &mut self,
        on: &Compute,
        at: &LayerInput<'_>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let out = &mut out[..at.residual.len()];
        match self.lane {
            None => self.sum_units(on, at, Beside::default(), out, &mut [])?,
            Some(_) => self.sum_beside_lane(on, at, out)?,
        }
        add_down_biases(at.units, self.shape.format.d, out);
        Ok(())
    }

    /// The sum of a layer of which a lane takes a part. After a failure the layer is computed again, without what was lost.
    pub(super) fn sum_beside_lane(
        &mut self,
        on: &Compute,
        at: &LayerInput<'_>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        loop {
            match self.offer(at)? {
                Share::Clusters => self.sum_units(on, at, Beside::default(), out, &mut [])?,
                Share::Rows { rows, group } => self.split_by_rows(on, at, [rows, group], out)?,
                Share::Hidden(parts) => self.split_by_experts(on, at, &parts, out)?,
            }
            if !self.lane.as_ref().is_some_and(|lane| lane.is_lost()) {
                return Ok(());
            }
        }
    }

    /// A layer of which a lane computes the first `rows` rows, while the CPU's clusters pass in groups.
    fn split_by_rows(
        &mut self,
        on: &Compute,
        at: &LayerInput<'_>,
        [rows, group]: [usize; 2],
        out: &mut [f32],
    ) -> Result<(), Error> {
        let d = self.shape.format.d;
        let (first, others) = out.split_at_mut(rows * d);
        let left = at.input.tokens() - rows;
        let part = LayerInput {
            units: &[BankWork {
                rows: Rows::All(left),
                ..at.units[0]
            }],
            input: at.input.range(rows, left),
            residual: &at.residual[rows * d..],
            next: None,
            ..*at
        };
        self.recent.skip(rows);
        let input = UnitInput {
            input: at.input.range(0, rows),
            residual: &at.residual[..rows * d],
            bias: at.units[0].bias,
        };
        let beside = Beside {
            rows: Some((input, group)),
            experts: None,
        };
        let outcome = self.sum_units(on, &part, beside, others, first);
        self.recent.skip(0);
        outcome?;
        let neurons = self.units.first().map_or(0, |unit| unit.neurons);
        let all = (neurons * rows) as u64;
        self.counts.possible += all;
        self.counts.looked_at += self.pairs.wanted_beside.unwrap_or(all);
        Ok(())
    }

    /// A layer of whose experts a lane computes Gate and Up of the first rows; the CPU computes the other rows, the other
    /// experts, and Down of all.
    fn split_by_experts(
        &mut self,
        on: &Compute,
        at: &LayerInput<'_>,
        parts: &[Option<HiddenRows>],
        out: &mut [f32],
    ) -> Result<(), Error> {
        let first = self.store.layout.banks_of(at.number).start;
        let expert = |unit: &BankWork<'_>| (unit.bank - first) as usize;
        let part = |unit: &BankWork<'_>| parts.get(expert(unit)).copied().flatten();
        let units = split_units(at.units, part);
        let begun = units.iter().filter(|unit| unit.hidden.is_some());
        let begun = begun.map(|unit| ExpertTokens {
            expert: expert(unit),
            bank: unit.bank,
            tokens: unit.rows.picked(),
            bias: [unit.bias.gate, unit.bias.up],
        });
        let begun: Vec<ExpertTokens<'_>> = begun.collect();
        let beside = Beside {
            rows: None,
            experts: Some(Experts {
                input: at.input,
                each: &begun,
            }),
        };
        let units = &units;
        self.sum_units(on, &LayerInput { units, ..*at }, beside, out, &mut [])
    }
}
