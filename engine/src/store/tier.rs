//! A device as a tier of memory: the first clusters of each bank, the hottest ones, lie there and in
//! no other region. They are uploaded once, when memory is warmed.
//!
//! ```text
//! a bank    │ computed by the device │ held by it, computed by the CPU │ hot │ cold …
//!           └──── more for more rows of a pass ──▶
//! ```
//!
//! Where the device's memory is the machine's, the CPU reads the same bytes, so that the border between
//! them moves from pass to pass and nothing is copied. Otherwise the device computes all that it holds.
//!
//! In a prompt it may compute some rows with all clusters: those that it does not hold pass through two buffers.
//! The CPU computes the other rows from the bytes that both share; what it cannot read of the device's memory
//! the device computes for these rows too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::latch::Latch;
use super::layout::Layout;
use crate::cluster::{CLUSTER, prefixes};
use crate::device::products::Products;
use crate::device::{
    Clusters, DeviceError, HostBytes, InUse, Memory, NeuronRows, Part, ProductRoom, Program, Room,
    Taken, Ticket, Widths, Work,
};
use crate::error::Error;
use crate::split::Product;

/// What a device is to hold.
#[derive(Debug)]
pub(crate) struct TierSetup {
    pub device: Arc<InUse>,
    /// Clusters of all banks.
    pub clusters: u64,
    /// How many of them it computes.
    pub widths: Widths,
    /// The largest pieces of its work.
    pub room: Room,
    /// Clusters of each of the buffers that others pass through, once a pass has rows enough; 0 without.
    pub streamed: usize,
}

impl TierSetup {
    /// If there is a device.
    pub fn on(
        device: &Option<Arc<InUse>>,
        clusters: u64,
        widths: Widths,
        room: Room,
        streamed: usize,
    ) -> Option<TierSetup> {
        device.clone().map(|device| TierSetup {
            device,
            clusters,
            widths,
            room,
            streamed,
        })
    }
}

/// Rows of a pass that a layer is computed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PassRows {
    /// By the caller.
    pub own: usize,
    /// By a device, with all clusters.
    pub streamed: usize,
}

impl PassRows {
    /// Both.
    pub fn all(self) -> usize {
        self.own + self.streamed
    }
}

/// Where a device finds the neurons of a piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamedFrom {
    /// What it holds of a bank.
    Held(u32),
    /// A buffer, by number.
    Buffer(usize),
}

/// The clusters that a device holds and computes, if there is one. Without one, or once it has
/// failed, it holds and computes nothing.
pub(crate) struct Tier {
    layout: Arc<Layout>,
    device: Option<Arc<InUse>>,
    /// What computes gates from resident rows.
    gates: Option<Arc<Products>>,
    /// By bank: how many clusters, and where they are.
    prefix: Vec<u32>,
    parts: Vec<Option<Part>>,
    /// Neurons of each part, and its bytes where the CPU may read them too.
    neurons: Vec<usize>,
    hosts: Vec<Option<HostBytes>>,
    widths: Widths,
    /// Rows of the pass, and how many clusters of each bank the device computes for so many.
    rows: usize,
    computed: Vec<u32>,
    /// Buffers that clusters pass through, of so many each, and whether they do in this pass.
    buffers: Option<[Part; 2]>,
    at_once: usize,
    streams: bool,
    /// Clusters that were uploaded, by bank.
    uploaded: Vec<Vec<bool>>,
    /// Time that its sums were waited for.
    waited: Duration,
    latch: Arc<Latch>,
}

impl Tier {
    /// Makes room for the hottest clusters; `wanted`: how many of each bank are to be hot.
    pub(super) fn new(
        layout: Arc<Layout>,
        setup: Option<TierSetup>,
        wanted: &[u32],
        latch: Arc<Latch>,
    ) -> Result<Self, Error> {
        let (clusters, none) = (layout.clusters_of_each(), vec![0; layout.banks()]);
        let mut tier = Self {
            device: None,
            gates: None,
            computed: none.clone(),
            parts: vec![None; none.len()],
            neurons: vec![0; none.len()],
            hosts: vec![None; none.len()],
            widths: Widths::default(),
            rows: 0,
            buffers: None,
            at_once: 0,
            streams: false,
            uploaded: Vec::new(),
            prefix: none,
            waited: Duration::ZERO,
            latch,
            layout,
        };
        let Some(setup) = setup else { return Ok(tier) };
        let hot = wanted.iter().copied().map(u64::from).sum();
        tier.prefix = match setup.clusters <= hot {
            true => prefixes(setup.clusters, wanted, &clusters),
            // Somebody asked for more than is hot.
            false => prefixes(setup.clusters, &clusters, &clusters),
        };
        tier.computed.copy_from_slice(&tier.prefix);
        let uploaded = tier.prefix.iter().map(|&n| vec![false; n as usize]);
        tier.uploaded = uploaded.collect();
        let mut device = setup.device.backend();
        device.prepare(&Program::Room(setup.room))?;
        for (bank, &clusters) in (0..).zip(&tier.prefix) {
            if clusters > 0 {
                let last = tier.layout.cluster_neurons(bank, clusters - 1);
                let neurons = last.end as usize;
                tier.neurons[bank as usize] = neurons;
                tier.parts[bank as usize] = Some(device.memory(Memory::Held(neurons))?);
            }
        }
        drop(device);
        (tier.widths, tier.at_once) = (setup.widths, setup.streamed);
        tier.device = Some(setup.device);
        tier.reserve_buffers(setup.room.rows)?;
        Ok(tier)
    }

    /// The device, unless it has failed.
    fn device(&self) -> Option<&InUse> {
        (self.device.as_deref()).filter(|device| device.lost().is_none())
    }

    /// Leaves gates to what computes them from resident rows.
    pub(super) fn set_gates(&mut self, gates: Option<Arc<Products>>) {
        self.gates = gates;
    }

    /// What computes gates from resident rows.
    pub(super) fn gates(&self) -> Option<&Arc<Products>> {
        self.gates.as_ref()
    }

    /// Makes room for passes of other lengths, of which it computes as much as `widths` say.
    ///
    /// # Errors
    /// It has no memory for that; it is not used before there is room for others.
    pub fn set_room(
        &mut self,
        room: &Room,
        products: ProductRoom,
        widths: &Widths,
    ) -> Result<(), DeviceError> {
        if self.device().is_none() {
            return Ok(());
        }
        (self.widths, self.rows) = (widths.clone(), 0);
        if let Some(device) = self.device() {
            device.backend().prepare(&Program::Room(*room))?;
        }
        let reserved = self.reserve_buffers(room.rows);
        if reserved.is_err() {
            // What was given stays the device's until all of it is given back: not again for each prompt.
            self.at_once = 0;
        }
        reserved?;
        if let Some(device) = self.device() {
            let room = Program::ProductRoom(products);
            device.backend().prepare(&room)?;
        }
        if let Some(held) = &self.gates {
            held.set_results(products.results);
        }
        Ok(())
    }

    /// Makes the buffers that others pass through, if passes of `rows` rows do that.
    fn reserve_buffers(&mut self, rows: usize) -> Result<(), DeviceError> {
        let Some(device) = &self.device else {
            return Ok(());
        };
        if self.buffers.is_none() && self.at_once > 0 && self.widths.streamed(rows) > 0 {
            let mut device = device.backend();
            let mut buffer = || device.memory(Memory::Passing(self.at_once * CLUSTER));
            self.buffers = Some([buffer()?, buffer()?]);
        }
        Ok(())
    }

    /// Goes on without the device where it has failed.
    ///
    /// # Errors
    /// The failure, unless the CPU can go on.
    pub fn or_lost(&self, made: Result<(), DeviceError>) -> Result<(), Error> {
        match &self.device {
            Some(device) => device.or_lost(made).map(|_| ()),
            None => Ok(made?),
        }
    }

    /// Begins a layer of a pass.
    pub(super) fn begin(&mut self, rows: PassRows) {
        let streams = rows.streamed > 0;
        let same = rows.all() == self.rows && streams == self.streams;
        self.streams = streams;
        if same || self.widths.0.is_empty() || self.device().is_none() {
            return;
        }
        self.rows = rows.all();
        for bank in 0..self.prefix.len() {
            self.computed[bank] = match streams {
                true if self.hosts[bank].is_some() => 0,
                true => self.prefix[bank],
                false => self.clusters_for(bank as u32, self.rows),
            };
        }
    }

    /// Whether it computes some of the current layer's rows with all clusters, so that all neurons
    /// are needed.
    pub fn streams(&self) -> bool {
        self.streams
    }

    /// How many rows of a pass of `rows` rows it is to compute in this way.
    pub fn streamed_rows(&self, rows: usize) -> usize {
        match self.buffers.is_some() && self.device().is_some() {
            true => self.widths.streamed(rows),
            false => 0,
        }
    }

    /// Most clusters of a piece of such work.
    pub fn streamed_at_once(&self) -> usize {
        self.at_once.max(1)
    }

    /// Clusters that the buffers have room for.
    pub fn stream_clusters(&self) -> usize {
        self.buffers
            .map_or(0, |buffers| buffers.len() * self.at_once)
    }

    /// Copies a cluster to a buffer, as the `place`-th one there. False if the device has failed.
    pub(super) fn upload_streamed(
        &mut self,
        buffer: usize,
        place: usize,
        rows: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<bool, Error> {
        let (Some(device), Some(buffers)) = (self.device(), self.buffers) else {
            return Ok(false);
        };
        let part = buffers[buffer % buffers.len()];
        let uploaded = device.backend().upload(part, place * CLUSTER, rows);
        let uploaded = device.or_lost(uploaded);
        Ok(self.latch.keep(uploaded)?.is_some())
    }

    /// Begins to compute clusters that it holds or that were copied to a buffer; `work` is asked for
    /// with their part. `None` if the device has failed, now or before.
    pub fn submit<'a>(
        &mut self,
        from: StreamedFrom,
        work: impl FnOnce(Part) -> Clusters<'a>,
    ) -> Result<Option<Ticket>, Error> {
        let part = match from {
            StreamedFrom::Held(bank) => self.parts[bank as usize],
            StreamedFrom::Buffer(n) => self.buffers.map(|buffers| buffers[n % buffers.len()]),
        };
        let (Some(device), Some(part)) = (self.device(), part) else {
            return Ok(None);
        };
        let submitted = device.backend().submit(&Work::Clusters(work(part)));
        self.latch.keep(device.or_lost(submitted))
    }

    /// Whether it is done with some work; does not wait. `None` if it has failed.
    pub fn is_done(&mut self, ticket: Ticket) -> Result<Option<bool>, Error> {
        let Some(device) = &self.device else {
            return Ok(None);
        };
        let done = device.backend().poll(ticket);
        self.latch.keep(device.or_lost(done))
    }

    /// Waits for the sums; `None` if the device has failed.
    pub fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Option<Taken>, Error> {
        let Some(device) = &self.device else {
            return Ok(None);
        };
        let start = Instant::now();
        let taken = device.backend().take(ticket, out);
        self.waited += start.elapsed();
        self.latch.keep(device.or_lost(taken))
    }

    /// Finds the bytes that the CPU may read, once all are uploaded.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        let Some(device) = self.device.as_ref().filter(|_| !self.widths.0.is_empty()) else {
            return Ok(());
        };
        for (host, part) in self.hosts.iter_mut().zip(&self.parts) {
            if let Some(part) = part {
                let found = device.backend().host(*part);
                *host = device.or_lost(found)?.flatten();
            }
        }
        Ok(())
    }

    /// How many clusters of a bank it computes for `rows` rows.
    fn clusters_for(&self, bank: u32, rows: usize) -> u32 {
        let held = self.prefix[bank as usize];
        let shared = self.hosts[bank as usize].is_some();
        let wanted = self.widths.clusters(bank as usize, rows);
        match wanted.filter(|_| shared) {
            Some(wanted) => held.min(wanted),
            None => held,
        }
    }

    /// How many clusters of all banks it computes in a pass of `rows` rows.
    pub fn computed_for(&self, rows: usize) -> u64 {
        let banks = 0..self.prefix.len() as u32;
        banks
            .map(|bank| u64::from(self.clusters_for(bank, rows)))
            .sum()
    }

    /// How many clusters of a bank, from the first on, it computes in this pass.
    #[inline]
    pub fn computes(&self, bank: u32) -> usize {
        match self.device() {
            Some(_) => self.computed[bank as usize] as usize,
            None => 0,
        }
    }

    /// How many clusters of a bank nobody has to read, as it computes them or the CPU has their bytes.
    #[inline]
    pub fn holds(&self, bank: u32) -> usize {
        let held = self.prefix[bank as usize] as usize;
        match held > 0 && self.hosts[bank as usize].is_none() && self.device().is_none() {
            true => 0,
            false => held,
        }
    }

    /// The bytes of a bank's part, rows matrix by matrix, and its neurons, if the CPU may read them and
    /// `cluster` is there.
    pub(super) fn shared(&self, bank: u32, cluster: u32) -> Option<(&[u8], usize)> {
        let host = self.hosts[bank as usize].as_ref();
        let host = host.filter(|_| cluster < self.prefix[bank as usize])?;
        Some(((**host).as_ref(), self.neurons[bank as usize]))
    }

    /// Clusters of each bank that are its own, whether or not it still computes them.
    pub(super) fn prefixes(&self) -> &[u32] {
        &self.prefix
    }

    /// Whether a cluster is to be uploaded.
    pub(super) fn lacks(&self, bank: u32, cluster: u32) -> bool {
        let of_bank = self.uploaded.get(bank as usize);
        let uploaded = of_bank.and_then(|of| of.get(cluster as usize));
        self.device().is_some() && uploaded == Some(&false)
    }

    /// Uploads a cluster.
    pub(super) fn upload(
        &mut self,
        bank: u32,
        cluster: u32,
        rows: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), Error> {
        let first = self.layout.cluster_neurons(bank, cluster).start as usize;
        if let (Some(device), Some(part)) = (&self.device, self.parts[bank as usize]) {
            device.backend().upload(part, first, rows)?;
            self.uploaded[bank as usize][cluster as usize] = true;
        }
        Ok(())
    }

    /// Time that its sums were waited for.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Share of the gates of a token that it computes from resident rows, and the time that was
    /// waited for it.
    pub fn gates_share(&self) -> (f64, Duration) {
        let Some(products) = &self.gates else {
            return (0.0, Duration::ZERO);
        };
        let banks = (0..self.layout.banks() as u32).map(|bank| {
            let all = self.layout.neurons(bank);
            let its = self.clusters_for(bank, 1) as usize;
            let rows = all.saturating_sub(its * CLUSTER);
            let (cols, n) = (self.layout.format.d, 1);
            [products.rows(Product { rows, cols, n }), all]
        });
        let [its, all] = banks.fold([0, 0], |sum, of| [sum[0] + of[0], sum[1] + of[1]]);
        (its as f64 / all.max(1) as f64, products.waited())
    }

    /// Why it is not used any longer, if so.
    pub fn lost(&self) -> Option<&DeviceError> {
        self.device.as_ref()?.lost()
    }
}
