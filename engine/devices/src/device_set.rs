//! Devices that compute clusters together. The machine's memory holds their clusters once, and each device and the CPU read
//! them there; a single device may have separate memory.
//!
//! ```text
//! a piece    │ first device's clusters │ second's │ …     each ends at the same time, by its measured times
//! alone      a total stays on the device, piece by piece
//! several    each gives the sums of its clusters, which are added here, in the order of clusters
//! ```
//!
//! A device that fails is not used again, and the piece of work is computed again without it.

use std::ops::Range;
use std::sync::Arc;

use arrayvec::ArrayVec;
use emberflow_storage::trace::Tracer;

use emberflow_engine::lane::{CLUSTER, Input, NeuronRows};
use emberflow_engine::{Error, trace};

use crate::backend::{Clusters, PartKind, Program, Taken, Ticket, Work};
use crate::error::DeviceError;
use crate::experts::{ExpertGroup, ExpertRows, MOST_EXPERTS};
use crate::in_use::{Devices, InUse, MOST_DEVICES};
use crate::part::Part;
use crate::split::{Curve, Product, shares};
use crate::times::Samples;
use crate::units::nanoseconds;
use emberflow_opencl::{HostBytes, Sums};

/// A failure of one of the devices.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Its number among the devices.
    device: usize,
    why: DeviceError,
}

/// Failures, at most one per device.
#[derive(Debug, Default)]
pub(crate) struct Failures(pub ArrayVec<Failure, MOST_DEVICES>);

impl Failures {
    /// The first one as an error.
    ///
    /// # Errors
    /// The first failure, if any.
    pub fn result(&self) -> Result<(), DeviceError> {
        match self.0.first() {
            Some(failure) => Err(failure.why.clone()),
            None => Ok(()),
        }
    }
}

impl From<Failure> for DeviceError {
    fn from(failure: Failure) -> Self {
        failure.why
    }
}

/// A part of each device.
#[derive(Default)]
struct EachPart {
    neurons: usize,
    each: [Option<Part>; MOST_DEVICES],
}

/// A device's share of a piece of work.
struct GivenClusters {
    device: usize,
    ticket: Ticket,
    clusters: usize,
}

/// A piece of work under way.
struct Underway {
    given: ArrayVec<GivenClusters, MOST_DEVICES>,
    /// A single device computes it, and its results are used as they are.
    alone: bool,
    /// Floats of a cluster's sums.
    width: usize,
    sums: Sums,
    /// The layer, and when it was submitted, by the tracer.
    layer: u64,
    start: u64,
}

/// A group of experts under way on a device.
struct UnderwayGroup {
    device: usize,
    ticket: Ticket,
    experts: usize,
    clusters: usize,
    values: usize,
    layer: u64,
    start: u64,
}

/// Devices that compute clusters together.
pub(crate) struct DeviceSet {
    devices: Devices,
    times: Vec<Samples>,
    /// Elements of a row.
    d: usize,
    parts: Vec<EachPart>,
    underway: Option<Underway>,
    group: Option<UnderwayGroup>,
    /// Sums of a device's clusters, and what the pieces so far come to.
    sums: Vec<f32>,
    total: Vec<f32>,
    /// The total under way is the only device's.
    total_alone: bool,
    tracer: Tracer,
}

impl DeviceSet {
    /// Of devices that compute rows of `d` elements.
    pub fn new(devices: Devices, d: usize) -> Self {
        let times = devices.iter().map(|device| device.verdict.times());
        Self {
            times: times.collect(),
            devices,
            d,
            parts: Vec::new(),
            underway: None,
            group: None,
            sums: Vec::new(),
            total: Vec::new(),
            total_alone: false,
            tracer: Tracer::default(),
        }
    }

    /// Traces its work.
    pub fn set_tracer(&mut self, tracer: Tracer) {
        self.tracer = tracer;
    }

    /// The devices.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Times of the first device.
    pub fn first_times(&self) -> &Samples {
        &self.times[0]
    }

    /// The devices that have not failed.
    fn live(&self) -> impl Iterator<Item = &Arc<InUse>> + Clone {
        self.devices.iter().filter(|device| device.lost().is_none())
    }

    /// Why none of them is used any longer: the last failure.
    pub fn lost(&self) -> Option<&DeviceError> {
        match self.live().next() {
            Some(_) => None,
            None => self.devices.iter().rev().find_map(|device| device.lost()),
        }
    }

    /// A failure of one of them.
    pub fn failure(&self) -> Option<&DeviceError> {
        self.devices.iter().find_map(|device| device.lost())
    }

    /// Has each device make what programs need, in their order. Returns the failures of devices that could not.
    pub fn prepare(&self, programs: &[Program]) -> Failures {
        let failure = |device: &Arc<InUse>| {
            let mut backend = device.backend();
            let made = programs
                .iter()
                .try_for_each(|program| backend.prepare(program));
            made.err().map(|why| Failure {
                device: device.number,
                why,
            })
        };
        Failures(self.live().filter_map(failure).collect())
    }

    /// Frees the sums of long passes.
    pub fn free_sums(&mut self) {
        (self.sums, self.total) = (Vec::new(), Vec::new());
    }

    /// Stops using devices that failed.
    ///
    /// # Errors
    /// The first failure, unless the CPU can take over.
    pub fn lose(&self, failures: Failures) -> Result<(), Error> {
        failures.0.into_iter().try_for_each(|failure| {
            let device = &self.devices[failure.device];
            device.or_lost::<()>(Err(failure.why)).map(|_| ())
        })
    }

    /// Memory for neurons that are uploaded once: the first device's, until all have it with [`DeviceSet::settle`].
    ///
    /// # Errors
    /// Not enough of it.
    pub fn held(&mut self, neurons: usize) -> Result<Part, DeviceError> {
        let mut parts = EachPart {
            neurons,
            ..EachPart::default()
        };
        if let Some(device) = self.live().next() {
            parts.each[device.number] = Some(device.backend().memory(PartKind::Held(neurons))?);
        }
        self.parts.push(parts);
        Ok(Part(self.parts.len() - 1))
    }

    /// Two stream buffers on each device with memory for both; other devices compute held neurons only.
    ///
    /// # Errors
    /// None of them has enough memory: the first one's failure.
    pub fn buffers(&mut self, neurons: usize) -> Result<[Part; 2], Failure> {
        let mut both = [(); 2].map(|()| EachPart {
            neurons,
            ..EachPart::default()
        });
        let (mut made, mut failure) = (false, None);
        for device in self.live() {
            let mut backend = device.backend();
            let first = backend.memory(PartKind::Passing(neurons));
            let pair = first.and_then(|first| {
                let second = backend.memory(PartKind::Passing(neurons));
                let pair = second.map(|second| [first, second]);
                pair.inspect_err(|_| backend.release(first))
            });
            match pair {
                Ok(pair) => {
                    made = true;
                    for (parts, part) in both.iter_mut().zip(pair) {
                        parts.each[device.number] = Some(part);
                    }
                }
                Err(why) => {
                    tracing::warn!(error = %why, "no neurons stream through the device");
                    let device = device.number;
                    failure.get_or_insert(Failure { device, why });
                }
            }
        }
        match failure.filter(|_| !made) {
            Some(failure) => Err(failure),
            None => {
                self.parts.extend(both);
                Ok([2, 1].map(|back| Part(self.parts.len() - back)))
            }
        }
    }

    /// Whether a device that has not failed has the part.
    pub fn has(&self, part: Part) -> bool {
        self.having(part).next().is_some()
    }

    /// The devices that have a part and have not failed.
    fn having(&self, part: Part) -> impl Iterator<Item = &Arc<InUse>> {
        let has = move |device: &&Arc<InUse>| self.parts[part.0].each[device.number].is_some();
        self.live().filter(has)
    }

    /// Copies neurons to a part of each device that has one, from number `first` on. `None` where the devices were lost.
    ///
    /// # Errors
    /// A device's, unless the CPU can take over.
    pub fn upload(
        &self,
        part: Part,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<Option<()>, Error> {
        let having: ArrayVec<&Arc<InUse>, MOST_DEVICES> = self.having(part).collect();
        let upload = |device: &Arc<InUse>, neurons: &mut dyn Iterator<Item = NeuronRows<'_>>| {
            let Some(part) = self.parts[part.0].each[device.number] else {
                return Ok(None);
            };
            let uploaded = device.backend().upload(part, first, neurons);
            device.or_lost(uploaded.map(|_| ()))
        };
        if let [device] = having[..] {
            return upload(device, neurons);
        }
        let neurons: ArrayVec<NeuronRows<'_>, CLUSTER> = neurons.take(CLUSTER).collect();
        let mut all = (!having.is_empty()).then_some(());
        for device in having {
            all = all.and(upload(device, &mut neurons.iter().copied())?);
        }
        Ok(all)
    }

    /// Shares a held part that was uploaded with all devices, and returns the bytes that the CPU may read;
    /// `None` in a memory of a device's own.
    ///
    /// # Errors
    /// A device's, unless the CPU can take over.
    pub fn settle(&mut self, part: Part) -> Result<Option<HostBytes>, Error> {
        let EachPart { neurons, each } = &mut self.parts[part.0];
        let mut bytes = None;
        for device in &self.devices {
            if let Some(its) = each[device.number] {
                bytes = device.or_lost(device.backend().host(its))?.flatten();
            }
        }
        for device in &self.devices {
            if let (Some(bytes), None) = (&bytes, each[device.number]) {
                let shared = PartKind::Shared(Arc::clone(bytes), *neurons);
                each[device.number] = device.or_lost(device.backend().memory(shared))?;
            }
        }
        Ok(bytes)
    }

    /// Begins a piece of work of a layer. `None` where a device was lost: it is not computed.
    ///
    /// # Errors
    /// A device's, unless the CPU can take over.
    pub fn submit(&mut self, work: &Clusters<'_>, layer: usize) -> Result<Option<()>, Error> {
        // Not by who has the part: pieces of one total lie on some devices and on all.
        let alone = self.live().count() == 1;
        let having: ArrayVec<Arc<InUse>, MOST_DEVICES> = self.having(work.part).cloned().collect();
        let (rows, start) = (work.rows(), self.tracer.now());
        let mut underway = Underway {
            given: ArrayVec::new(),
            alone,
            width: rows * self.d,
            sums: work.sums,
            layer: layer as u64,
            start,
        };
        match work.sums {
            Sums::Total { begins: true, .. } => {
                self.total_alone = alone;
                self.total.clear();
                self.total
                    .resize(if alone { 0 } else { underway.width }, 0.0);
            }
            // A total of several is here, and the device that is left has none.
            Sums::Total { .. } if alone != self.total_alone => return Ok(None),
            _ => {}
        }
        let curves = having
            .iter()
            .map(|device| &self.times[device.number] as &dyn Curve);
        let curves: ArrayVec<&dyn Curve, MOST_DEVICES> = curves.collect();
        let product = Product {
            rows: work.clusters.len(),
            cols: CLUSTER,
            n: rows,
        };
        let (mut first, mut lost) = (0, having.is_empty());
        for (device, clusters) in having.iter().zip(shares(product, &curves)) {
            let range = work.clusters.start + first..work.clusters.start + first + clusters;
            if clusters > 0 {
                let submitted = match self.parts[work.part.0].each[device.number] {
                    Some(part) => {
                        let some = work.some(part, &range, first, alone);
                        device.backend().submit(&Work::Clusters(some))
                    }
                    None => Err(device.failed("was not given these neurons")),
                };
                match device.or_lost(submitted)? {
                    None => lost = true,
                    Some(ticket) => underway.given.push(GivenClusters {
                        device: device.number,
                        ticket,
                        clusters,
                    }),
                }
            }
            first += clusters;
        }
        self.underway = Some(underway);
        Ok((!lost).then_some(()))
    }

    /// Begins a group of experts of a layer, of which each has its tokens of `input`, on the first device. `None` where it was
    /// lost: they are not computed.
    ///
    /// # Errors
    /// The device's, unless the CPU can take over.
    pub fn submit_group<'a>(
        &mut self,
        group: ExpertGroup<'a>,
        input: Input<'_>,
        layer: usize,
    ) -> Result<Option<()>, Error> {
        let Some(device) = self.live().next().cloned() else {
            return Ok(None);
        };
        let part = |of: &ExpertRows<'a>| {
            let part = self.parts[of.part.0].each[device.number];
            let part = part.ok_or_else(|| device.failed("was not given these neurons"))?;
            Ok(ExpertRows { part, ..*of })
        };
        let experts = group.experts.iter().map(part);
        let experts: Result<ArrayVec<ExpertRows<'_>, MOST_EXPERTS>, DeviceError> =
            experts.collect();
        let start = self.tracer.now();
        let submitted = experts.and_then(|experts| {
            let experts = &experts;
            let group = ExpertGroup { experts, ..group };
            device.backend().submit(&Work::Experts(group, input))
        });
        let Some(ticket) = device.or_lost(submitted)? else {
            return Ok(None);
        };
        self.group = Some(UnderwayGroup {
            device: device.number,
            ticket,
            experts: group.experts.len(),
            clusters: (group.experts.iter())
                .map(|expert| expert.neurons.div_ceil(CLUSTER))
                .sum(),
            values: group.values(),
            layer: layer as u64,
            start,
        });
        Ok(Some(()))
    }

    /// Waits for the group under way, of which `out` takes the hidden values. `None` where the device was lost.
    ///
    /// # Errors
    /// The device's, unless the CPU can take over.
    pub fn take_group(&mut self, out: &mut [f32]) -> Result<Option<Taken>, Error> {
        let Some(group) = self.group.take() else {
            return Ok(Some(Taken::default()));
        };
        let device = &self.devices[group.device];
        let taken = device.backend().take(group.ticket, out);
        let Some(taken) = device.or_lost(taken)? else {
            return Ok(None);
        };
        device.count(group.clusters, 0);
        (self.tracer).accelerator(
            device.number,
            &trace::EXPERTS,
            [group.layer, group.experts as u64],
            group.start,
            nanoseconds(taken.took),
        );
        Ok(Some(taken))
    }

    /// Whether the work under way is done, or there is none; does not wait. `None` where a device was lost.
    ///
    /// # Errors
    /// A device's, unless the CPU can take over.
    pub fn is_free(&self) -> Result<Option<bool>, Error> {
        if let Some(group) = &self.group {
            let device = &self.devices[group.device];
            let done = device.backend().poll(group.ticket);
            return device.or_lost(done);
        }
        for given in self.underway.iter().flat_map(|underway| &underway.given) {
            let device = &self.devices[given.device];
            let done = device.backend().poll(given.ticket);
            match device.or_lost(done)? {
                Some(true) => {}
                other => return Ok(other),
            }
        }
        Ok(Some(true))
    }

    /// Waits for the work under way, of which `out` takes the sums. `None` where a device was lost: they are not there.
    ///
    /// # Errors
    /// A device's, unless the CPU can take over.
    pub fn take(&mut self, out: &mut [f32]) -> Result<Option<Taken>, Error> {
        let Some(underway) = self.underway.take() else {
            return Ok(Some(Taken::default()));
        };
        let (mut all, mut lost, mut at) = (Taken::default(), false, 0);
        for given in &underway.given {
            let len = given.clusters * underway.width;
            let to = match (underway.alone, underway.sums) {
                (true, _) => &mut *out,
                (false, Sums::Each) => &mut out[at..at + len],
                (false, Sums::Total { .. }) => {
                    self.sums.resize(len, 0.0);
                    &mut self.sums
                }
            };
            at += len;
            let device = &self.devices[given.device];
            let taken = device.backend().take(given.ticket, to);
            let Some(taken) = device.or_lost(taken)? else {
                lost = true;
                continue;
            };
            if let (false, Sums::Total { .. }) = (underway.alone, underway.sums) {
                for sums in self.sums.chunks_exact(underway.width) {
                    let both = self.total.iter_mut().zip(sums);
                    both.for_each(|(total, sum)| *total += *sum);
                }
            }
            all.fired += taken.fired;
            device.count(given.clusters, 0);
            let (values, took) = ([underway.layer, given.clusters as u64], taken.took);
            let start = underway.start;
            (self.tracer).accelerator(
                device.number,
                &trace::DENSE,
                values,
                start,
                nanoseconds(took),
            );
        }
        if let (false, Sums::Total { ends: true, .. }) = (underway.alone, underway.sums)
            && !out.is_empty()
            && !lost
        {
            out.copy_from_slice(&self.total);
        }
        Ok((!lost).then_some(all))
    }

    /// Waits for work that a failure made useless.
    ///
    /// # Errors
    /// A device's, unless the CPU can take over.
    pub fn discard(&mut self) -> Result<(), Error> {
        if let Some(group) = self.group.take() {
            let device = &self.devices[group.device];
            self.sums.resize(group.values, 0.0);
            if device.lost().is_none() {
                let taken = device.backend().take(group.ticket, &mut self.sums);
                device.or_lost(taken)?;
            }
        }
        let Some(underway) = self.underway.take() else {
            return Ok(());
        };
        for given in underway.given {
            let device = &self.devices[given.device];
            let len = match underway.sums {
                Sums::Total { ends: false, .. } if underway.alone => 0,
                Sums::Total { .. } if underway.alone => underway.width,
                _ => given.clusters * underway.width,
            };
            self.sums.resize(len, 0.0);
            if device.lost().is_none() {
                let taken = device.backend().take(given.ticket, &mut self.sums);
                device.or_lost(taken)?;
            }
        }
        Ok(())
    }
}

impl<'a> Clusters<'a> {
    /// The same work on some of its clusters, which begin `first` clusters behind its own first, in a device's part. If
    /// not `alone`, each of them gives its sums.
    fn some(&self, part: Part, clusters: &'a Range<usize>, first: usize, alone: bool) -> Self {
        let (words, count) = (CLUSTER * self.rows() / 64, clusters.len());
        let of = |bias: &'a [f32]| {
            let end = ((first + count) * CLUSTER).min(bias.len());
            &bias[(first * CLUSTER).min(end)..end]
        };
        Self {
            part,
            clusters,
            mask: self
                .mask
                .map(|all| &all[first * words..(first + count) * words]),
            gate_bias: of(self.gate_bias),
            up_bias: of(self.up_bias),
            sums: if alone { self.sums } else { Sums::Each },
            ..*self
        }
    }
}
