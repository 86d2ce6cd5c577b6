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

use crate::cluster::CLUSTER;
use crate::device::{
    DeviceError, HostBytes, InUse, NeuronRows, Part, Room, Taken, Ticket, Widths, Work,
};
use crate::error::Error;

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

/// The clusters that a device holds.
pub(crate) struct Tier {
    device: Arc<InUse>,
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
}

impl Tier {
    /// Makes room for the first `prefix[b]` clusters of bank `b`, which has `neurons(b, clusters)`
    /// neurons in them.
    pub fn new(
        setup: TierSetup,
        prefix: Vec<u32>,
        neurons: impl Fn(u32, u32) -> usize,
    ) -> Result<Self, Error> {
        let mut device = setup.device.dense();
        device.make_room(&setup.room)?;
        let counts = (0..).zip(&prefix).map(|(bank, &clusters)| match clusters {
            0 => 0,
            _ => neurons(bank, clusters),
        });
        let neurons: Vec<usize> = counts.collect();
        let reserved = neurons.iter().map(|&neurons| match neurons {
            0 => Ok(None),
            _ => device.reserve(neurons).map(Some),
        });
        let parts: Vec<Option<Part>> = reserved.collect::<Result<_, DeviceError>>()?;
        drop(device);
        let mut tier = Self {
            device: setup.device,
            hosts: vec![None; parts.len()],
            parts,
            neurons,
            widths: setup.widths,
            rows: 0,
            buffers: None,
            at_once: setup.streamed,
            streams: false,
            computed: prefix.clone(),
            uploaded: prefix.iter().map(|&n| vec![false; n as usize]).collect(),
            prefix,
            waited: Duration::ZERO,
        };
        tier.reserve_buffers(setup.room.rows)?;
        Ok(tier)
    }

    /// Makes room for passes of other lengths, of which it computes as much as `widths` say. Without memory for that
    /// it cannot be used before there is room for others.
    pub fn set_room(&mut self, room: &Room, widths: Widths) -> Result<(), DeviceError> {
        (self.widths, self.rows) = (widths, 0);
        self.device.dense().make_room(room)?;
        let reserved = self.reserve_buffers(room.rows);
        if reserved.is_err() {
            // What was given stays the device's until all of it is given back: not again for each prompt.
            self.at_once = 0;
        }
        reserved
    }

    /// Makes the buffers that others pass through, if passes of `rows` rows do that.
    fn reserve_buffers(&mut self, rows: usize) -> Result<(), DeviceError> {
        if self.buffers.is_none() && self.at_once > 0 && self.widths.streamed(rows) > 0 {
            let mut device = self.device.dense();
            let mut buffer = || device.reserve_for_streams(self.at_once * CLUSTER);
            self.buffers = Some([buffer()?, buffer()?]);
        }
        Ok(())
    }

    /// The device.
    pub fn device(&self) -> &Arc<InUse> {
        &self.device
    }

    /// Begins a layer of a pass of `rows` rows.
    pub fn begin(&mut self, rows: PassRows) {
        let streams = rows.streamed > 0;
        let same = rows.all() == self.rows && streams == self.streams;
        self.streams = streams;
        if same || self.widths.0.is_empty() || self.device.lost().is_some() {
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

    /// Whether clusters pass through the device in this pass.
    pub fn streams(&self) -> bool {
        self.streams
    }

    /// How many rows of a pass of `rows` rows it computes with all clusters.
    pub fn streamed_rows(&self, rows: usize) -> usize {
        match self.buffers.is_some() && self.device.lost().is_none() {
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
    pub fn upload_streamed(
        &mut self,
        buffer: usize,
        place: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<bool, Error> {
        let buffers = self.buffers.filter(|_| self.device.lost().is_none());
        let Some(buffers) = buffers else {
            return Ok(false);
        };
        let part = buffers[buffer % buffers.len()];
        let uploaded = (self.device.dense()).upload(part, place * CLUSTER, neurons);
        Ok(self.device.or_lost(uploaded)?.is_some())
    }

    /// Begins to compute clusters that it holds or that were copied to a buffer; `work` is asked for
    /// with their part. `None` if the device has failed, now or before.
    pub fn submit_streamed<'a>(
        &mut self,
        from: StreamedFrom,
        work: impl FnOnce(Part) -> Work<'a>,
    ) -> Result<Option<Ticket>, Error> {
        let part = match from {
            StreamedFrom::Held(bank) => self.parts[bank as usize],
            StreamedFrom::Buffer(n) => self.buffers.map(|buffers| buffers[n % buffers.len()]),
        };
        let part = part.filter(|_| self.device.lost().is_none());
        let Some(part) = part else { return Ok(None) };
        let submitted = self.device.dense().submit(&work(part));
        self.device.or_lost(submitted)
    }

    /// Whether it is done with some work; does not wait. `None` if it has failed.
    pub fn is_done(&mut self, ticket: Ticket) -> Result<Option<bool>, Error> {
        let done = self.device.dense().poll(ticket);
        self.device.or_lost(done)
    }

    /// Finds the bytes that the CPU may read, once all are uploaded.
    pub fn settle(&mut self) -> Result<(), Error> {
        if self.widths.0.is_empty() {
            return Ok(());
        }
        for (host, part) in self.hosts.iter_mut().zip(&self.parts) {
            if let Some(part) = part {
                let found = self.device.dense().host_bytes(*part);
                *host = self.device.or_lost(found)?.flatten();
            }
        }
        Ok(())
    }

    /// How many clusters of a bank it computes for `rows` rows.
    pub fn clusters_for(&self, bank: u32, rows: usize) -> u32 {
        let held = self.prefix[bank as usize];
        let shared = self.hosts[bank as usize].is_some();
        let wanted = self.widths.clusters(bank as usize, rows);
        match wanted.filter(|_| shared) {
            Some(wanted) => held.min(wanted),
            None => held,
        }
    }

    /// How many clusters of a bank it computes in this pass.
    pub fn clusters(&self, bank: u32) -> u32 {
        match self.device.lost() {
            None => self.computed[bank as usize],
            Some(_) => 0,
        }
    }

    /// How many clusters of a bank nobody has to read, as it computes them or the CPU has their bytes.
    pub fn held(&self, bank: u32) -> u32 {
        match self.device.lost() {
            Some(_) if self.hosts[bank as usize].is_none() => 0,
            _ => self.prefix[bank as usize],
        }
    }

    /// The bytes of a bank's part, rows matrix by matrix, and its neurons, if the CPU may read them and
    /// `cluster` is there.
    pub fn shared(&self, bank: u32, cluster: u32) -> Option<(&[u8], usize)> {
        let host = self.hosts[bank as usize].as_ref();
        let host = host.filter(|_| cluster < self.prefix[bank as usize])?;
        Some(((**host).as_ref(), self.neurons[bank as usize]))
    }

    /// Clusters of each bank that are its own, whether or not it still computes them.
    pub fn prefixes(&self) -> &[u32] {
        &self.prefix
    }

    /// Whether a cluster is to be uploaded.
    pub fn lacks(&self, bank: u32, cluster: u32) -> bool {
        let uploaded = self.uploaded[bank as usize].get(cluster as usize);
        self.device.lost().is_none() && uploaded == Some(&false)
    }

    /// Uploads a cluster, whose first neuron is `first`.
    pub fn upload(
        &mut self,
        bank: u32,
        cluster: u32,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), Error> {
        if let Some(part) = self.parts[bank as usize] {
            self.device.dense().upload(part, first, neurons)?;
            self.uploaded[bank as usize][cluster as usize] = true;
        }
        Ok(())
    }

    /// Waits for the sums; `None` if the device has failed, now or before.
    pub fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Option<Taken>, Error> {
        let start = Instant::now();
        let taken = self.device.dense().take(ticket, out);
        self.waited += start.elapsed();
        self.device.or_lost(taken)
    }

    /// Time that its sums were waited for.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Why it is not used any longer.
    pub fn lost(&self) -> Option<&DeviceError> {
        self.device.lost()
    }
}
