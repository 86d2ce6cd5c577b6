//! Warms memory when a plan takes effect, with large sequential reads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Builder;

use emberflow_storage::arena::ArenaPages;
use emberflow_storage::io::Priority;

use super::neurons::NeuronStore;
use super::regions::CLUSTER;
use super::tag::Tag;
use crate::ablation::Keep;
use crate::device::NeuronRows;
use crate::error::Error;

/// Bytes of memory that are worth a thread.
const LARGE: usize = 64 << 20;

/// About the bytes that a thread clears at a time.
const PART: usize = 8 << 20;

/// Bytes of that thread's stack.
const STACK: usize = 64 << 10;

impl NeuronStore {
    /// Reads the banks from `first` on cluster by cluster: all Gate rows where resident, the hot
    /// clusters, then the next neurons by temperature until the cold region is full.
    ///
    /// Other threads make the memory resident meanwhile, in the order in which it is filled:
    /// clearing its pages takes longer than reading what they will hold.
    pub(super) fn fill(&mut self, first: usize) -> Result<(), Error> {
        let memory = match self.ablation.keep() {
            Keep::All => self.memory_to_fill(first),
            _ => Vec::new(),
        };
        let bytes: usize = memory.iter().map(ArenaPages::len).sum();
        let (next, filled) = (AtomicUsize::new(0), AtomicBool::new(false));
        let clear = || {
            let part = || memory.get(next.fetch_add(1, Ordering::Relaxed));
            let goes_on = |_: &&ArenaPages| !filled.load(Ordering::Relaxed);
            let mut parts = std::iter::from_fn(part).take_while(goes_on);
            let _ = parts.all(ArenaPages::populate);
        };
        std::thread::scope(|scope| {
            for _ in 0..self.threads.min(bytes / LARGE) {
                // Without threads, pages are cleared when they are first used.
                let thread = Builder::new().name("ember-pages".into()).stack_size(STACK);
                let _ = thread.spawn_scoped(scope, clear);
            }
            let outcome = self.read_all(first);
            filled.store(true, Ordering::Relaxed);
            outcome
        })
    }

    /// The memory that the banks from `first` on fill, in this order and in parts of some megabytes.
    fn memory_to_fill(&self, first: usize) -> Vec<ArenaPages> {
        let regions = [self.hot.pages(), self.cold.arena().pages()];
        let (banks, whole) = (
            self.layout.banks(),
            regions.iter().map(ArenaPages::len).sum(),
        );
        let steps = banks.clamp(1, 1 + usize::div_ceil(whole, PART));
        let gates = |step: usize| {
            let of_step = banks * step / steps..banks * (step + 1) / steps;
            let filled = of_step.filter(move |&bank| bank >= first);
            filled.filter_map(|bank| self.resident.gate_pages(bank as u32))
        };
        let parts = |step: usize| {
            let of_regions = regions.iter().map(move |pages| pages.part(step, steps));
            gates(step).chain(of_regions)
        };
        (0..steps).flat_map(parts).collect()
    }

    fn read_all(&mut self, first: usize) -> Result<(), Error> {
        let all = self.layout.banks() as u32;
        let with_cold = (0..all).filter(|&bank| self.has_cold(bank)).count();
        let cold_per_bank = (self.cold.slots() as usize).div_ceil(with_cold.max(1));
        let wanted = |bank: u32| {
            let clusters = self.layout.clusters(bank) as u32;
            if self.gates_resident(bank) {
                return clusters;
            }
            let behind = match self.has_cold(bank) {
                true => cold_per_bank.div_ceil(CLUSTER) as u32,
                false => 0,
            };
            (self.hot.prefix(bank) + behind).min(clusters)
        };
        let list: Vec<(u32, u32)> = (first as u32..all)
            .flat_map(|bank| (0..wanted(bank)).map(move |cluster| (bank, cluster)))
            .collect();
        let mut next = list.into_iter().peekable();
        while next.peek().is_some() || self.reader.outstanding() > 0 {
            while let Some(&(bank, cluster)) = next.peek() {
                let now = Priority::Now;
                if !(self.reader).request_cluster(&self.layout, bank, cluster, now)? {
                    break;
                }
                next.next();
            }
            self.reader.submit()?;
            let mut arrived = self.reader.wait(0)?;
            for done in arrived.drain(..) {
                done.result.map_err(emberflow_storage::Error::from)?;
                if let Tag::Cluster { bank, cluster } = Tag::from_bits(done.tag) {
                    self.check_cluster(bank, cluster, done.slot.as_slice())?;
                    self.distribute(bank, cluster, cold_per_bank, done.slot.as_slice())?;
                }
                self.reader.put(done.slot);
            }
            self.reader.give_back(arrived);
        }
        Ok(())
    }

    /// Copies a whole cluster to its regions.
    fn distribute(
        &mut self,
        bank: u32,
        cluster: u32,
        cold_per_bank: usize,
        buffer: &[u8],
    ) -> Result<(), Error> {
        let stride = self.content(bank).stride;
        let neurons = self.layout.cluster_neurons(bank, cluster);
        let shift = self.layout.shift(bank, neurons.start, 0);
        let gate_len = self.layout.format.gate_len();
        let bundles = || neurons.clone().zip(buffer[shift..].chunks_exact(stride));
        if let Some(gates) = self.resident_mut().gates_mut(bank) {
            for (neuron, bundle) in bundles() {
                let at = neuron as usize * gate_len;
                gates[at..at + gate_len].copy_from_slice(&bundle[..gate_len]);
            }
        }
        if let Some(tier) = &self.tier {
            if tier.lacks(bank, cluster) {
                self.upload(bank, cluster, buffer)?;
            }
            if (cluster as usize) < self.held_on_device(bank) {
                return Ok(());
            }
        }
        if self.hot.wants(bank, cluster) {
            self.keep_cluster(bank, cluster, buffer);
            return Ok(());
        }
        if self.ablation.keep() == Keep::Nothing || !self.has_cold(bank) {
            return Ok(());
        }
        let first_cold = self.hot.prefix(bank) as usize * CLUSTER;
        for (neuron, bundle) in bundles() {
            let behind = neuron as usize - first_cold;
            if behind >= cold_per_bank || !self.keep_if_free(bank, neuron, bundle) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Uploads a whole cluster to the device.
    fn upload(&mut self, bank: u32, cluster: u32, buffer: &[u8]) -> Result<(), Error> {
        let (content, format) = (*self.content(bank), self.layout.format);
        let neurons = self.layout.cluster_neurons(bank, cluster);
        let shift = self.layout.shift(bank, neurons.start, 0);
        let (resident, first) = (self.resident.clone(), neurons.start as usize);
        let bundles = neurons.zip(buffer[shift..].chunks_exact(content.stride));
        let mut rows = bundles.map(|(neuron, bundle)| {
            let scales = resident.scales(bank, neuron);
            let (up, down) = format.split_rest(&bundle[content.gate_span..]);
            NeuronRows {
                gate: format.gate(bundle, scales),
                up: (!format.ungated).then(|| format.up(up, scales)),
                down: format.down(down, scales),
            }
        });
        match &mut self.tier {
            Some(tier) => tier.upload(bank, cluster, first, &mut rows),
            None => Ok(()),
        }
    }
}
