//! Devices as a lane: their share of a layer, and the path from an offer to its sums.
//!
//! ```text
//! offer     ▶ a strategy    first clusters   those that are held: their total, or the sum of each
//!                           first rows       all clusters: those that are held, and others through two buffers
//!                           experts          Gate and Up of experts in groups of one capacity
//! begin     ▶ pieces of work, queued       arrived ▶ bytes for a buffer
//! collect   ▶ takes the piece under way once it is done and wanted, and submits the next one
//! ```
//!
//! Clusters are uploaded once, when memory is filled. If the devices' memory is the machine's, the CPU reads the same bytes, so
//! the border between what devices and CPU compute moves from pass to pass and nothing is copied. Otherwise devices compute all
//! that they hold, for the CPU's rows too. One piece of work is under way at a time.

mod group_work;
mod groups;
mod holding;
mod passing;
mod report;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use emberflow_engine::Error;
use emberflow_engine::lane::{
    Banks, CLUSTER, Collect, Hold, HostMatrix, Lane, LaneFacts, LanePass, LaneReport, NeuronRows,
    Offer, Outside, ProductRoom, Reported, Room, Share, Sharing, UnitRows, Widths, Work,
};
use emberflow_opencl::Sums;

use self::groups::Queued;
pub(crate) use self::groups::{GroupCounts, GroupLane};
use self::passing::Passing;
pub use self::report::{Computed, DeviceReport, DeviceWork, ExpertWork, Streamed, device_report};
use crate::backend::{Clusters, DenseShape, token_bytes};
use crate::check::Verdicts;
use crate::device_set::DeviceSet;
use crate::experts::MOST_EXPERTS;
use crate::in_use::Devices;
use crate::loads::ExpertModel;
use crate::part::Part;
use crate::products::SharedProducts;
use crate::sharing::Sharer;
use crate::trials::DeviceTrials;

/// Rows of a pass: those of the CPU, and the leading ones that devices compute with all clusters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct PassRows {
    own: usize,
    first: usize,
}

impl PassRows {
    fn all(self) -> usize {
        self.own + self.first
    }
}

/// Where the neurons of a piece of work are.
#[derive(Clone, Copy)]
enum Place {
    /// With those of their bank that devices hold.
    Held,
    /// In a stream buffer, by number.
    Buffer(usize),
}

/// A piece of a layer's work.
#[derive(Debug, Clone)]
enum Piece {
    /// Clusters of the only unit, added to a total that begins or ends with them.
    Total { clusters: Range<usize>, ends: bool },
    /// Clusters of a unit, each with its sum; their first item.
    Each {
        unit: usize,
        clusters: Range<usize>,
        item: usize,
    },
    /// Clusters for the devices' rows, added to their total.
    Rows {
        clusters: Range<usize>,
        held: bool,
        ends: bool,
    },
    /// A group of experts.
    Group(Queued),
}

/// Devices that hold and compute clusters. Those that have failed do neither.
pub(crate) struct DeviceLane {
    facts: LaneFacts,
    banks: Arc<Banks>,
    shape: DenseShape,
    experts: Option<ExpertModel>,
    set: DeviceSet,
    /// Products of matrices, and those of Gate rows.
    products: Vec<Arc<SharedProducts>>,
    gates: Option<Arc<SharedProducts>>,
    /// By bank: where its clusters are, and which of them were uploaded.
    parts: Vec<Option<Part>>,
    uploaded: Vec<Vec<bool>>,
    widths: Widths,
    /// Stream buffers, of `at_once` clusters each.
    buffers: Option<[Part; 2]>,
    at_once: usize,
    /// The current layer, and the rows for which `Outside` was last set; none after another room.
    layer: usize,
    rows: PassRows,
    passing: Passing,
    groups: Option<GroupLane>,
    queue: VecDeque<Piece>,
    underway: Option<Piece>,
    /// A device failed in this layer: its sums are missing.
    lost: bool,
    /// Everything that the CPU can compute from the same bytes is left to it.
    rests: bool,
    trials: DeviceTrials,
    /// Name of the model, and where outcomes of trials are saved.
    model: String,
    outcomes: Option<Verdicts>,
    /// Seconds of a pass with devices and without, in place of the clock's.
    scripted: Option<[f64; 2]>,
    fired: u64,
    bytes: u64,
    waited: Duration,
}

/// Inputs of a lane of devices.
pub(crate) struct Parts {
    pub devices: Devices,
    pub facts: LaneFacts,
    pub banks: Arc<Banks>,
    pub shape: DenseShape,
    pub experts: Option<ExpertModel>,
    pub model: String,
    pub outcomes: Option<Verdicts>,
    pub scripted: Option<[f64; 2]>,
}

impl DeviceLane {
    /// Devices that hold nothing yet.
    pub fn new(parts: Parts) -> Self {
        let Parts {
            devices,
            facts,
            banks,
            shape,
            experts,
            model,
            outcomes,
            scripted,
        } = parts;
        Self {
            trials: DeviceTrials::of(&devices, facts.asked),
            set: DeviceSet::new(devices, banks.format.d),
            facts,
            shape,
            experts,
            products: Vec::new(),
            gates: None,
            parts: Vec::new(),
            uploaded: Vec::new(),
            widths: Widths::default(),
            buffers: None,
            at_once: 0,
            layer: 0,
            rows: PassRows::default(),
            passing: Passing::default(),
            groups: None,
            queue: VecDeque::new(),
            underway: None,
            lost: false,
            rests: false,
            model,
            outcomes,
            scripted,
            fired: 0,
            bytes: 0,
            waited: Duration::ZERO,
            banks,
        }
    }

    fn devices_lost(&self) -> bool {
        self.set.lost().is_some()
    }

    /// Whether devices can compute all clusters for some rows.
    fn has_buffers(&self) -> bool {
        self.buffers.is_some_and(|[first, _]| self.set.has(first))
    }

    fn count_bytes(&mut self, neurons: usize) {
        let format = &self.banks.format;
        self.bytes += (neurons * (format.gate_len() + format.rest_len())) as u64;
    }

    /// Chooses the share of a layer.
    fn take_share(&mut self, offer: &Offer<'_>) -> Share {
        if self.devices_lost() || self.rests {
            return Share::Clusters;
        }
        if let (Some(groups), false) = (&mut self.groups, offer.experts.is_empty()) {
            let experts = offer.experts.iter().copied();
            let begun = groups.begin([offer.layer, offer.rows], experts);
            self.queue.extend(begun.into_iter().map(Piece::Group));
            return match self.queue.is_empty() {
                true => Share::Clusters,
                false => Share::Hidden(groups.parts().to_vec()),
            };
        }
        match offer.by_rows.map(|_| self.rows(offer.rows)) {
            None | Some(0) => Share::Clusters,
            Some(rows) => Share::Rows {
                rows,
                group: self.at_once.max(1),
            },
        }
    }

    /// Sets the clusters outside the store that devices compute.
    fn update(&mut self, outside: &mut Outside, rows: PassRows) {
        let streams = rows.first > 0;
        (outside.all_needed, outside.lost) = (streams, self.devices_lost());
        let same = rows.all() == self.rows.all() && streams == (self.rows.first > 0);
        if same || self.widths.0.is_empty() || outside.lost {
            return;
        }
        self.rows = rows;
        for bank in 0..self.parts.len() {
            outside.computed[bank] = match streams {
                _ if (streams || self.rests) && outside.bytes[bank].is_some() => 0,
                true => outside.prefix()[bank],
                false => self.clusters_for(outside, bank as u32, rows.all()),
            };
        }
    }

    /// Number of a bank's clusters that devices compute for `rows` rows.
    fn clusters_for(&self, outside: &Outside, bank: u32, rows: usize) -> u32 {
        let held = outside.prefix()[bank as usize];
        let wanted = self.widths.clusters(bank as usize, rows);
        match wanted.filter(|_| outside.bytes[bank as usize].is_some()) {
            Some(wanted) => held.min(wanted),
            None => held,
        }
    }

    /// Whether no work is under way, or it has ended.
    fn is_free(&mut self) -> Result<bool, Error> {
        let done = self.set.is_free()?;
        self.lost |= done.is_none();
        Ok(done.unwrap_or(true))
    }

    /// Whether the piece under way has to be waited for.
    fn waits(&self, piece: &Piece, wanted: &Collect<'_>) -> bool {
        match wanted {
            Collect::Nothing => false,
            Collect::Total(_) => matches!(piece, Piece::Total { .. }),
            Collect::Clusters { waits, .. } => *waits && matches!(piece, Piece::Each { .. }),
            Collect::Room => self.passing.group.is_some(),
            Collect::Rows(_) => true,
            Collect::Hidden(end) => !self.groups.as_ref().is_some_and(|of| of.knows(*end)),
        }
    }

    /// The next piece.
    fn next(&mut self, work: &Work<'_>) -> Option<Piece> {
        if let Some(piece) = self.queue.pop_front() {
            return Some(piece);
        }
        let unit = work.rows?;
        let piece = self.passing.next(self.at_once.max(1))?;
        self.passing.submitted(&piece);
        Some(Piece::Rows {
            ends: piece.clusters.end == unit.clusters(),
            clusters: piece.clusters,
            held: piece.held,
        })
    }

    /// Begins a piece.
    fn submit(&mut self, work: &Work<'_>, piece: &Piece) -> Result<(), Error> {
        match piece {
            Piece::Total { clusters, ends } => {
                let (begins, ends) = (clusters.start == 0, *ends);
                let sums = Sums::Total { begins, ends };
                self.submit_clusters(&work.units[0], clusters, Place::Held, sums)
            }
            Piece::Each { unit, clusters, .. } => {
                self.submit_clusters(&work.units[*unit], clusters, Place::Held, Sums::Each)
            }
            Piece::Rows {
                clusters,
                held,
                ends,
            } => {
                let Some(unit) = work.rows else { return Ok(()) };
                let (begins, ends) = (clusters.start == 0, *ends);
                let place = match held {
                    true => Place::Held,
                    false => Place::Buffer(self.passing.buffer()),
                };
                self.submit_clusters(&unit, clusters, place, Sums::Total { begins, ends })
            }
            Piece::Group(group) => match work.experts {
                Some(experts) => self.submit_group(group, experts),
                None => Ok(()),
            },
        }
    }

    /// Begins to compute clusters of a unit. If a device has failed in this layer, their sums are missing.
    fn submit_clusters(
        &mut self,
        unit: &UnitRows<'_>,
        clusters: &Range<usize>,
        place: Place,
        sums: Sums,
    ) -> Result<(), Error> {
        let (part, within) = match place {
            Place::Held => (self.parts[unit.bank as usize], clusters.clone()),
            Place::Buffer(n) => (self.buffers.map(|buffers| buffers[n]), 0..clusters.len()),
        };
        let Some(part) = part.filter(|_| !self.devices_lost()) else {
            self.lost = true;
            return Ok(());
        };
        let words = unit.words();
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
        self.lost |= self.set.submit(&work, self.layer)?.is_none();
        Ok(())
    }

    /// Takes the results of a piece, unless nobody wants them yet.
    fn take(
        &mut self,
        work: &Work<'_>,
        piece: &Piece,
        wanted: &mut Collect<'_>,
    ) -> Result<bool, Error> {
        let none: &mut [f32] = &mut [];
        let out = match (piece, wanted) {
            (Piece::Group(group), _) => {
                self.take_group(group)?;
                return Ok(true);
            }
            (Piece::Total { ends: false, .. } | Piece::Rows { ends: false, .. }, _) => none,
            (Piece::Total { .. }, Collect::Total(out)) => &mut out[..],
            (Piece::Rows { .. }, Collect::Rows(out)) => &mut out[..],
            (
                Piece::Each { clusters, item, .. },
                Collect::Clusters {
                    items, sums, width, ..
                },
            ) => {
                let first = item - items.start;
                &mut sums[first * *width..(first + clusters.len()) * *width]
            }
            _ => return Ok(false),
        };
        let start = Instant::now();
        let taken = self.set.take(out)?;
        self.waited += start.elapsed();
        self.lost = taken.is_none();
        self.fired += taken.map_or(0, |taken| taken.fired);
        match piece {
            Piece::Total {
                clusters,
                ends: true,
            } if work.rows.is_none() => {
                self.count_bytes(clusters.end * CLUSTER);
            }
            Piece::Each { clusters, .. } => self.count_bytes(clusters.len() * CLUSTER),
            Piece::Rows { ends: true, .. } => {
                self.count_bytes(work.rows.map_or(0, |unit| unit.neurons));
            }
            _ => {}
        }
        Ok(true)
    }
}

impl Lane for DeviceLane {
    fn facts(&self) -> &LaneFacts {
        &self.facts
    }

    fn host_bytes(&self, room: &Room, products: &ProductRoom) -> u64 {
        let devices = self.set.devices();
        let of_device = |unified: bool, work_bytes: u64| {
            let streamed = 2 * (self.facts.at_once * CLUSTER) as u64 * self.shape.neuron_bytes();
            let own = self.shape.room_bytes(room, unified) + product_bytes(products, unified);
            own + streamed + work_bytes
        };
        let each = devices.iter().map(|device| {
            let facts = device.facts();
            of_device(facts.unified, facts.work_bytes)
        });
        let joined = match devices.len() {
            0 | 1 => 0,
            _ => 4 * ((room.pairs + room.rows) * self.shape.d + products.results) as u64,
        };
        let groups = self.experts.as_ref();
        each.sum::<u64>() + joined + groups.map_or(0, |model| self.group_bytes(model, room))
    }

    fn multiply(
        &mut self,
        matrices: &mut dyn Iterator<Item = &mut dyn HostMatrix>,
        with: &mut Sharing<'_>,
        gates: bool,
    ) -> Result<(), Error> {
        let devices = self.set.devices();
        let mut sharer = Sharer { devices, with };
        if !gates {
            sharer.begin()?;
        }
        let shared = sharer.share(matrices)?;
        if gates {
            self.gates = shared.first().cloned();
        }
        self.products.extend(shared);
        Ok(())
    }

    fn multiply_again(&self, matrix: &mut dyn HostMatrix) {
        if let Some(products) = &self.gates {
            let shared = products.share(&matrix.shared());
            matrix.set_lane(shared);
        }
    }

    fn hold(&mut self, hold: Hold) -> Result<Outside, Error> {
        self.make_room_for(hold)
    }

    fn upload(
        &mut self,
        cluster: [u32; 2],
        rows: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), Error> {
        self.upload_held(cluster, rows)
    }

    fn settle(&mut self, outside: &mut Outside) -> Result<(), Error> {
        self.settle_held(outside)
    }

    fn set_room(
        &mut self,
        room: &Room,
        products: &ProductRoom,
        widths: &Widths,
        must: bool,
    ) -> Result<bool, Error> {
        let failures = self.change_room(room, products, widths);
        match failures.result() {
            Ok(()) => Ok(true),
            Err(_) if must => self.set.lose(failures).map(|()| true),
            Err(error) => {
                tracing::warn!(%error, "no memory for longer passes");
                Ok(false)
            }
        }
    }

    fn begin_pass(&mut self, timed: Option<LanePass>) {
        let rests = timed.is_some_and(|pass| self.trials.begin(pass));
        if self.rests != rests {
            // `Outside` is set again.
            (self.rests, self.rows) = (rests, PassRows::default());
            (self.set.devices().iter()).for_each(|device| device.set_rests(rests));
        }
    }

    fn end_pass(&mut self, pass: LanePass, time: Duration) {
        let without = usize::from(self.trials.is_without(pass));
        let scripted = self.scripted.map(|both| both[without]);
        self.trials
            .passed(pass, scripted.map_or(time, Duration::from_secs_f64));
    }

    fn rows(&self, rows: usize) -> usize {
        match self.has_buffers() && !self.rests {
            true => self.widths.streamed(rows),
            false => 0,
        }
    }

    fn has_failed(&self) -> bool {
        self.set.failure().is_some()
    }

    fn is_busy(&self) -> bool {
        matches!(self.underway, Some(Piece::Group(_)))
    }

    fn offer(&mut self, offer: &Offer<'_>, outside: &mut Outside) -> Result<Share, Error> {
        self.set.discard()?;
        let again = std::mem::take(&mut self.lost);
        self.layer = offer.layer;
        self.queue.clear();
        self.underway = None;
        if let Some(groups) = &mut self.groups {
            groups.clear();
        }
        let share = match again {
            true => Share::Clusters,
            false => self.take_share(offer),
        };
        let first = match share {
            Share::Rows { rows, .. } => rows,
            Share::Clusters | Share::Hidden(_) => 0,
        };
        let own = offer.rows - first;
        self.update(outside, PassRows { own, first });
        self.passing = Passing::of(match (first, offer.by_rows) {
            (1.., Some(bank)) => outside.holds(bank),
            _ => 0,
        });
        Ok(share)
    }

    fn begin(&mut self, work: &Work<'_>, items: Range<usize>) {
        if self.lost {
            return;
        }
        for (unit, (of, &first)) in work.units.iter().zip(work.first).enumerate() {
            let computed = match of.input.tokens() {
                0 => 0,
                _ => work.outside.computes(of.bank),
            };
            let start = items.start.max(first);
            let end = items.end.min(first + computed);
            let at_once = if work.total {
                work.at_once.max(1)
            } else {
                usize::MAX
            };
            let mut next = start;
            while next < end {
                let stop = end.min(next.saturating_add(at_once));
                let clusters = next - first..stop - first;
                self.queue.push_back(match work.total {
                    true => Piece::Total {
                        ends: clusters.end == computed,
                        clusters,
                    },
                    false => Piece::Each {
                        unit,
                        clusters,
                        item: next,
                    },
                });
                next = stop;
            }
        }
        if let (Some(_), [of]) = (work.rows, work.units) {
            let held = work.outside.holds(of.bank);
            self.passing.begin_group(held.max(items.start)..items.end);
        }
    }

    fn needs(&self, cluster: usize) -> bool {
        let group = self.passing.group.as_ref();
        !self.lost && group.is_some_and(|group| group.contains(&cluster))
    }

    fn arrived(
        &mut self,
        cluster: usize,
        rows: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), Error> {
        let first = self.passing.group.as_ref().map_or(0, |group| group.start);
        let Some(buffers) = self.buffers.filter(|_| !self.devices_lost()) else {
            self.lost = true;
            return Ok(());
        };
        let part = buffers[self.passing.buffer()];
        let place = (cluster - first) * CLUSTER;
        match self.set.upload(part, place, rows)? {
            Some(()) => self.passing.missing -= 1,
            None => self.lost = true,
        }
        Ok(())
    }

    fn collect(&mut self, work: &Work<'_>, mut wanted: Collect<'_>) -> Result<(), Error> {
        loop {
            if let Some(piece) = self.underway.take() {
                let waits = self.waits(&piece, &wanted);
                let done = self.lost || waits || self.is_free()?;
                let taken = done && (self.lost || self.take(work, &piece, &mut wanted)?);
                if !taken && !self.lost {
                    self.underway = Some(piece);
                    return Ok(());
                }
            }
            if self.lost {
                self.queue.clear();
                return Ok(());
            }
            let Some(piece) = self.next(work) else {
                return Ok(());
            };
            self.submit(work, &piece)?;
            self.underway = Some(piece);
        }
    }

    fn hidden(&self) -> &[f32] {
        self.groups.as_ref().map_or(&[], GroupLane::hidden)
    }

    fn is_lost(&self) -> bool {
        self.lost
    }

    fn counted(&self) -> [u64; 2] {
        [self.fired, self.bytes]
    }

    fn report(&self, of: &Reported<'_>) -> LaneReport {
        self.account(of)
    }
}

/// Bytes of host memory for products: inputs and results, and on a device with the machine's memory as many again.
fn product_bytes(room: &ProductRoom, unified: bool) -> u64 {
    let once = room.input + 2 * 4 * room.results;
    let again = if unified {
        room.input + 4 * room.results
    } else {
        0
    };
    (once + again) as u64
}

impl DeviceLane {
    /// Host memory for experts in groups: hidden values on a device and here, and copies of tokens, which graphs read in
    /// another form.
    fn group_bytes(&self, model: &ExpertModel, room: &Room) -> u64 {
        let DenseShape { dtype, d, .. } = self.shape;
        let hidden = groups::hidden_values(room);
        let token = token_bytes(dtype, d) + d.next_multiple_of(32);
        // Outliers of all rows of a group's experts.
        let of_rows = match dtype {
            emberflow_kernels::DType::Q4c => {
                MOST_EXPERTS * self.banks.most_neurons() * emberflow_kernels::outliers(d)
            }
            _ => 0,
        };
        (8 * hidden + model.chosen * room.rows * token + of_rows) as u64
    }
}

/// The biases of some clusters.
fn of_clusters<'a>(bias: &'a [f32], clusters: &Range<usize>) -> &'a [f32] {
    let end = (clusters.end * CLUSTER).min(bias.len());
    &bias[(clusters.start * CLUSTER).min(end)..end]
}
