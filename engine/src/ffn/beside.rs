//! What devices compute of a layer, beside the compute threads: their clusters for all rows, or all clusters for the
//! first rows. See [`lanes`](crate::lanes).

use std::ops::Range;

use emberflow_kernels::Compute;

use super::pairs::{Inputs, Pairs, Unit};
use super::reduce::is_plain;
use super::state::{Ffn, clusters_per_group};
use super::units::{LayerInput, Rows};
use crate::error::Error;
use crate::lanes::{DeviceLane, Each, LayerRows, Rect, Wait};
use crate::store::Step;

/// The rows of a layer of one unit that weighs 1, for a device that computes some of its clusters, or all for some rows.
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
        let wanted = lane.wanted().map(|_| &pairs.wanted[of.words_end()..]);
        of.rows_of(from, wanted)
    };
    Some(LayerRows {
        own: of.rows_of(inputs.of(0), of.wanted(&pairs.wanted)),
        first: inputs.streamed.map(its),
    })
}

impl Ffn {
    /// How many of a layer's rows, the first ones, a device computes with all clusters.
    pub(super) fn first_rows(&self, at: &LayerInput<'_>) -> usize {
        let ([unit], [lane]) = (at.units, &self.lanes[..]) else {
            return 0;
        };
        let plain = matches!(unit.rows, Rows::All(_)) && unit.weights.is_none();
        // Who observes neurons looks at all rows.
        match plain && self.record.is_none() {
            true => lane.first_rows(at.input.tokens()),
            false => 0,
        }
    }

    /// How many of a pass's rows, the first ones, devices compute with all clusters.
    pub fn rows_of_devices(&self, rows: usize) -> usize {
        self.lanes.iter().map(|lane| lane.first_rows(rows)).sum()
    }

    /// The number of items of a group, of `group` at most: no more than a buffer has room for.
    pub(super) fn group_len(&self, inputs: Inputs<'_>, group: usize) -> usize {
        let lanes = self.lanes.iter().filter(|_| inputs.streamed.is_some());
        lanes.map(DeviceLane::at_once).fold(group, usize::min)
    }

    /// Begins what devices compute of their clusters for the CPU's rows. The first item of the CPU.
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

    /// Takes what pieces began and still is under way.
    pub(super) fn end_pieces(&mut self, inputs: Inputs<'_>, out: &mut [f32]) -> Result<(), Error> {
        for lane in &mut self.lanes {
            if let Some(of) = rows_of(&self.units, &self.pairs, inputs, lane) {
                lane.end_pieces(&of, out)?;
            }
        }
        Ok(())
    }

    /// Leaves those clusters of a group to devices that they hold, whose sums are weighed or come after others.
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

    /// Has devices compute what was left to them, one piece after the other, and puts its sums where those of the CPU's
    /// clusters are, `width` floats each. It waits for all if it `waits`, else for none.
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

    /// Begins a group of the CPU's clusters, which pass through devices for their rows.
    pub(super) fn begin_group(&mut self, inputs: Inputs<'_>, group: &Range<usize>) {
        for lane in &mut self.lanes {
            if let Some(of) = rows_of(&self.units, &self.pairs, inputs, lane) {
                lane.begin_group(&of, &self.store, group);
            }
        }
    }

    /// Has devices take those of the ready clusters that pass through them.
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

    /// Has devices compute what they have whole for their rows.
    pub(super) fn go_on(&mut self, inputs: Inputs<'_>, wait: Wait) -> Result<(), Error> {
        for lane in &mut self.lanes {
            if let Some(of) = rows_of(&self.units, &self.pairs, inputs, lane) {
                lane.go_on(&of, wait)?;
            }
        }
        Ok(())
    }
}
