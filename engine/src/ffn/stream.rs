//! Rows of a prompt that a device computes with all clusters of a layer: what it does not hold passes through two
//! buffers of its memory (PowerInfer-2 §4.1.1).
//!
//! ```text
//! rows of a pass   │ the device's, the first ones              │ the CPU's │
//! a group          bytes complete ─▶ upload ─▶ submit           sums, as ever
//! buffers          group n + 1 ─▶ one of them                   group n is computed from the other
//! sums             stay on the device, group by group           one wait at the end of the layer
//! ```
//!
//! A row's sums are added cluster by cluster, whoever does it, so that no bit depends on the division. Clusters that
//! the device holds are computed where they are.

use std::ops::Range;

use emberflow_kernels::Compute;

use super::pairs::Inputs;
use super::state::Ffn;
use super::streaming::{Streaming, Underway};
use super::units::{BankWork, LayerInput, Rows};
use crate::counters::nanoseconds;
use crate::device::{Sums, Work};
use crate::error::Error;
use crate::store::regions::CLUSTER;
use crate::store::{Step, StreamedFrom};
use crate::trace;

impl Ffn {
    /// How many of a layer's rows, the first ones, a device computes with all clusters.
    pub(super) fn streamed_rows(&self, at: &LayerInput<'_>) -> usize {
        let [unit] = at.units else { return 0 };
        let plain = matches!(unit.rows, Rows::All(_)) && unit.weights.is_none();
        // Who names neurons or observes them looks at all rows.
        let seen = self.predictors.is_some() || self.record.is_some();
        match plain && !seen {
            true => self.store.streamed_rows(at.input.tokens()),
            false => 0,
        }
    }

    /// A layer of which a device computes the first `rows` rows.
    pub(super) fn beside_streams(
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
        self.streaming = Streaming::default();
        self.recent.skip(rows);
        let outcome = self.sum_units(on, &part, Some(at.input.range(0, rows)), own);
        self.recent.skip(0);
        outcome?;
        self.take_streamed(its)?;
        let neurons = self.units.first().map_or(0, |unit| unit.neurons);
        let format = &self.shape.format;
        self.counts.looked_at += (neurons * rows) as u64;
        self.counts.possible += (neurons * rows) as u64;
        self.counts.bytes += (neurons * (format.gate_len() + format.rest_len())) as u64;
        Ok(())
    }

    /// The end of the group from item `first` on, of `group` items at most: what a device holds apart from the
    /// rest, and no more than a buffer has room for.
    pub(super) fn group_end(&self, inputs: Inputs<'_>, first: usize, group: usize) -> usize {
        let of = &self.units[0];
        let held = of.first + self.store.held_on_device(of.bank);
        match inputs.streamed {
            None => first + group,
            Some(_) if first < held => (first + group.min(self.store.streamed_at_once())).min(held),
            Some(_) => first + group.min(self.store.streamed_at_once()),
        }
    }

    /// Begins a group.
    pub(super) fn begin_streamed(&mut self, inputs: Inputs<'_>, group: &Range<usize>) {
        if inputs.streamed.is_none() || self.lost {
            return;
        }
        let of = &self.units[0];
        let held = group.start < of.first + self.store.held_on_device(of.bank);
        self.streaming.groups += 1;
        self.streaming.missing = if held { 0 } else { group.len() };
        self.streaming.submitted = false;
    }

    /// Uploads ready clusters of a group that the device does not hold.
    pub(super) fn upload_streamed(
        &mut self,
        inputs: Inputs<'_>,
        group: &Range<usize>,
    ) -> Result<(), Error> {
        if inputs.streamed.is_none() || self.streaming.missing == 0 || self.lost {
            return Ok(());
        }
        let buffer = self.streaming.groups % 2;
        for &(item, step) in &self.schedule.ready {
            if step != Step::Sums {
                continue;
            }
            let place = item as usize - group.start;
            match self.store.upload_streamed(item as usize, buffer, place)? {
                true => self.streaming.missing -= 1,
                false => {
                    self.lost = true;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Has the device compute a group that it has whole, once it is free: waits for that if it `must`.
    pub(super) fn submit_streamed(
        &mut self,
        inputs: Inputs<'_>,
        group: &Range<usize>,
        must: bool,
    ) -> Result<(), Error> {
        let state = &self.streaming;
        let Some(input) = inputs.streamed else {
            return Ok(());
        };
        if state.submitted || state.missing > 0 || self.lost {
            return Ok(());
        }
        let ticket = state.underway.as_ref().map(|underway| underway.ticket);
        if let (Some(ticket), false) = (ticket, must) {
            match self.store.is_done(ticket)? {
                Some(true) => {}
                Some(false) => return Ok(()),
                None => self.lost = true,
            }
        }
        self.take_streamed(&mut [])?;
        if self.lost {
            return Ok(());
        }
        let of = self.units[0];
        let clusters = group.start - of.first..group.end - of.first;
        let held = clusters.start < self.store.held_on_device(of.bank);
        let (from, within) = match held {
            true => (StreamedFrom::Held(of.bank), clusters.clone()),
            false => (
                StreamedFrom::Buffer(self.streaming.groups % 2),
                0..group.len(),
            ),
        };
        let count = (clusters.end * CLUSTER).min(of.neurons) - clusters.start * CLUSTER;
        let end = within.start * CLUSTER + count;
        let bias = inputs.at.units[0].bias;
        let start = self.store.tracer().now();
        let ticket = self.store.submit_streamed(from, |part| Work {
            part,
            clusters: &within,
            x: input.x,
            quantized: input.quantized,
            mask: None,
            cut: of.gating.cut,
            gate_bias: of_clusters(bias.gate, &clusters),
            up_bias: of_clusters(bias.up, &clusters),
            end,
            sums: Sums::Total {
                begins: group.start == of.first,
                ends: group.end == of.end,
            },
        })?;
        self.lost |= ticket.is_none();
        self.streaming.submitted = true;
        self.streaming.underway = ticket.map(|ticket| Underway {
            ticket,
            clusters: group.len(),
            start,
        });
        Ok(())
    }

    /// Waits for the group under way, of which `out` takes the sums if it is the last.
    fn take_streamed(&mut self, out: &mut [f32]) -> Result<(), Error> {
        let Some(underway) = self.streaming.underway.take().filter(|_| !self.lost) else {
            return Ok(());
        };
        let Some(taken) = self.store.take_sums(underway.ticket, out)? else {
            self.lost = true;
            return Ok(());
        };
        self.counts.fired += taken.fired;
        let values = [self.store.layer_number() as u64, underway.clusters as u64];
        let took = nanoseconds(taken.took);
        let tracer = self.store.tracer();
        tracer.accelerator(&trace::DENSE, values, underway.start, took);
        Ok(())
    }
}

/// The biases of some clusters.
pub(super) fn of_clusters<'a>(bias: &'a [f32], clusters: &Range<usize>) -> &'a [f32] {
    let end = (clusters.end * CLUSTER).min(bias.len());
    &bias[(clusters.start * CLUSTER).min(end)..end]
}
