//! A device as a tier of memory: the first clusters of each bank, the hottest ones, lie there and in
//! no other region. They are uploaded once, when memory is warmed.

use std::sync::Arc;
use std::time::Duration;

use emberflow_storage::clock::Moment;

use crate::device::{DeviceError, InUse, NeuronRows, Part, Room, Taken, Ticket, Work};
use crate::error::Error;

/// What a device is to hold.
#[derive(Debug)]
pub(crate) struct TierSetup {
    pub device: Arc<InUse>,
    /// Clusters of all banks.
    pub clusters: u64,
    /// The largest pieces of its work.
    pub room: Room,
}

impl TierSetup {
    /// If there is a device.
    pub fn on(device: &Option<Arc<InUse>>, clusters: u64, room: Room) -> Option<TierSetup> {
        device.clone().map(|device| TierSetup {
            device,
            clusters,
            room,
        })
    }
}

/// The clusters that a device holds.
pub(crate) struct Tier {
    device: Arc<InUse>,
    /// By bank: how many clusters, and where they are.
    prefix: Vec<u32>,
    parts: Vec<Option<Part>>,
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
        let reserved = (0..).zip(&prefix).map(|(bank, &clusters)| match clusters {
            0 => Ok(None),
            _ => device.reserve(neurons(bank, clusters)).map(Some),
        });
        let parts = reserved.collect::<Result<_, DeviceError>>()?;
        drop(device);
        Ok(Self {
            device: setup.device,
            parts,
            uploaded: prefix.iter().map(|&n| vec![false; n as usize]).collect(),
            prefix,
            waited: Duration::ZERO,
        })
    }

    /// How many clusters of a bank it computes.
    pub fn clusters(&self, bank: u32) -> u32 {
        match self.device.lost() {
            None => self.prefix[bank as usize],
            Some(_) => 0,
        }
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

    /// Begins to compute clusters of a bank; `work` is asked for with their part. `None` if the
    /// device has failed, now or before.
    pub fn submit<'a>(
        &mut self,
        bank: u32,
        work: impl FnOnce(Part) -> Work<'a>,
    ) -> Result<Option<Ticket>, Error> {
        let part = self.parts[bank as usize].filter(|_| self.device.lost().is_none());
        let Some(part) = part else { return Ok(None) };
        let submitted = self.device.dense().submit(&work(part));
        self.device.or_lost(submitted)
    }

    /// Waits for the sums; as [`Tier::submit`].
    pub fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Option<Taken>, Error> {
        let start = Moment::now();
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
