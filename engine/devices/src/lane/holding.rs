//! Memory of devices: clusters of neurons, uploaded when memory is filled, and stream buffers for the others.

use emberflow_engine::Error;
use emberflow_engine::lane::{
    Banks, CLUSTER, Hold, NeuronRows, Outside, ProductRoom, Room, Widths, prefixes,
};

use super::{DeviceLane, GroupLane, PassRows};
use crate::backend::Program;
use crate::device_set::{Failure, Failures};
use crate::error::DeviceError;

impl DeviceLane {
    /// Makes room for the hottest clusters of a store that is about to be filled.
    pub(super) fn make_room_for(&mut self, hold: Hold) -> Result<Outside, Error> {
        let clusters = self.banks.clusters_of_each();
        let hot: u64 = hold.hot.iter().copied().map(u64::from).sum();
        let groups = self.experts.as_ref().map(|model| {
            let times = self.set.first_times();
            model.setup(&hold.visits, times, hold.layer_seconds, hold.chunk)
        });
        let prefix = match &groups {
            Some(setup) => setup.banks.held(hold.clusters),
            None if hold.clusters <= hot && self.facts.same_bits => {
                prefixes(hold.clusters, &hold.hot, &clusters)
            }
            // More than the hot clusters were requested, or the text must not depend on what is hot in a batch.
            None => prefixes(hold.clusters, &clusters, &clusters),
        };
        self.set.set_tracer(hold.tracer);
        if let Some(verdicts) = &self.outcomes {
            // Eighths: what a device is worth changes with the bytes that the CPU has to read.
            let memory = (8.0 * hold.resident).round();
            let of = format!("{}, {memory}/8 of the FFN in memory", self.model);
            self.trials.save_to(verdicts, self.set.devices(), &of);
        }
        self.parts = vec![None; prefix.len()];
        self.uploaded = prefix.iter().map(|&n| vec![false; n as usize]).collect();
        (self.widths, self.at_once) = (hold.widths, hold.at_once);
        self.set.prepare(&[Program::Room(hold.room)]).result()?;
        for (bank, part) in self.parts.iter_mut().enumerate() {
            let neurons = held_neurons(&self.banks, bank as u32, &prefix);
            if neurons > 0 {
                *part = Some(self.set.held(neurons)?);
            }
        }
        let reserved = self.reserve_buffers(hold.room.rows);
        reserved.map_err(DeviceError::from)?;
        let mut outside = Outside::new(prefix);
        if let Some(setup) = groups {
            let groups = GroupLane::new(setup, outside.prefix(), &hold.room);
            // Of layers in groups nothing is computed otherwise.
            for layer in (0..self.banks.layers()).filter(|&layer| groups.has(layer)) {
                for bank in self.banks.banks_of(layer) {
                    outside.computed[bank as usize] = 0;
                }
            }
            self.groups = Some(groups);
        }
        Ok(outside)
    }

    /// Uploads a cluster that devices are to hold, unless they have it.
    pub(super) fn upload_held(
        &mut self,
        [bank, cluster]: [u32; 2],
        rows: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), Error> {
        let of_bank = &mut self.uploaded[bank as usize];
        let uploaded = of_bank.get_mut(cluster as usize);
        let (Some(uploaded @ false), Some(part)) = (uploaded, self.parts[bank as usize]) else {
            return Ok(());
        };
        let first = self.banks.cluster_neurons(bank, cluster).start as usize;
        *uploaded = self.set.upload(part, first, rows)?.is_some();
        match self.set.failure() {
            Some(failure) => Err(failure.clone().into()),
            None => Ok(()),
        }
    }

    /// Shares the uploaded clusters among the devices, and adds the bytes that the CPU may read.
    pub(super) fn settle_held(&mut self, outside: &mut Outside) -> Result<(), Error> {
        for (bank, part) in self.parts.iter().enumerate() {
            if let Some(part) = part {
                let bytes = self.set.settle(*part)?;
                let neurons = held_neurons(&self.banks, bank as u32, outside.prefix());
                outside.bytes[bank] = bytes.map(|bytes| (bytes, neurons));
            }
        }
        Ok(())
    }

    /// Makes room for passes of other lengths. Devices without memory for that are not used before there is room for others.
    pub(super) fn change_room(
        &mut self,
        room: &Room,
        products: &ProductRoom,
        widths: &Widths,
    ) -> Failures {
        // The memory of other lengths is freed in any case.
        self.set.free_sums();
        for shared in &self.products {
            emberflow_engine::lane::Products::set_results(&**shared, products.results);
        }
        if let Some(groups) = &mut self.groups {
            groups.set_room(room);
        }
        if self.set.lost().is_some() {
            return Failures::default();
        }
        (self.widths, self.rows) = (widths.clone(), PassRows::default());
        let programs = [Program::Room(*room), Program::ProductRoom(*products)];
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

    /// Makes stream buffers, if passes of `rows` rows need them, on the devices with memory for them.
    fn reserve_buffers(&mut self, rows: usize) -> Result<(), Failure> {
        if self.buffers.is_none() && self.at_once > 0 && self.widths.streams(rows) {
            self.buffers = Some(self.set.buffers(self.at_once * CLUSTER)?);
        }
        Ok(())
    }

    /// Clusters that the stream buffers have room for.
    pub(super) fn streamed_clusters(&self) -> usize {
        self.buffers
            .map_or(0, |buffers| buffers.len() * self.at_once)
    }
}

/// Neurons of a bank's clusters that devices hold.
fn held_neurons(banks: &Banks, bank: u32, prefix: &[u32]) -> usize {
    match prefix[bank as usize] {
        0 => 0,
        clusters => banks.cluster_neurons(bank, clusters - 1).end as usize,
    }
}
