//! Devices as a lane, and as a tier of memory: the first clusters of each bank, the hottest ones, lie there and in no
//! other region. They are uploaded once, when memory is warmed.
//!
//! Where the device's memory is the machine's, the CPU reads the same bytes, so that the border between what the device
//! computes and what the CPU does moves from pass to pass and nothing is copied. Otherwise the device computes all that it
//! holds.
//!
//! In a prompt it may compute some rows, the first ones, with all clusters (PowerInfer-2 §4.1.1): those that it does not
//! hold pass through two buffers. Clusters that the CPU cannot read it computes for the CPU's rows as well, before the
//! others: a pass reads none of them from flash.
//!
//! ```text
//! a group    bytes complete ─▶ upload ─▶ submit           the CPU's sums, as ever
//! buffers    group n + 1 ─▶ one of them                   group n is computed from the other
//! sums       stay on the device, piece by piece           one wait at the end
//! ```

mod gates;
mod groups;
mod holding;
mod passing;
mod share;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use self::gates::{BegunGates, GateProducts};
pub(crate) use self::groups::{
    ExpertSetup, GroupCounts, GroupLane, GroupTimes, GroupUnit, HeldBanks, InGroup, Queued,
};
pub(crate) use self::holding::Setup;
pub(crate) use self::passing::Wait;
use self::passing::{Passing, Piece};
pub(crate) use self::share::Sharing;
use super::{LayerRows, Rect, UnitRows, mask};
use crate::cluster::CLUSTER;
use crate::device::products::Products;
use crate::device::{
    Clusters, DeviceError, DeviceSet, Devices, Failures, NeuronRows, Part, Sums, Widths,
};
use crate::device_trials::DeviceTrials;
use crate::error::Error;
use crate::store::{Latch, Layout, NeuronStore, Outside};

/// Rows of a pass that a layer is computed for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PassRows {
    /// By the caller.
    pub own: usize,
    /// By a device, with all clusters.
    pub first: usize,
}

impl PassRows {
    /// Both.
    pub fn all(self) -> usize {
        self.own + self.first
    }
}

/// Where the neurons of a piece of work lie.
#[derive(Clone, Copy)]
enum Lies {
    /// With those of their bank that the device holds.
    Held,
    /// In a buffer, by number.
    Buffer(usize),
}

/// Clusters of a unit that a device computes, by the store's items, and the number of the unit in its layer.
#[derive(Debug, Clone)]
pub(crate) struct Each {
    /// The unit's number.
    pub unit: usize,
    /// The items.
    pub items: Range<usize>,
}

/// Devices that hold and compute clusters. Those that have failed do neither.
pub(crate) struct DeviceLane {
    layout: Arc<Layout>,
    latch: Arc<Latch>,
    set: DeviceSet,
    /// What computes gates from resident rows.
    gates: Option<Arc<Products>>,
    /// By bank: where its clusters are, and which of them were uploaded.
    parts: Vec<Option<Part>>,
    uploaded: Vec<Vec<bool>>,
    widths: Widths,
    /// Buffers that clusters pass through, of so many each.
    buffers: Option<[Part; 2]>,
    at_once: usize,
    /// The current layer, and for which rows what is outside was told; none yet after another room.
    layer: usize,
    rows: PassRows,
    /// How far the current layer has come for the rows that it computes with all clusters; what a predictor wants of them is
    /// known before [`DeviceLane::begin_pieces`].
    pub passing: Passing,
    /// Experts in groups, if it computes them so.
    groups: Option<GroupLane>,
    /// Pieces whose sums come cluster by cluster; the first of them is under way if anything is.
    each: VecDeque<Each>,
    /// A device failed in this layer: its sums are missing.
    lost: bool,
    /// Its devices compute nothing that the CPU can compute from the same bytes.
    rests: bool,
    /// Whether that is faster in decoding.
    pub trials: DeviceTrials,
    /// (neuron, row) pairs that fired, and bytes of weights that it computed with, since it was opened.
    fired: u64,
    bytes: u64,
    /// Time that its sums were waited for.
    waited: Duration,
}

impl DeviceLane {
    /// Goes on without devices that failed; the others stay.
    ///
    /// # Errors
    /// A failure, unless the CPU can go on.
    pub fn lose(&self, failures: Failures) -> Result<(), Error> {
        self.set.lose(failures)
    }

    fn is_lost(&self) -> bool {
        self.set.lost().is_some()
    }

    /// Begins a layer of a pass: what of it lies outside is computed there.
    ///
    /// # Errors
    /// A device's, unless the CPU can go on.
    pub fn begin(
        &mut self,
        layer: usize,
        rows: PassRows,
        outside: &mut Outside,
    ) -> Result<(), Error> {
        // A group that is under way is waited for when it is needed.
        if self
            .groups
            .as_ref()
            .is_none_or(|groups| !groups.is_under_way())
        {
            self.set.discard()?;
        }
        let streams = rows.first > 0;
        (outside.all_needed, outside.lost) = (streams, self.is_lost());
        self.layer = layer;
        self.each.clear();
        let same = rows.all() == self.rows.all() && streams == (self.rows.first > 0);
        if same || self.widths.0.is_empty() || outside.lost {
            return Ok(());
        }
        self.rows = rows;
        for bank in 0..self.parts.len() {
            outside.computed[bank] = match streams {
                _ if (streams || self.rests) && outside.bytes[bank].is_some() => 0,
                true => outside.prefix()[bank],
                false => self.clusters_for(outside, bank as u32, rows.all()),
            };
        }
        Ok(())
    }

    /// How many rows of a pass of `rows` rows, the first ones, it is to compute with all clusters.
    pub fn first_rows(&self, rows: usize) -> usize {
        match self.takes_all() && !self.rests {
            true => self.widths.streamed(rows),
            false => 0,
        }
    }

    /// Whether one of its devices has failed.
    pub fn has_failed(&self) -> bool {
        self.set.failure().is_some()
    }

    /// Whether it can compute all clusters for some rows of a pass.
    fn takes_all(&self) -> bool {
        self.buffers.is_some_and(|[first, _]| self.set.has(first))
    }

    /// Whether the next passes do without its devices. They compute no rows of a pass with all clusters then.
    pub fn set_rests(&mut self, rests: bool) {
        if self.rests != rests {
            // What is outside is told again.
            (self.rests, self.rows) = (rests, PassRows::default());
            (self.set.devices().iter()).for_each(|device| device.set_rests(rests));
        }
    }

    /// Most clusters that pass through a buffer at once.
    pub fn at_once(&self) -> usize {
        self.at_once.max(1)
    }

    /// Whether a device has failed in this layer, so that sums are missing; not told again.
    pub fn take_lost(&mut self) -> bool {
        std::mem::take(&mut self.lost)
    }

    /// Begins to compute its clusters for the CPU's rows, before all other sums, in pieces of `at_once` at most: `out`
    /// begins with them, once [`DeviceLane::end_pieces`] has taken the last.
    ///
    /// # Errors
    /// The device's, unless the CPU can go on; or the store's, whose reads go on meanwhile.
    pub fn begin_pieces(
        &mut self,
        of: &LayerRows<'_>,
        store: &mut NeuronStore,
        at_once: usize,
        out: &mut [f32],
    ) -> Result<(), Error> {
        if of.first.is_some() {
            let held = store.outside.holds(of.own.bank);
            self.passing.begin(held, self.passing.wanted);
        }
        let held = store.outside.computes(of.own.bank);
        for first in (0..held).step_by(at_once) {
            // Reads go on while the piece before is waited for.
            store.poll()?;
            store.advance()?;
            self.take(&mut [])?;
            let (unit, clusters) = (of.own, first..held.min(first + at_once));
            let sums = Sums::Total {
                begins: first == 0,
                ends: clusters.end == held,
            };
            self.submit(&Rect { unit, clusters }, Lies::Held, sums)?;
        }
        match of.first {
            // What follows is for other rows.
            Some(_) if held > 0 => self.take(out),
            Some(_) => Ok(()),
            None => {
                self.count_bytes(held * CLUSTER);
                Ok(())
            }
        }
    }

    /// Takes the pieces that were begun.
    ///
    /// # Errors
    /// The device's, unless the CPU can go on.
    pub fn end_pieces(&mut self, of: &LayerRows<'_>, out: &mut [f32]) -> Result<(), Error> {
        match of.first {
            Some(_) => Ok(()),
            None => self.take(out),
        }
    }

    /// Takes the sums of its own rows with all of a unit's clusters.
    ///
    /// # Errors
    /// As [`DeviceLane::end_pieces`].
    pub fn end_rows(&mut self, neurons: usize, out: &mut [f32]) -> Result<(), Error> {
        self.count_bytes(neurons);
        self.take(out)
    }

    fn count_bytes(&mut self, neurons: usize) {
        let format = &self.layout.format;
        self.bytes += (neurons * (format.gate_len() + format.rest_len())) as u64;
    }

    /// Begins a group of the CPU's clusters, which its own rows need too.
    pub fn begin_group(&mut self, of: &LayerRows<'_>, store: &NeuronStore, group: &Range<usize>) {
        if of.first.is_some() && !self.lost {
            let held = store.outside.holds(of.own.bank);
            self.passing.begin_group(held.max(group.start)..group.end);
        }
    }

    /// Uploads a cluster of the group whose bytes are complete, unless the device holds it. It is the store's item of the
    /// same number, as such layers have one unit.
    ///
    /// # Errors
    /// The device's, unless the CPU can go on; or damage of the bytes.
    pub fn pass(&mut self, store: &mut NeuronStore, cluster: usize) -> Result<(), Error> {
        let group = self.passing.group.as_ref();
        let Some(group) = group.filter(|group| group.contains(&cluster) && !self.lost) else {
            return Ok(());
        };
        let place = (cluster - group.start) * CLUSTER;
        let Some(buffers) = self.buffers.filter(|_| !self.is_lost()) else {
            self.lost = true;
            return Ok(());
        };
        let part = buffers[self.passing.buffer()];
        let upload =
            |rows: &mut dyn Iterator<Item = NeuronRows<'_>>| self.set.upload(part, place, rows);
        let uploaded = store.with_rows(cluster, upload);
        match self.latch.keep(uploaded)? {
            Some(_) => self.passing.missing -= 1,
            None => self.lost = true,
        }
        store.intact()
    }

    /// Has the device compute for its own rows what it has whole, once it is free, and waits for that as `wait` says.
    ///
    /// # Errors
    /// The device's, unless the CPU can go on.
    pub fn go_on(&mut self, of: &LayerRows<'_>, wait: Wait) -> Result<(), Error> {
        let Some(unit) = of.first else {
            return Ok(());
        };
        while let Some(piece) = self.passing.next(self.at_once()) {
            let waits = match wait {
                Wait::No => false,
                Wait::ForGroup => self.passing.group.is_some(),
                Wait::ForAll => true,
            };
            if !waits && !self.lost && !self.is_free()? {
                return Ok(());
            }
            self.take(&mut [])?;
            if self.lost {
                return Ok(());
            }
            self.submit_piece(unit, &piece)?;
            self.passing.submitted(&piece);
        }
        Ok(())
    }

    /// Begins a piece of all clusters.
    fn submit_piece(&mut self, unit: UnitRows<'_>, piece: &Piece) -> Result<(), Error> {
        let sums = Sums::Total {
            begins: !self.passing.begun,
            ends: piece.clusters.end == unit.clusters(),
        };
        let place = match piece.held {
            true => Lies::Held,
            false => Lies::Buffer(self.passing.buffer()),
        };
        let clusters = piece.clusters.clone();
        self.submit(&Rect { unit, clusters }, place, sums)
    }

    /// Leaves a piece to the device whose sums come cluster by cluster.
    pub fn leave(&mut self, each: Each) {
        self.each.push_back(each);
    }

    /// The next of these pieces to be begun or taken with [`DeviceLane::each`]; `None` if there is none, or it is under way
    /// and is not waited for.
    ///
    /// # Errors
    /// The device's, unless the CPU can go on.
    pub fn left(&mut self, waits: bool) -> Result<Option<Each>, Error> {
        if self.each.is_empty() || !waits && !self.lost && !self.is_free()? {
            return Ok(None);
        }
        if self.lost {
            self.each.clear();
        }
        Ok(self.each.front().cloned())
    }

    /// Takes the sums of that piece if it is under way, `[clusters × rows × d]`; else begins it.
    ///
    /// # Errors
    /// As [`DeviceLane::left`].
    pub fn each(&mut self, rect: &Rect<'_>, sums: &mut [f32]) -> Result<(), Error> {
        if !self.set.is_busy() {
            return self.submit(rect, Lies::Held, Sums::Each);
        }
        self.each.pop_front();
        self.count_bytes(rect.clusters.len() * CLUSTER);
        self.take(sums)
    }

    /// Whether no work is under way, or what is has ended.
    fn is_free(&mut self) -> Result<bool, Error> {
        let done = self.latch.keep(self.set.is_free())?;
        self.lost |= done.is_none();
        Ok(done.unwrap_or(true))
    }

    /// Begins to compute a rectangle. If a device has failed in this layer, its sums are missing.
    fn submit(&mut self, rect: &Rect<'_>, place: Lies, sums: Sums) -> Result<(), Error> {
        let Rect { unit, clusters } = rect;
        let part = match place {
            Lies::Held => self.parts[unit.bank as usize],
            Lies::Buffer(n) => self.buffers.map(|buffers| buffers[n]),
        };
        let Some(part) = part.filter(|_| !self.lost && !self.is_lost()) else {
            self.lost = true;
            return Ok(());
        };
        let within = match place {
            Lies::Held => clusters.clone(),
            Lies::Buffer(_) => 0..clusters.len(),
        };
        let words = mask::words(unit.input.tokens());
        let count = (clusters.end * CLUSTER).min(unit.neurons) - clusters.start * CLUSTER;
        let [gate_bias, up_bias] = unit.bias.map(|bias| of_clusters(bias, clusters));
        let work = Clusters {
            part,
            clusters: &within,
            x: unit.input.x,
            quantized: unit.input.quantized,
            mask: (unit.wanted).map(|all| &all[clusters.start * words..clusters.end * words]),
            cut: unit.cut,
            gate_bias,
            up_bias,
            end: within.start * CLUSTER + count,
            sums,
        };
        let submitted = self.set.submit(&work, self.layer);
        self.lost |= self.latch.keep(submitted)?.is_none();
        Ok(())
    }

    /// Waits for the work under way, if any is, of which `out` takes the sums.
    fn take(&mut self, out: &mut [f32]) -> Result<(), Error> {
        if self.lost {
            return Ok(());
        }
        let start = Instant::now();
        let taken = self.latch.keep(self.set.take(out))?;
        self.waited += start.elapsed();
        self.lost = taken.is_none();
        self.fired += taken.map_or(0, |taken| taken.fired);
        Ok(())
    }

    /// How many clusters of a bank it computes for `rows` rows.
    fn clusters_for(&self, outside: &Outside, bank: u32, rows: usize) -> u32 {
        let held = outside.prefix()[bank as usize];
        let wanted = self.widths.clusters(bank as usize, rows);
        match wanted.filter(|_| outside.bytes[bank as usize].is_some()) {
            Some(wanted) => held.min(wanted),
            None => held,
        }
    }

    /// How many clusters of all banks it computes in a pass of `rows` rows.
    pub fn computed_for(&self, outside: &Outside, rows: usize) -> u64 {
        let apart = |bank: &u32| {
            let layer = self.layout.layer_of(*bank);
            !self.groups.as_ref().is_some_and(|groups| groups.has(layer))
        };
        let banks = (0..self.parts.len() as u32).filter(apart);
        let banks = banks.map(|bank| u64::from(self.clusters_for(outside, bank, rows)));
        let in_groups = |groups: &GroupLane| groups.clusters_for(rows);
        banks.sum::<u64>() + self.groups.as_ref().map_or(0, in_groups)
    }

    /// Clusters that the buffers have room for.
    pub fn passing_clusters(&self) -> usize {
        self.buffers
            .map_or(0, |buffers| buffers.len() * self.at_once)
    }

    /// Time that its sums were waited for.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// (neuron, row) pairs that fired, and bytes of weights that it computed with, since it was opened.
    pub fn counted(&self) -> [u64; 2] {
        [self.fired, self.bytes]
    }

    /// The devices.
    pub fn devices(&self) -> &Devices {
        self.set.devices()
    }

    /// Why none of them is used any longer, if so.
    pub fn lost(&self) -> Option<&DeviceError> {
        self.set.lost()
    }
}

/// The biases of some clusters.
fn of_clusters<'a>(bias: &'a [f32], clusters: &Range<usize>) -> &'a [f32] {
    let end = (clusters.end * CLUSTER).min(bias.len());
    &bias[(clusters.start * CLUSTER).min(end)..end]
}
