//! The devices' share of a layer: either their own clusters for all rows, or all clusters for the first
//! rows. See [`lanes`](crate::lanes).

use std::ops::Range;

use emberflow_kernels::Compute;

use super::pairs::{Inputs, Pairs, Unit};
use super::reduce::is_plain;
use super::state::{Ffn, clusters_per_group};
use super::units::{LayerInput, Rows};
use crate::error::Error;
use crate::lanes::{DeviceLane, Each, LayerRows, Rect, Wait};
use crate::store::Step;

/// The rows of a layer that has one unit of weight 1, split between the CPU and a device. `None` for other layers.
fn rows_of<'a>(
    units: &[Unit],
    pairs: &'a Pairs,
    inputs: Inputs<'a>,
    lane: &DeviceLane,
) -> Option<LayerRows<'a>> {
    let [of] = units else { return None };
    if !is_plain(&inputs.at.units[0]) {
        return None;
    }
    let its = |from| {
        let wanted = lane.passing.wanted.map(|_| &pairs.wanted[of.words_end()..]);
        of.rows_of(from, wanted)
    };
    Some(LayerRows {
        own: of.rows_of(inputs.of(0), of.wanted(&pairs.wanted)),
        first: inputs.streamed.map(its),
    })
}

impl Ffn {
    /// Number of leading rows of a layer for which a device computes all clusters.
    pub(super) fn first_rows(&self, at: &LayerInput<'_>) -> usize {
        let ([unit], [lane]) = (at.units, &self.lanes[..]) else {
            return 0;
        };
        let plain = matches!(unit.rows, Rows::All(_)) && unit.weights.is_none();
        // An observer of neurons needs the CPU's values of all rows.
        if plain && self.record.is_none() {
            lane.first_rows(at.input.tokens())
        } else {
            0
        }
    }

    /// Number of leading rows of a pass for which devices compute all clusters.
    pub fn rows_of_devices(&self, rows: usize) -> usize {
        self.lanes.iter().map(|lane| lane.first_rows(rows)).sum()
    }

    /// Number of items in a group: `group`, or as many as the smallest device buffer holds.
    pub(super) fn group_len(&self, inputs: Inputs<'_>, group: usize) -> usize {
        let lanes = self.lanes.iter().filter(|_| inputs.streamed.is_some());
        lanes.map(DeviceLane::at_once).fold(group, usize::min)
    }

    /// Submits the devices' clusters for the CPU's rows. Returns the CPU's first item.
    pub(super) fn begin_pieces(
        &mut self,
        on: &Compute,
        inputs: Inputs<'_>,
        out: &mut [f32],
    ) -> Result<usize, Error> {
        let mut end = 0;
        for lane in &mut self.lanes {
            if let Some(of) = rows_of(&self.units, &self.pairs, inputs, lane) {
                let (rows, clusters) = (of.own.input.tokens().max(1), of.own.clusters());
                let (d, threads) = (self.shape.format.d, on.threads());
                let at_once = clusters_per_group(rows, d, clusters, threads);
                lane.begin_pieces(&of, &mut self.store, at_once, out)?;
                end += self.store.outside.computes(of.own.bank);
            }
        }
        Ok(end)
    }

    /// Takes the results of the submitted pieces.
    pub(super) fn end_pieces(&mut self, inputs: Inputs<'_>, out: &mut [f32]) -> Result<(), Error> {
        for lane in &mut self.lanes {
            if let Some(of) = rows_of(&self.units, &self.pairs, inputs, lane) {
                lane.end_pieces(&of, out)?;
            }
        }
        Ok(())
    }

    /// Queues the clusters of a group that devices hold, for units with weights or after an earlier
    /// sum.
    pub(super) fn leave_each(&mut self, inputs: Inputs<'_>, group: &Range<usize>) {
        for lane in &mut self.lanes {
            if rows_of(&self.units, &self.pairs, inputs, lane).is_some() {
                continue;
            }
            for (unit, of) in self.units.iter().enumerate() {
                let end = of.first + self.store.outside.computes(of.bank);
                let items = group.start.max(of.first)..group.end.min(end);
                if !items.is_empty() {
                    lane.leave(Each { unit, items });
                }
            }
        }
    }

    /// Computes the queued clusters on devices, piece by piece, and stores their sums among those of the CPU's clusters,
    /// `width` floats each. With `waits`, returns when all are done; otherwise takes what is finished.
    pub(super) fn go_on_each(
        &mut self,
        inputs: Inputs<'_>,
        group: &Range<usize>,
        width: usize,
        waits: bool,
    ) -> Result<(), Error> {
        for lane in &mut self.lanes {
            while let Some(Each { unit, items }) = lane.left(waits)? {
                let at = items.start - group.start..items.end - group.start;
                let sums = &mut self.partials[at.start * width..at.end * width];
                let of = &self.units[unit];
                let clusters = items.start - of.first..items.end - of.first;
                let unit = of.rows_of(inputs.of(unit), of.wanted(&self.pairs.wanted));
                lane.each(&Rect { unit, clusters }, sums)?;
            }
        }
        Ok(())
    }

    /// Begins a group of the CPU's clusters; they are also streamed through devices for the devices' rows.
    pub(super) fn begin_group(&mut self, inputs: Inputs<'_>, group: &Range<usize>) {
        for lane in &mut self.lanes {
            if let Some(of) = rows_of(&self.units, &self.pairs, inputs, lane) {
                lane.begin_group(&of, &self.store, group);
            }
        }
    }

    /// Hands ready clusters to the devices that stream them.
    pub(super) fn pass_ready(&mut self, inputs: Inputs<'_>) -> Result<(), Error> {
        if inputs.streamed.is_none() {
            return Ok(());
        }
        for lane in &mut self.lanes {
            for &(item, step) in &self.schedule.ready {
                if step == Step::Sums {
                    lane.pass(&mut self.store, item as usize)?;
                }
            }
        }
        Ok(())
    }

    /// Computes the complete clusters on devices for the devices' rows.
    pub(super) fn go_on(&mut self, inputs: Inputs<'_>, wait: Wait) -> Result<(), Error> {
        for lane in &mut self.lanes {
            if let Some(of) = rows_of(&self.units, &self.pairs, inputs, lane) {
                lane.go_on(&of, wait)?;
            }
        }
        Ok(())
    }
}
