//! The bytes of clusters that are ready: where they lie, their checksums, and
//! what becomes of them afterwards.

use std::ops::Range;

use emberflow_storage::cache::Key;

use super::super::CLUSTER;
use super::layer::{Held, Source, Step};
use super::{NeuronBytes, NeuronStore};
use crate::Error;
use crate::policy::Keep;

impl NeuronStore {
    /// Whether the gates of cluster `c` are computed before its sums.
    pub fn gates_known(&self, c: u32) -> bool {
        let cold = || matches!(self.layer.clusters[c as usize].source, Source::Cold);
        self.gates_resident() || self.reads_gates_first() && cold()
    }

    /// Whether the Gate parts of single neurons are read before their Up and Down.
    pub(super) fn reads_gates_first(&self) -> bool {
        self.part.has_gate && self.gates_first
    }

    /// The bytes of the needed neuron at `place`, which is `neuron`, of a cluster
    /// that is ready. `None` for a neuron that [`resolve`](Self::resolve) gave up.
    #[inline]
    pub fn bytes(&self, place: usize, neuron: u32) -> Option<NeuronBytes<'_>> {
        let c = neuron as usize / CLUSTER;
        let scales = self.resident.scales(self.layer.bank, neuron);
        let part = &self.part;
        let format = &self.banks.format;
        let gate_len = format.gate_len();
        match &self.layer.clusters[c].source {
            Source::Hot(slot) => {
                let [gate, up, down] = self.hot.neuron(*slot, neuron as usize % CLUSTER);
                Some(NeuronBytes {
                    gate,
                    up,
                    down,
                    scales,
                })
            }
            Source::Stream(Some(slot)) => {
                let first = (c * CLUSTER) as u32;
                let bank = self.layer.bank as usize;
                let shift = self.banks.shift(bank, first, 0);
                let at = shift + (neuron - first) as usize * part.stride;
                let bundle = &slot.as_slice()[at..at + part.stride];
                let (up, down) = format.split_rest(&bundle[part.gate_span..]);
                Some(NeuronBytes {
                    gate: &bundle[..gate_len],
                    up,
                    down,
                    scales,
                })
            }
            Source::Cold => {
                let slot = match &self.layer.held[place] {
                    Held::Pinned(slot) => self.cold.bytes(*slot),
                    Held::Read(slot) => self.verified(neuron, self.cold.bytes(*slot))?,
                    Held::Gate(slot) => slot.as_slice(),
                    Held::Nothing | Held::Coming => return None,
                };
                let bank = self.layer.bank as usize;
                let shift = self.banks.shift(bank, neuron, part.start);
                let rest_at = shift + part.gate_span - part.start;
                let gate = if part.has_gate {
                    &slot[shift..shift + gate_len]
                } else {
                    &[]
                };
                let (up, down) = format.split_rest(&slot[rest_at..]);
                Some(NeuronBytes {
                    gate,
                    up,
                    down,
                    scales,
                })
            }
            Source::Mapped => {
                let bank = self.layer.bank as usize;
                let bundle = self.mapped.as_ref()?;
                let bundle = bundle.bundle(&self.banks.container, bank, neuron);
                let bundle = self.intact_or_damage(bundle)?;
                let (up, down) = format.split_rest(&bundle[part.gate_span..]);
                Some(NeuronBytes {
                    gate: &bundle[..gate_len],
                    up,
                    down,
                    scales,
                })
            }
            Source::Unused | Source::Stream(None) => None,
        }
    }

    /// Ends the use of a cluster. A streamed one that belongs in the hot region
    /// is kept there; of another one the cold region keeps the neurons that were needed,
    /// as if each had been read alone, if it `keeps` them.
    pub fn release(&mut self, ids: &[u32], c: u32, keeps: impl Fn(u32) -> bool) {
        let bank = self.layer.bank;
        let cluster = &mut self.layer.clusters[c as usize];
        let (first, end) = (cluster.first, cluster.end);
        match std::mem::replace(&mut cluster.source, Source::Unused) {
            Source::Hot(_) => self.hot.unpin(bank, c),
            Source::Stream(Some(slot)) => {
                if self.hot.wants(bank, c) {
                    self.keep(bank, c, slot.as_slice());
                    // Once is enough.
                    for n in self.banks.cluster_neurons(c as usize) {
                        let neuron = n as u32;
                        self.cold.remove(Key { bank, neuron });
                    }
                } else if !self.scans && self.policy.keep() != Keep::Nothing {
                    self.keep_neurons(&ids[first..end], slot.as_slice(), keeps);
                }
                self.stream.put(slot);
            }
            Source::Cold => {
                for (held, &neuron) in self.layer.held[first..end].iter_mut().zip(&ids[first..end])
                {
                    let held = std::mem::replace(held, Held::Nothing);
                    let key = Key { bank, neuron };
                    match held {
                        Held::Pinned(_) | Held::Read(_) if keeps(neuron) => self.cold.unpin(key),
                        Held::Pinned(_) => self.cold.unpin_unused(key),
                        Held::Read(_) => self.cold.unpin_first_victim(key),
                        Held::Nothing | Held::Gate(_) | Held::Coming => {}
                    }
                }
            }
            Source::Mapped => {}
            Source::Unused | Source::Stream(None) => {}
        }
    }

    /// Copies a whole cluster from its stream buffer to the hot region.
    pub(super) fn keep(&mut self, bank: u32, c: u32, buffer: &[u8]) {
        let neurons = self.banks.cluster_neurons(c as usize);
        let first = neurons.start as u32;
        let shift = self.banks.shift(bank as usize, first, 0);
        let part = &self.part;
        let gate_len = if part.has_gate { part.gate_len } else { 0 };
        let format = self.banks.format;
        let bundles = buffer[shift..].chunks_exact(part.stride);
        let pieces = bundles.take(neurons.len()).map(|bundle| {
            let (up, down) = format.split_rest(&bundle[part.gate_span..]);
            [&bundle[..gate_len], up, down]
        });
        self.hot.admit(bank, c, pieces);
    }

    /// Copies some neurons of a cluster from its stream buffer to the cold region.
    fn keep_neurons(&mut self, ids: &[u32], buffer: &[u8], keeps: impl Fn(u32) -> bool) {
        let bank = self.layer.bank;
        let (b, part) = (bank as usize, self.part);
        for &neuron in ids.iter().filter(|&&n| keeps(n)) {
            let key = Key { bank, neuron };
            if self.cold.get_pin(key).is_some() {
                self.cold.unpin(key);
                continue;
            }
            if self.cold.is_loading(key) {
                continue;
            }
            let Some(mut slot) = self.cold.reserve(key) else {
                return;
            };
            let first = neuron - neuron % CLUSTER as u32;
            let shift = self.banks.shift(b, first, 0);
            let at = shift + (neuron - first) as usize * part.stride;
            let bundle = &buffer[at..at + part.stride];
            let to = self.banks.shift(b, neuron, part.start);
            slot.as_mut_slice()[to..to + part.len].copy_from_slice(&bundle[part.start..]);
            self.cold.admit(key, slot);
            self.cold.unpin(key);
        }
    }

    /// The bytes of a slot just read, if their checksums are right; else they are damage.
    pub(super) fn verified<'a>(&self, neuron: u32, slot: &'a [u8]) -> Option<&'a [u8]> {
        let bank = self.layer.bank;
        let checked = self.check(Key { bank, neuron }, slot, Step::Sums);
        self.intact_or_damage(checked).map(|()| slot)
    }

    /// What is intact; else the first damage is remembered for [`intact`](Self::intact).
    fn intact_or_damage<T>(&self, checked: Result<T, impl Into<Error>>) -> Option<T> {
        let damage = |error: Error| {
            let mut first = self.damage.lock().unwrap_or_else(|e| e.into_inner());
            first.get_or_insert(error);
        };
        checked.map_err(|e| damage(e.into())).ok()
    }

    /// Has the lines that [`bytes`](Self::bytes) begins with on their way, all at once: one after
    /// the other they would cost a wait on memory each.
    pub fn touch(&self, places: Range<usize>) {
        let held = self.layer.held.get(places).unwrap_or(&[]);
        let resident = |held: &Held| match held {
            Held::Pinned(slot) | Held::Read(slot) => self.cold.holds(*slot),
            _ => false,
        };
        std::hint::black_box(held.iter().filter(|h| resident(h)).count());
    }

    /// Verifies the checksums of what a read brought.
    pub(super) fn check(&self, key: Key, slot: &[u8], step: Step) -> Result<(), Error> {
        let (bank, n, part) = (key.bank as usize, key.neuron, &self.part);
        let shift = self.banks.shift(bank, n, part.start);
        let bundle = &slot[shift..];
        let container = &self.banks.container;
        if part.has_gate {
            container.check_gate(bank, n, &bundle[..part.gate_span])?;
        }
        if step == Step::Sums {
            let rest = &bundle[part.gate_span - part.start..part.len];
            container.check_rest(bank, n, rest)?;
        }
        Ok(())
    }

    /// Verifies the checksums of a whole cluster.
    pub(super) fn check_cluster(&self, bank: u32, c: u32, buffer: &[u8]) -> Result<(), Error> {
        let neurons = self.banks.cluster_neurons(c as usize);
        let (b, stride) = (bank as usize, self.part.stride);
        let shift = self.banks.shift(b, neurons.start as u32, 0);
        for (n, bundle) in neurons.zip(buffer[shift..].chunks_exact(stride)) {
            let (gate, rest) = bundle.split_at(self.part.gate_span);
            self.banks.container.check_gate(b, n as u32, gate)?;
            self.banks.container.check_rest(b, n as u32, rest)?;
        }
        Ok(())
    }
}
