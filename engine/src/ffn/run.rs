//! The loop that computes partial sums from ready clusters, in completion order. It makes no
//! decisions: `store` decides what to read, `sums.rs` what to compute.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use arrayvec::ArrayVec;
use emberflow_kernels::Compute;

use super::gates::GateWork;
use super::mask;
use super::pairs::{Inputs, UnitInput};
use super::recent;
use super::schedule::FEW;
use super::state::Ffn;
use super::sums::Job;
use crate::cluster::CLUSTER;
use crate::error::Error;
use crate::store::Step;

/// Clusters per thread that are computed at once in a scan. Then their buffers are free for further
/// reads: if all clusters that have arrived were computed first, the device would be idle.
pub(crate) const SLICE: usize = 2;

impl Ffn {
    /// Fills the partial sums of a group of items, `width` floats each, in completion order. All
    /// units of the group have the same number of rows.
    pub(super) fn run(
        &mut self,
        on: &Compute,
        inputs: Inputs<'_>,
        group: Range<usize>,
        width: usize,
    ) -> Result<(), Error> {
        let has_lane = self.lane.is_some();
        if has_lane {
            self.begin_items(on, inputs, &group)?;
        }
        let is_summed = |&item: &usize| self.store.is_summed(item);
        let mut open = group.clone().filter(is_summed).count();
        let few = (SLICE * on.threads()).min(FEW);
        let mut begun = false;
        while open > 0 {
            self.store.poll()?;
            self.store.advance()?;
            if has_lane {
                self.collect_items(on, inputs, &group, width, false)?;
            }
            // Without the cluster pipeline, reads must complete first.
            if self.store.must_wait(begun) {
                self.store.wait()?;
                continue;
            }
            begun = true;
            (self.store).take_ready(group.end, few, &mut self.schedule.ready);
            if self.schedule.ready.is_empty() {
                // Idle: release slots now.
                if !self.release_done(inputs) {
                    self.store.wait()?;
                }
                continue;
            }
            self.schedule.now[group.clone()].fill(None);
            for &(item, step) in &self.schedule.ready {
                self.schedule.now[item as usize] = Some(step);
            }
            self.compute_gates(on, inputs, group.clone());
            if has_lane {
                self.pass_ready(on, inputs)?;
            }
            self.reserve_copies(inputs);
            self.compute_sums(on, inputs, group.clone(), width);
            self.settle_copies()?;
            open -= self.settle()?;
            if self.store.wants_memory() {
                self.release_done(inputs);
            }
        }
        match has_lane {
            true => self.collect_items(on, inputs, &group, width, true),
            false => Ok(()),
        }
    }

    /// The values of a group's (neuron, row) pairs.
    fn values_of(&self, group: &Range<usize>) -> Range<usize> {
        let unit = self.units.partition_point(|unit| unit.first <= group.start) - 1;
        let first = &self.units[unit];
        let unit_len = CLUSTER * first.rows;
        let start = first.pairs + (group.start - first.first) * unit_len;
        start..start + group.len() * unit_len
    }

    /// Computes the gates of items whose Gate parts have arrived.
    fn compute_gates(&mut self, on: &Compute, inputs: Inputs<'_>, group: Range<usize>) {
        if self.schedule.ready.iter().all(|r| r.1 != Step::Gates) {
            return;
        }
        let values = self.values_of(&group);
        let (units, store, now) = (&self.units, &self.store, &self.schedule.now);
        let (format, wanted) = (self.shape.format, &self.pairs.wanted);
        let cutoffs = self.cutoffs.as_slice();
        let unit_of = |item: usize| units.partition_point(|unit| unit.first <= item) - 1;
        let first = &units[unit_of(group.start)];
        let unit_len = CLUSTER * first.rows;
        let gates = &mut self.pairs.gates[values];
        on.workers
            .for_each_chunk_mut(gates, unit_len, &|_, at, gates| {
                let item = group.start + at;
                if now[item] != Some(Step::Gates) {
                    return;
                }
                let unit = unit_of(item);
                let (work_unit, words) = (&units[unit], mask::words(first.rows));
                let wanted = work_unit.wanted(wanted);
                let UnitInput { input, bias, .. } = inputs.of(unit);
                let work = GateWork {
                    cpu: on.cpu,
                    format,
                    gating: work_unit.gating,
                    input,
                    bias: bias.gate,
                    cutoffs,
                };
                let cluster = item - work_unit.first;
                let wanted = wanted.map(|wanted| &wanted[cluster * words..][..words]);
                work.of_bundles(&store.cluster(item), wanted, gates);
            });
    }

    /// Computes the sums of items whose bytes are complete.
    fn compute_sums(
        &mut self,
        on: &Compute,
        inputs: Inputs<'_>,
        group: Range<usize>,
        width: usize,
    ) {
        if self.schedule.ready.iter().all(|r| r.1 != Step::Sums) {
            return;
        }
        let values = self.values_of(&group);
        let (fired, computed) = (AtomicU64::new(0), AtomicU64::new(0));
        let (units, now, pairs) = (&self.units, &self.schedule.now, &self.pairs);
        let (shape, store, cutoffs) = (&self.shape, &self.store, self.cutoffs.as_slice());
        let unit_of = |item: usize| units.partition_point(|unit| unit.first <= item) - 1;
        let lane = self.lane.as_ref();
        let known = lane.map_or(&[][..], |lane| lane.hidden());
        let (rows, record) = (units[unit_of(group.start)].rows, self.record.as_mut());
        let records = record.map_or_else(Vec::new, |record| record.clusters(values, rows));
        let is_ready = |&item: &usize| now[item] == Some(Step::Sums);
        let sum = |from: usize, partials: &mut [f32]| {
            let (mut item, end) = (from, from + partials.len() / width);
            while item < end {
                let (unit, work_unit) = (unit_of(item), &units[unit_of(item)]);
                let stop = end.min(work_unit.end);
                let input = inputs.of(unit);
                let job = Job {
                    cpu: on.cpu,
                    shape,
                    gating: work_unit.gating,
                    cutoffs,
                    store,
                    input: input.input,
                    bias: input.bias,
                    gates: work_unit.gates(&pairs.gates),
                    wanted: work_unit.wanted(&pairs.wanted),
                    hidden: work_unit.hidden.and_then(|part| {
                        known
                            .get(part.first..)?
                            .get(..part.tokens * work_unit.neurons)
                    }),
                };
                let records = records.get(from - group.start..).unwrap_or(&[]);
                let done = job.sum(from, (item..stop).filter(is_ready), partials, records);
                fired.fetch_add(done.fired, Ordering::Relaxed);
                computed.fetch_add(done.neurons, Ordering::Relaxed);
                item = stop;
            }
        };
        let partials = &mut self.partials[..group.len() * width];
        if store.streams() {
            let each = (group.clone()).zip(partials.chunks_exact_mut(width));
            let mut copies = self.schedule.copies.iter_mut().peekable();
            let mut few: ArrayVec<_, FEW> = (each.filter(|(item, _)| is_ready(item)))
                .map(|(item, partial)| (item, partial, copies.next_if(|copy| copy.0 == item)))
                .take(FEW)
                .collect();
            on.workers.for_each_chunk_mut(&mut few, 1, &|_, _, one| {
                for (item, partial, copy) in one {
                    sum(*item, partial);
                    if let Some((_, slot)) = copy {
                        store.cluster(*item).keep(slot);
                    }
                }
            });
        } else {
            // Several items per call make longer row lists.
            on.workers
                .for_each_part_mut(partials, width, &|_, at, partials| {
                    sum(group.start + at, partials);
                });
        }
        self.counts.fired += fired.into_inner();
        self.counts.bytes += computed.into_inner() * self.shape.format.rest_len() as u64;
    }

    /// Reserves slots for streamed items that are about to be computed and become resident.
    fn reserve_copies(&mut self, inputs: Inputs<'_>) {
        if !self.store.streams() {
            return;
        }
        for &(item, step) in &self.schedule.ready {
            let item = item as usize;
            let unit = self.units.partition_point(|unit| unit.first <= item) - 1;
            let again = self.recent.visits(inputs.at.units[unit].rows);
            if step == Step::Sums
                && let Some(slot) = self.store.reserve_hot(item, again)
            {
                self.schedule.copies.push((item, slot));
            }
        }
        (self.schedule.copies).sort_unstable_by_key(|copy| copy.0);
    }

    /// Makes the copied neurons resident unless any of them is damaged.
    fn settle_copies(&mut self) -> Result<(), Error> {
        for (item, slot) in self.schedule.copies.drain(..) {
            self.store.settle_hot(item, slot);
        }
        self.store.intact()
    }

    /// Advances the ready items: summed items are done, items with new gates request Up and Down of
    /// the neurons that fire. Returns the number of items done.
    fn settle(&mut self) -> Result<usize, Error> {
        let before = self.schedule.done.len();
        for &(item, step) in &self.schedule.ready {
            if step == Step::Sums {
                self.schedule.done.push(item);
                continue;
            }
            let number = self.units.partition_point(|u| u.first <= item as usize) - 1;
            let unit = &self.units[number];
            let (gates, rows) = (unit.gates(&self.pairs.gates), unit.rows);
            let gates_of = |neuron: u32| &gates[neuron as usize * rows..][..rows];
            let ids = self.store.cluster(item as usize).ids();
            let pairs = ids.iter().flat_map(|&neuron| gates_of(neuron));
            self.counts.fired += pairs.filter(|&&g| g != 0.0).count() as u64;
            let fires = |neuron: u32| gates_of(neuron).iter().any(|&g| g != 0.0);
            self.store.resolve(item, fires)?;
        }
        Ok(self.schedule.done.len() - before)
    }

    /// Releases the bytes of computed items; false when there are none.
    fn release_done(&mut self, inputs: Inputs<'_>) -> bool {
        let done = recent::Done {
            items: &mut self.schedule.done,
            units: &self.units,
            work: inputs.at.units,
            pairs: &self.pairs,
            recent: &self.recent,
        };
        done.release(&mut self.store)
    }
}
