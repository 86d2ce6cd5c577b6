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
//! the device holds are computed where they are. Where the CPU cannot read them, the device computes them for the CPU's
//! rows as well, before the others: a pass reads none of them from flash.

use std::ops::Range;

use emberflow_kernels::Compute;

use super::mask;
use super::pairs::Inputs;
use super::reduce::is_plain;
use super::state::{Ffn, clusters_per_group};
use super::streaming::{Piece, Underway, Wait};
use super::units::{LayerInput, Rows};
use crate::cluster::CLUSTER;
use crate::counters::nanoseconds;
use crate::device::{Clusters, Sums};
use crate::error::Error;
use crate::store::{Step, StreamedFrom};
use crate::trace;

/// Whose rows a piece of work is for.
#[derive(Clone, Copy)]
enum Whose {
    Device,
    Cpu,
}

impl Ffn {
    /// How many of a layer's rows, the first ones, a device computes with all clusters.
    pub(super) fn streamed_rows(&self, at: &LayerInput<'_>) -> usize {
        let [unit] = at.units else { return 0 };
        let plain = matches!(unit.rows, Rows::All(_)) && unit.weights.is_none();
        // Who observes neurons looks at all rows.
        match plain && self.record.is_none() {
            true => self.store.device.streamed_rows(at.input.tokens()),
            false => 0,
        }
    }

    /// The first item of a unit that is computed in groups: what a device computes in pieces comes before.
    pub(super) fn first_own(&self, inputs: Inputs<'_>, group: usize) -> usize {
        match self.units.first() {
            Some(of) if self.has_pieces(inputs, group) => {
                of.first + self.store.device.computes(of.bank)
            }
            _ => 0,
        }
    }

    /// Whether a device computes its clusters in pieces, before all groups of so many items: always beside streams, and
    /// where one group does not hold them, since sums of later groups would come cluster by cluster.
    fn has_pieces(&self, inputs: Inputs<'_>, group: usize) -> bool {
        let ([of], [work]) = (&self.units[..], inputs.at.units) else {
            return false;
        };
        let held = self.store.device.computes(of.bank);
        inputs.streamed.is_some() || held > group && is_plain(work)
    }

    /// The number of items of a group, of `group` at most: no more than a buffer has room for.
    pub(super) fn group_len(&self, inputs: Inputs<'_>, group: usize) -> usize {
        match inputs.streamed {
            None => group,
            Some(_) => group.min(self.store.device.streamed_at_once()),
        }
    }

    /// Begins the pieces of a layer. The device computes its clusters for the CPU's rows as well, before all other sums:
    /// `out` begins with them, once [`Ffn::end_pieces`] has taken the last.
    pub(super) fn begin_pieces(
        &mut self,
        on: &Compute,
        inputs: Inputs<'_>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let Some(&of) = self.units.first() else {
            return Ok(());
        };
        if inputs.streamed.is_some() {
            let held = self.store.device.holds(of.bank);
            self.streaming.begin(held, self.streaming.wanted);
        }
        let (d, clusters) = (self.shape.format.d, of.end - of.first);
        let at_once = clusters_per_group(of.rows.max(1), d, clusters, on.threads());
        let held = self.store.device.computes(of.bank);
        if held == 0 || !self.has_pieces(inputs, at_once) {
            return Ok(());
        }
        for first in (0..held).step_by(at_once) {
            // Reads go on while the piece before is waited for.
            self.store.poll()?;
            self.store.advance()?;
            self.take_streamed(&mut [])?;
            let piece = Piece {
                clusters: first..held.min(first + at_once),
                held: true,
            };
            let sums = Sums::Total {
                begins: first == 0,
                ends: piece.clusters.end == held,
            };
            self.streaming.underway = self.submit_piece(inputs, &piece, Whose::Cpu, sums)?;
        }
        // What follows is for other rows.
        if inputs.streamed.is_some() {
            return self.take_streamed(out);
        }
        let format = &self.shape.format;
        let neuron = format.gate_len() + format.rest_len();
        self.counts.bytes += (held * CLUSTER * neuron) as u64;
        Ok(())
    }

    /// Takes what pieces began and still is under way.
    pub(super) fn end_pieces(&mut self, inputs: Inputs<'_>, out: &mut [f32]) -> Result<(), Error> {
        match inputs.streamed {
            Some(_) => Ok(()),
            None => self.take_streamed(out),
        }
    }

    /// Begins a group.
    pub(super) fn begin_streamed(&mut self, inputs: Inputs<'_>, group: &Range<usize>) {
        if inputs.streamed.is_none() || self.lost {
            return;
        }
        let of = &self.units[0];
        let held = self.store.device.holds(of.bank);
        let clusters = held.max(group.start - of.first)..group.end - of.first;
        self.streaming.groups += 1;
        self.streaming.missing = clusters.len();
        self.streaming.group = Some(clusters).filter(|clusters| !clusters.is_empty());
    }

    /// Uploads ready clusters of a group that the device does not hold.
    pub(super) fn upload_streamed(&mut self, inputs: Inputs<'_>) -> Result<(), Error> {
        let (Some(_), Some(clusters)) = (inputs.streamed, self.streaming.group.clone()) else {
            return Ok(());
        };
        let (first, buffer) = (self.units[0].first, self.streaming.buffer());
        for &(item, step) in &self.schedule.ready {
            let cluster = item as usize - first;
            if step != Step::Sums || !clusters.contains(&cluster) || self.lost {
                continue;
            }
            let place = cluster - clusters.start;
            match self.store.upload_streamed(item as usize, buffer, place)? {
                true => self.streaming.missing -= 1,
                false => self.lost = true,
            }
        }
        Ok(())
    }

    /// Has the device compute what it has whole, once it is free, and waits for that as `wait` says.
    pub(super) fn submit_streamed(&mut self, inputs: Inputs<'_>, wait: Wait) -> Result<(), Error> {
        if inputs.streamed.is_none() {
            return Ok(());
        }
        while let Some(piece) = self.streaming.next(self.store.device.streamed_at_once()) {
            let waits = match wait {
                Wait::No => false,
                Wait::ForGroup => self.streaming.group.is_some(),
                Wait::ForAll => true,
            };
            let ticket = (self.streaming.underway.as_ref()).map(|underway| underway.ticket);
            if let (Some(ticket), false, false) = (ticket, waits, self.lost) {
                match self.store.device.is_done(ticket)? {
                    Some(true) => {}
                    Some(false) => return Ok(()),
                    None => self.lost = true,
                }
            }
            self.take_streamed(&mut [])?;
            if self.lost {
                return Ok(());
            }
            let sums = Sums::Total {
                begins: !self.streaming.begun,
                ends: piece.clusters.end == self.units[0].end - self.units[0].first,
            };
            self.streaming.underway = self.submit_piece(inputs, &piece, Whose::Device, sums)?;
            self.streaming.submitted(&piece);
        }
        Ok(())
    }

    /// Has the device begin a piece of a layer for some rows. `None` if it has failed.
    fn submit_piece(
        &mut self,
        inputs: Inputs<'_>,
        piece: &Piece,
        rows: Whose,
        sums: Sums,
    ) -> Result<Option<Underway>, Error> {
        let (of, clusters) = (self.units[0], &piece.clusters);
        let (input, wanted) = match (rows, inputs.streamed) {
            (Whose::Device, Some(from)) => {
                let named = self.streaming.wanted.is_some();
                let its = &self.pairs.wanted[of.words_end()..];
                (from.input, named.then_some(its))
            }
            _ => (inputs.of(0).input, of.wanted(&self.pairs.wanted)),
        };
        let words = mask::words(input.tokens());
        let mask = wanted.map(|all| &all[clusters.start * words..clusters.end * words]);
        let (from, within) = match piece.held {
            true => (StreamedFrom::Held(of.bank), clusters.clone()),
            false => (
                StreamedFrom::Buffer(self.streaming.buffer()),
                0..clusters.len(),
            ),
        };
        let count = (clusters.end * CLUSTER).min(of.neurons) - clusters.start * CLUSTER;
        let end = within.start * CLUSTER + count;
        let bias = inputs.at.units[0].bias;
        let start = self.store.tracer.now();
        let ticket = self.store.device.submit(from, |part| Clusters {
            part,
            clusters: &within,
            x: input.x,
            quantized: input.quantized,
            mask,
            cut: of.gating.cut,
            gate_bias: of_clusters(bias.gate, clusters),
            up_bias: of_clusters(bias.up, clusters),
            end,
            sums,
        })?;
        self.lost |= ticket.is_none();
        Ok(ticket.map(|ticket| Underway {
            ticket,
            clusters: clusters.len(),
            start,
        }))
    }

    /// Waits for the group under way, of which `out` takes the sums if it is the last.
    pub(super) fn take_streamed(&mut self, out: &mut [f32]) -> Result<(), Error> {
        let Some(underway) = self.streaming.underway.take().filter(|_| !self.lost) else {
            return Ok(());
        };
        let Some(taken) = self.store.device.take(underway.ticket, out)? else {
            self.lost = true;
            return Ok(());
        };
        self.counts.fired += taken.fired;
        let values = [self.store.job.layer() as u64, underway.clusters as u64];
        let took = nanoseconds(taken.took);
        let tracer = &self.store.tracer;
        tracer.accelerator(&trace::DENSE, values, underway.start, took);
        Ok(())
    }
}

/// The biases of some clusters.
pub(super) fn of_clusters<'a>(bias: &'a [f32], clusters: &Range<usize>) -> &'a [f32] {
    let end = (clusters.end * CLUSTER).min(bias.len());
    &bias[(clusters.start * CLUSTER).min(end)..end]
}
