//! Filling memory when a plan takes effect: large sequential reads.

use emberflow_storage::cache::Key;
use emberflow_storage::io::Read;

use super::{NeuronStore, alone};
use crate::Error;
use crate::policy::Keep;

impl NeuronStore {
    /// Reads the banks cluster by cluster: all Gate rows where they stay resident,
    /// the hot clusters, and the neurons behind them until the cold region is full.
    pub(super) fn fill(&mut self) -> Result<(), Error> {
        let (banks, clusters) = (self.banks.count, self.banks.clusters());
        let cold_per_bank = (self.cold.slots() as usize).div_ceil(banks);
        let wanted = |store: &Self, b: usize| {
            if store.gates_resident() {
                return clusters;
            }
            let hot = store.hot.prefix(b as u32) as usize;
            (hot + cold_per_bank.div_ceil(super::super::CLUSTER)).min(clusters)
        };
        let list: Vec<(usize, usize)> = (0..banks)
            .flat_map(|b| (0..wanted(self, b)).map(move |c| (b, c)))
            .collect();
        let mut next = list.into_iter().peekable();
        while next.peek().is_some() || self.io.outstanding() > 0 {
            while let Some(&(bank, c)) = next.peek() {
                let Some(slot) = self.stream.take() else {
                    break;
                };
                next.next();
                let neurons = self.banks.cluster_neurons(c);
                let len = neurons.len() * self.part.stride;
                let (offset, len) = self.banks.cover(bank, neurons.start as u32, 0, len);
                let tag = (bank as u64) << 32 | c as u64;
                self.reads.push(Read::new(tag, offset, len, slot));
            }
            self.io
                .submit(&mut self.reads)
                .map_err(emberflow_storage::Error::from)?;
            let mut arrived = std::mem::take(&mut self.completions);
            self.io
                .wait(&mut arrived, 1)
                .map_err(emberflow_storage::Error::from)?;
            for done in arrived.drain(..) {
                done.result.map_err(emberflow_storage::Error::from)?;
                let (bank, c) = ((done.tag >> 32) as u32, done.tag as u32);
                self.check_cluster(bank, c, done.slot.as_slice())?;
                self.distribute(bank, c, cold_per_bank, done.slot.as_slice());
                self.stream.put(done.slot);
            }
            self.completions = arrived;
        }
        Ok(())
    }

    /// Puts a whole cluster where it belongs.
    fn distribute(&mut self, bank: u32, c: u32, cold_per_bank: usize, buffer: &[u8]) {
        let (b, stride) = (bank as usize, self.part.stride);
        let neurons = self.banks.cluster_neurons(c as usize);
        let shift = self.banks.shift(b, neurons.start as u32, 0);
        let gate_len = self.banks.format.gate_len();
        if let Some(gates) = alone(&mut self.resident).gates_mut(b) {
            for (n, bundle) in neurons.clone().zip(buffer[shift..].chunks_exact(stride)) {
                gates[n * gate_len..(n + 1) * gate_len].copy_from_slice(&bundle[..gate_len]);
            }
        }
        if self.hot.wants(bank, c) {
            self.keep(bank, c, buffer);
            return;
        }
        if self.policy.keep() != Keep::All {
            return;
        }
        let cold = self
            .banks
            .cluster_neurons(self.hot.prefix(bank) as usize)
            .start;
        for (n, bundle) in neurons.zip(buffer[shift..].chunks_exact(stride)) {
            let neuron = n as u32;
            let key = Key { bank, neuron };
            if n - cold >= cold_per_bank {
                return;
            }
            let Some(mut slot) = self.cold.reserve_if_free(key) else {
                return;
            };
            let part = &self.part;
            let shift = self.banks.shift(b, neuron, part.start);
            slot.as_mut_slice()[shift..shift + part.len].copy_from_slice(&bundle[part.start..]);
            self.cold.admit(key, slot);
            self.cold.unpin(key);
        }
    }
}
