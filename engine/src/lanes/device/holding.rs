//! What a device holds: clusters of neurons, from when memory is warmed on, and buffers that others pass through.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::passing::Passing;
use super::{DeviceLane, ExpertSetup, GroupLane, PassRows};
use crate::bundle::NeuronRows;
use crate::cluster::{CLUSTER, prefixes};
use crate::device::{
    DeviceError, DeviceSet, Devices, Failure, Failures, ProductRoom, Program, Room, Widths,
};
use crate::device_trials::DeviceTrials;
use crate::error::Error;
use crate::store::{Layout, NeuronStore, Outside};

/// What a device is to hold and to compute.
pub(crate) struct Setup {
    /// The devices.
    pub devices: Devices,
    /// Clusters of all banks.
    pub clusters: u64,
    /// How many of them it computes.
    pub widths: Widths,
    /// The largest pieces of its work.
    pub room: Room,
    /// Clusters of each of the buffers that others pass through, once a pass has rows enough; 0 without.
    pub at_once: usize,
    /// Experts that it computes in groups, if it does.
    pub experts: Option<ExpertSetup>,
    /// The user has given them a size.
    pub has_size: bool,
}

impl DeviceLane {
    /// Makes room for the hottest clusters of a store that is to be filled; what lies outside of it then.
    ///
    /// # Errors
    /// The device has no memory for them.
    pub fn new(setup: Setup, store: &NeuronStore) -> Result<(Self, Outside), Error> {
        let trials = DeviceTrials::of(&setup.devices, setup.has_size);
        let layout = Arc::clone(&store.layout);
        let (clusters, wanted) = (layout.clusters_of_each(), store.residency.wanted());
        let hot: u64 = wanted.iter().copied().map(u64::from).sum();
        let same_bits = setup.devices.iter().all(|device| device.verdict.same_bits);
        let prefix = match setup.clusters <= hot && same_bits {
            true => prefixes(setup.clusters, &wanted, &clusters),
            // Somebody asked for more than is hot, or a text must not follow what is hot in a batch.
            false => prefixes(setup.clusters, &clusters, &clusters),
        };
        let experts = setup.experts.as_ref();
        let prefix = experts.map_or(prefix, |of| of.banks.held(setup.clusters));
        let mut lane = Self {
            latch: Arc::clone(&store.latch),
            set: DeviceSet::new(setup.devices, layout.format.d, store.tracer.clone()),
            gates: None,
            parts: vec![None; prefix.len()],
            uploaded: prefix.iter().map(|&n| vec![false; n as usize]).collect(),
            widths: setup.widths,
            buffers: None,
            at_once: setup.at_once,
            layer: 0,
            rows: PassRows::default(),
            passing: Passing::default(),
            groups: None,
            each: VecDeque::new(),
            lost: false,
            rests: false,
            trials,
            fired: 0,
            bytes: 0,
            waited: Duration::ZERO,
            layout,
        };
        lane.set.prepare(&[Program::Room(setup.room)]).result()?;
        for (bank, part) in lane.parts.iter_mut().enumerate() {
            let neurons = held_neurons(&lane.layout, bank as u32, &prefix);
            if neurons > 0 {
                *part = Some(lane.set.held(neurons)?);
            }
        }
        let reserved = lane.reserve_buffers(setup.room.rows);
        reserved.map_err(DeviceError::from)?;
        let mut outside = Outside::new(prefix);
        if let Some(experts) = setup.experts {
            lane.set_groups(experts, &setup.room, &mut outside);
        }
        Ok((lane, outside))
    }

    /// Has it compute experts in groups: of their layers nothing is computed otherwise.
    fn set_groups(&mut self, experts: ExpertSetup, room: &Room, outside: &mut Outside) {
        let groups = GroupLane::new(experts, outside.prefix(), room);
        for layer in (0..self.layout.layers()).filter(|&layer| groups.has(layer)) {
            for bank in self.layout.banks_of(layer) {
                outside.computed[bank as usize] = 0;
            }
        }
        self.groups = Some(groups);
    }

    /// Uploads a cluster that it is to hold, unless it has it.
    ///
    /// # Errors
    /// The driver's.
    pub fn upload(
        &mut self,
        [bank, cluster]: [u32; 2],
        rows: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), Error> {
        let of_bank = &mut self.uploaded[bank as usize];
        let uploaded = of_bank.get_mut(cluster as usize);
        let (Some(uploaded @ false), Some(part)) = (uploaded, self.parts[bank as usize]) else {
            return Ok(());
        };
        let first = self.layout.cluster_neurons(bank, cluster).start as usize;
        *uploaded = self.set.upload(part, first, rows)?.is_some();
        match self.set.failure() {
            Some(failure) => Err(failure.clone().into()),
            None => Ok(()),
        }
    }

    /// Shares what was uploaded among the devices, and finds the bytes that the CPU may read.
    ///
    /// # Errors
    /// The driver's, unless the CPU can go on.
    pub fn settle(&mut self, outside: &mut Outside) -> Result<(), Error> {
        for (bank, part) in self.parts.iter().enumerate() {
            if let Some(part) = part {
                let bytes = self.set.settle(*part)?;
                let neurons = held_neurons(&self.layout, bank as u32, outside.prefix());
                outside.bytes[bank] = bytes.map(|bytes| (bytes, neurons));
            }
        }
        Ok(())
    }

    /// Makes room for passes of other lengths, of which it computes as much as `widths` say. Devices without memory for that
    /// are not used before there is room for others, or they are [left out](DeviceLane::lose).
    pub fn set_room(&mut self, room: &Room, products: ProductRoom, widths: &Widths) -> Failures {
        // The memory of other lengths is freed in any case.
        self.set.free_sums();
        if let Some(gates) = &self.gates {
            gates.set_results(products.results);
        }
        if let Some(groups) = &mut self.groups {
            groups.set_room(room);
        }
        if self.is_lost() {
            return Failures::default();
        }
        (self.widths, self.rows) = (widths.clone(), PassRows::default());
        let programs = [Program::Room(*room), Program::ProductRoom(products)];
        let mut failures = self.set.prepare(&programs);
        if failures.0.is_empty()
            && let Err(failure) = self.reserve_buffers(room.rows)
        {
            // Not again for each prompt.
            self.at_once = 0;
            failures.0.push(failure);
        }
        failures
    }

    /// Makes the buffers that others pass through, if passes of `rows` rows do that, on the devices with memory for them.
    fn reserve_buffers(&mut self, rows: usize) -> Result<(), Failure> {
        if self.buffers.is_none() && self.at_once > 0 && self.widths.streamed(rows) > 0 {
            self.buffers = Some(self.set.buffers(self.at_once * CLUSTER)?);
        }
        Ok(())
    }
}

/// Neurons of a bank's clusters that a device holds.
fn held_neurons(layout: &Layout, bank: u32, prefix: &[u32]) -> usize {
    match prefix[bank as usize] {
        0 => 0,
        clusters => layout.cluster_neurons(bank, clusters - 1).end as usize,
    }
}
