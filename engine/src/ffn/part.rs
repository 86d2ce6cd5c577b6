//! Units of a layer that are computed together: as many as the buffers hold.

use std::time::Duration;

use emberflow_kernels::Compute;
use emberflow_models::config::Activation;

use super::gates_ahead::GateRows;
use super::lookahead::{FEW, Upcoming};
use super::pairs::{Beside, Inputs, Unit};
use super::state::{Ffn, clusters_per_group};
use super::units::{BankWork, LayerInput};
use crate::activation::Gating;
use crate::cluster::CLUSTER;
use crate::counters::nanoseconds;
use crate::error::Error;
use crate::trace;

impl Ffn {
    /// The sum of [`Ffn::layer`], without Down's biases. What a lane computes `beside` of other rows goes to `rows`.
    pub(super) fn sum_units(
        &mut self,
        on: &Compute,
        at: &LayerInput<'_>,
        beside: Beside<'_>,
        out: &mut [f32],
        rows: &mut [f32],
    ) -> Result<(), Error> {
        let mut gathered = std::mem::take(&mut self.gathered);
        out.fill(0.0);
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
                beside,
            };
            let after = if end == at.units.len() {
                &at.then[..self.part_end(at.then, 0)]
            } else {
                &at.units[end..self.part_end(at.units, end)]
            };
            outcome = self.compute(on, inputs, after, out, rows);
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
        rows_beside: &mut [f32],
    ) -> Result<(), Error> {
        let at = inputs.at;
        let trace_layer = [at.number as u64, 0];
        self.store.tracer.section(&trace::FFN, trace_layer);
        self.begin_layer(inputs, after)?;
        let has_lane = self.lane.is_some();
        if has_lane {
            self.start_beside(on, inputs)?;
        }
        for unit in 0..self.units.len() {
            match self.units[unit].hidden {
                Some(_) => self.name_all(unit)?,
                None => self.name(on, unit, inputs.of(unit))?,
            }
        }
        self.report_recent(on, inputs);
        if after.is_empty() && inputs.beside.rows.is_none() {
            self.look_ahead(on, at)?;
        }
        let mut first_own = match has_lane {
            true => self.begin_beside(on, inputs, out)?,
            false => 0,
        };
        let mut waits = first_own > 0 && inputs.beside.rows.is_none();
        let mut next = 0;
        while next < self.units.len() {
            // Units with the same number of rows share groups.
            let rows = self.units[next].rows;
            let same = self.units[next..].iter().take_while(|u| u.rows == rows);
            let end = next + same.count();
            let items = self.units[next].first..self.units[end - 1].end;
            let width = rows * self.shape.format.d;
            let d = self.shape.format.d;
            let group = clusters_per_group(rows, d, items.len(), on.threads());
            let group = inputs
                .beside
                .rows
                .map_or(group, |(_, most)| group.min(most));
            let mut first = items.start.max(std::mem::take(&mut first_own));
            while first < items.end {
                let group = first..(first + group).min(items.end);
                first = group.end;
                self.run(on, inputs, group.clone(), width)?;
                if std::mem::take(&mut waits) {
                    self.collect_total(on, inputs, out)?;
                }
                self.store.tracer.section(&trace::REDUCE, trace_layer);
                self.reduce(on, at, group, width, out);
            }
            next = end;
        }
        if waits {
            self.collect_total(on, inputs, out)?;
        }
        if inputs.beside.rows.is_some() {
            self.collect_rows(on, inputs, rows_beside)?;
        }
        self.count_fired();
        self.store.end_layer();
        Ok(())
    }

    /// Sets up the units and the store.
    fn begin_layer(&mut self, inputs: Inputs<'_>, after: &[BankWork<'_>]) -> Result<(), Error> {
        let at = inputs.at;
        let beside = inputs.beside.rows;
        let rows = at.input.tokens() + beside.map_or(0, |(from, _)| from.input.tokens());
        let [banks, after] = [at.units, after].map(|units| units.iter().map(|unit| unit.bank));
        self.store.begin_layer(at.number, banks, after, rows)?;
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
                hidden: work.hidden,
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
        let activation = self.activations.get(layer).copied();
        activation.unwrap_or(self.shape.kind.activation)
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
        let single = at.input.tokens() == 1;
        let resident = self.store.resident_gates(bank).filter(|_| single);
        let save = resident.as_ref().map_or(Duration::ZERO, |_| save);
        let by_gates = (self.by_gates.as_mut()).and_then(|gates| gates.if_it_pays(save));
        let neurons = self.store.layout.neurons(bank);
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
        let took = match (
            &mut self.lookahead,
            &mut self.predictors,
            by_gates.zip(resident.as_deref()),
        ) {
            (Some(lookahead), Some(predictors), _) => {
                lookahead.name(on, predictors, &upcoming, &mut guess)
            }
            (_, None, Some((by_gates, resident))) => {
                let rows = GateRows {
                    resident,
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
