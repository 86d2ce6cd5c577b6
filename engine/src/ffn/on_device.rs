//! The clusters of a layer that a device computes, beside those of the CPU.

use std::ops::Range;

use super::mask;
use super::pairs::Inputs;
use super::reduce::is_plain;
use super::state::Ffn;
use super::stream::of_clusters;
use crate::cluster::CLUSTER;
use crate::counters::nanoseconds;
use crate::device::{Clusters, Sums, Ticket};
use crate::error::Error;
use crate::store::StreamedFrom;
use crate::trace;

/// Work of a device that is under way.
pub(super) struct Submitted {
    ticket: Ticket,
    /// Its items.
    items: Range<usize>,
    /// Their sums come added up.
    total: bool,
    /// When, by the tracer.
    start: u64,
}

impl Ffn {
    /// Begins to compute the items of a group that are on a device. Such layers have one unit.
    pub(super) fn submit(
        &mut self,
        inputs: Inputs<'_>,
        group: &Range<usize>,
    ) -> Result<Option<Submitted>, Error> {
        let Some(of) = self.units.first() else {
            return Ok(None);
        };
        let items = group.start
            ..group
                .end
                .min(of.first + self.store.device.computes(of.bank));
        if items.is_empty() {
            return Ok(None);
        }
        let clusters = items.start - of.first..items.end - of.first;
        let words = mask::words(of.rows);
        let wanted = of.wanted(&self.pairs.wanted);
        let from = inputs.of(0);
        // Sums are added in the order of items, so a device may add its own only if they are the first.
        let total = items.start == 0 && is_plain(&inputs.at.units[0]);
        let start = self.store.tracer.now();
        let ticket = self
            .store
            .device
            .submit(StreamedFrom::Held(of.bank), |part| Clusters {
                part,
                clusters: &clusters,
                x: from.input.x,
                quantized: from.input.quantized,
                mask: wanted.map(|all| &all[clusters.start * words..clusters.end * words]),
                cut: of.gating.cut,
                gate_bias: of_clusters(from.bias.gate, &clusters),
                up_bias: of_clusters(from.bias.up, &clusters),
                end: usize::MAX,
                sums: match total {
                    true => Sums::Total {
                        begins: true,
                        ends: true,
                    },
                    false => Sums::Each,
                },
            })?;
        self.lost |= ticket.is_none();
        Ok(ticket.map(|ticket| Submitted {
            ticket,
            items,
            total,
            start,
        }))
    }

    /// Takes the sums of what was submitted, `width` floats for each item of `group`, or for all that were added up.
    pub(super) fn take(
        &mut self,
        submitted: Submitted,
        group: &Range<usize>,
        width: usize,
    ) -> Result<(), Error> {
        let Submitted {
            ticket,
            items,
            total,
            start,
        } = submitted;
        let at = items.start - group.start..items.end - group.start;
        let at = at.start..if total { at.start + 1 } else { at.end };
        let sums = &mut self.partials[at.start * width..at.end * width];
        match self.store.device.take(ticket, sums)? {
            Some(taken) => {
                self.added = if total { items.clone() } else { 0..0 };
                self.counts.fired += taken.fired;
                let values = [self.store.job.layer() as u64, items.len() as u64];
                let took = nanoseconds(taken.took);
                let tracer = &self.store.tracer;
                tracer.accelerator(&trace::DENSE, values, start, took);
            }
            None => self.lost = true,
        }
        let (neurons, format) = (items.len() * CLUSTER, &self.shape.format);
        self.counts.bytes += (neurons * (format.gate_len() + format.rest_len())) as u64;
        Ok(())
    }
}
