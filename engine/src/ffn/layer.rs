//! One layer's FFN: from units of work to their weighted sum.

use emberflow_kernels::Compute;
use emberflow_models::config::Activation;

use super::gates_ahead::GateRows;
use super::lookahead::{FEW, Upcoming};
use super::pairs::{Inputs, Unit, UnitInput};
use super::state::{Ffn, clusters_per_group};
use super::units::{BankWork, LayerInput, Rows};
use crate::activation::Gating;
use crate::cluster::CLUSTER;
use crate::counters::nanoseconds;
use crate::error::Error;
use crate::lanes::{DeviceLane, PassRows, Wait};
use crate::trace;

/// `out[row] += weight × bias` of Down for each unit and each of its rows of `d` elements.
fn add_biases(units: &[BankWork<'_>], d: usize, out: &mut [f32]) {
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
    /// A layer of which a device computes the first `rows` rows.
    fn split_by_rows(
        &mut self,
        on: &Compute,
        at: &LayerInput<'_>,
        rows: usize,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let d = self.shape.format.d;
        let (its, own) = out.split_at_mut(rows * d);
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
        let from = UnitInput {
            input: at.input.range(0, rows),
            residual: &at.residual[..rows * d],
            bias: at.units[0].bias,
        };
        let outcome = self.sum_units(on, &part, Some(from), own);
        self.recent.skip(0);
        outcome?;
        let neurons = self.units.first().map_or(0, |unit| unit.neurons);
        let all = (neurons * rows) as u64;
        self.counts.possible += all;
        for lane in &mut self.lanes {
            self.counts.looked_at += lane.passing.wanted.unwrap_or(all);
            lane.end_rows(neurons, its)?;
        }
        Ok(())
    }

    /// `out[row] = Σ weight × FFN(input[row])` over the units of the row. Units are computed in
    /// groups, so that the buffers need not hold all experts of a layer.
    pub fn layer(
        &mut self,
        on: &Compute,
        at: &LayerInput<'_>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let out = &mut out[..at.residual.len()];
        let units = self.begin_groups(at)?;
        match self.first_rows(at) {
            _ if !units.is_empty() => {
                let units = &units;
                self.sum_units(on, &LayerInput { units, ..*at }, None, out)?;
            }
            0 => self.sum_units(on, at, None, out)?,
            rows => self.split_by_rows(on, at, rows, out)?,
        }
        // A device failed during the layer and is closed: compute the layer again without it.
        while self.lanes.iter_mut().any(DeviceLane::take_lost) {
            self.sum_units(on, at, None, out)?;
        }
        add_biases(at.units, self.shape.format.d, out);
        Ok(())
    }

    /// The sum of [`Ffn::layer`], without Down's biases. A device computes the `streamed` rows at the same time.
    pub(super) fn sum_units(
        &mut self,
        on: &Compute,
        at: &LayerInput<'_>,
        streamed: Option<UnitInput<'_>>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let mut gathered = std::mem::take(&mut self.gathered);
        out.fill(0.0);
        let in_groups = at.units.iter().any(|unit| unit.group.is_some());
        let grouped = if in_groups { at.units } else { &[] };
        let mut outcome = Ok(());
        let mut first = 0;
        while first < at.units.len() && outcome.is_ok() {
            let end = self.part_end(at.units, first);
            let part = LayerInput {
                units: &at.units[first..end],
                ..*at
            };
            gathered.fill(on.cpu, &part, self.predictors.is_some());
            let inputs = Inputs {
                at: &part,
                gathered: &gathered,
                grouped,
                streamed,
            };
            let after = if end == at.units.len() {
                &at.then[..self.part_end(at.then, 0)]
            } else {
                &at.units[end..self.part_end(at.units, end)]
            };
            outcome = self.compute(on, inputs, after, out);
            first = end;
        }
        self.gathered = gathered;
        outcome
    }

    /// The end of the group of `units` that begins at `first`: as many as fit the buffers, at least
    /// one.
    fn part_end(&self, units: &[BankWork<'_>], first: usize) -> usize {
        let layout = &self.store.layout;
        let mut clusters = 0;
        let fits = |unit: &&BankWork<'_>| {
            clusters += layout.clusters(unit.bank);
            clusters <= layout.clusters_at_once()
        };
        let rest = units.get(first..).unwrap_or(&[]);
        let count = rest.iter().take_while(fits).count();
        first + count.max(1).min(rest.len())
    }

    /// Computes one group of a layer's units; `after` is the next group.
    fn compute(
        &mut self,
        on: &Compute,
        inputs: Inputs<'_>,
        after: &[BankWork<'_>],
        out: &mut [f32],
    ) -> Result<(), Error> {
        let at = inputs.at;
        let trace_layer = [at.number as u64, 0];
        self.store.tracer.section(&trace::FFN, trace_layer);
        self.begin_layer(inputs, after)?;
        self.go_on_groups(inputs, None)?;
        self.name_streamed(on, inputs);
        for unit in 0..self.units.len() {
            match self.units[unit].group {
                Some(_) => self.name_all(unit)?,
                None => self.name(on, unit, inputs.of(unit))?,
            }
        }
        self.report_recent(on, inputs);
        if after.is_empty() && inputs.streamed.is_none() {
            self.look_ahead(on, at)?;
        }
        let mut own = self.begin_pieces(on, inputs, out)?;
        let mut next = 0;
        while next < self.units.len() {
            // Units with the same number of rows share groups.
            let rows = self.units[next].rows;
            let same = self.units[next..].iter().take_while(|u| u.rows == rows);
            let end = next + same.count();
            let items = self.units[next].first..self.units[end - 1].end;
            let width = rows * self.shape.format.d;
            let d = self.shape.format.d;
            let group = clusters_per_group(rows.max(1), d, items.len(), on.threads());
            let group = self.group_len(inputs, group);
            let mut first = items.start.max(std::mem::take(&mut own));
            while first < items.end {
                let group = first..(first + group).min(items.end);
                first = group.end;
                self.run(on, inputs, group.clone(), width)?;
                self.end_pieces(inputs, out)?;
                self.store.tracer.section(&trace::REDUCE, trace_layer);
                self.reduce(on, at, group, width, out);
            }
            next = end;
        }
        self.end_pieces(inputs, out)?;
        self.go_on(inputs, Wait::ForAll)?;
        self.count_fired();
        self.store.end_layer();
        Ok(())
    }

    /// Sets up the units and the store.
    fn begin_layer(&mut self, inputs: Inputs<'_>, after: &[BankWork<'_>]) -> Result<(), Error> {
        let at = inputs.at;
        let rows = PassRows {
            own: at.input.tokens(),
            first: inputs.streamed.map_or(0, |from| from.input.tokens()),
        };
        for lane in &mut self.lanes {
            lane.begin(at.number, rows, &mut self.store.outside)?;
        }
        let [banks, after] = [at.units, after].map(|units| units.iter().map(|unit| unit.bank));
        self.store
            .begin_layer(at.number, banks, after, rows.all())?;
        self.units.clear();
        self.schedule.begin_layer();
        let (mut first, mut pairs) = (0, 0);
        for work in at.units {
            let (rows, clusters) = (work.rows.len(), self.store.layout.clusters(work.bank));
            let neurons = self.store.layout.neurons(work.bank);
            let cut = self.predictors.as_ref().map_or(0.0, |p| p.cut(work.bank));
            self.units.push(Unit {
                bank: work.bank,
                rows,
                neurons,
                first,
                end: first + clusters,
                pairs,
                named: false,
                group: work.group,
                gating: Gating {
                    activation: self.activation(at.number),
                    cut,
                    top: self.tops.of(at.number),
                },
            });
            first += clusters;
            pairs += clusters * CLUSTER * rows;
            self.counts.possible += (neurons * rows) as u64;
        }
        if let Some(record) = &mut self.record {
            record.clear(pairs);
        }
        Ok(())
    }

    /// The activation of a layer's gates.
    fn activation(&self, layer: usize) -> Activation {
        let own = self.activations.get(layer).copied();
        own.unwrap_or(self.shape.kind.activation)
    }

    /// Prefetches for the next layer. The reads queue behind this layer's misses and keep the
    /// device busy until the next layer's active set is known.
    fn look_ahead(&mut self, on: &Compute, at: &LayerInput<'_>) -> Result<(), Error> {
        if !at.ahead.is_empty() {
            return self.store.read_guessed(at.ahead);
        }
        let number = at.number + 1;
        let activation = self.activation(number);
        let mut banks = self.store.layout.banks_of(number);
        let (Some(bank), None, Some(next)) = (banks.next(), banks.next(), at.next) else {
            return Ok(());
        };
        let save = match at.input.tokens() {
            ..=FEW => self.store.guesses_save(number),
            _ => None,
        };
        let Some(save) = save else {
            return Ok(());
        };
        let upcoming = Upcoming {
            bank,
            residual: at.residual,
            norm: next.norm,
            bias: next.bias,
        };
        let (resident, neurons) = (
            self.store.residency.resident(),
            self.store.layout.neurons(bank),
        );
        let by_rows = at.input.tokens() == 1 && self.store.residency.banks.gates_resident(bank);
        let save = by_rows.then_some(save);
        let by_gates =
            (self.by_gates.as_mut()).and_then(|gates| gates.if_it_pays(save.unwrap_or_default()));
        let gating = Gating {
            activation,
            cut: 0.0,
            top: None,
        };
        let (store, mut outcome) = (&mut self.store, Ok(()));
        let mut guess = |named: &[u32]| {
            if outcome.is_ok() {
                outcome = store.guess(number, bank, named);
            }
        };
        let took = match (&mut self.lookahead, &mut self.predictors, by_gates) {
            (Some(lookahead), Some(predictors), _) => {
                lookahead.name(on, predictors, &upcoming, &mut guess)
            }
            (_, None, Some(by_gates)) => {
                let rows = GateRows {
                    resident: &resident,
                    format: self.shape.format,
                    gating,
                    neurons,
                };
                by_gates.name(on, &rows, &upcoming, &mut guess)
            }
            _ => return Ok(()),
        };
        self.counts.predict_ns += nanoseconds(took);
        outcome
    }
}
