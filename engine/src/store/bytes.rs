//! The bytes of ready clusters, as compute threads see them, and their checksums.

use std::sync::PoisonError;

use emberflow_storage::arena::Slot;
use emberflow_storage::cache::Key;
use emberflow_storage::trace::{Kind, Open};

use super::content::SlotContent;
use super::hot::{vectors, write};
use super::neurons::NeuronStore;
use super::regions::CLUSTER;
use super::work::{Held, Source, Step};
use crate::error::Error;

/// The bytes of one neuron.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NeuronBytes<'a> {
    /// Gate part; empty when Gate rows are resident.
    pub gate: &'a [u8],
    /// Up row.
    pub up: &'a [u8],
    /// Down column.
    pub down: &'a [u8],
    /// Resident scales; empty when inline.
    pub scales: &'a [u8],
}

/// Where a ready cluster's bytes are.
#[derive(Clone, Copy)]
enum Place<'a> {
    Nowhere,
    /// A slot of the hot region.
    Hot(&'a [u8]),
    /// A device's part of the bank, of so many neurons: rows matrix by matrix.
    Shared(&'a [u8], usize),
    /// A stream buffer, laid out as on flash, from the first bundle on.
    Stream {
        bundles: &'a [u8],
        unchecked: bool,
    },
    /// Cold slots, by needed neuron.
    Cold(&'a [Held]),
    Mapped,
}

/// The needed neurons of a ready cluster.
#[derive(Clone, Copy)]
pub(crate) struct ClusterBytes<'a> {
    store: &'a NeuronStore,
    bank: u32,
    cluster: u32,
    ids: &'a [u32],
    content: &'a SlotContent,
    place: Place<'a>,
    /// Its gates are computed before its sums.
    pub gates_known: bool,
}

impl<'a> ClusterBytes<'a> {
    /// Its index in the bank.
    pub fn cluster(&self) -> u32 {
        self.cluster
    }

    /// Packed ids of its needed neurons, ascending.
    pub fn ids(&self) -> &'a [u32] {
        self.ids
    }

    /// The bytes of the `i`-th needed neuron. `None` if [`resolve`](NeuronStore::resolve) dropped
    /// it, or if it is damaged, which [`intact`](NeuronStore::intact) reports.
    #[inline]
    pub fn neuron(&self, i: usize) -> Option<NeuronBytes<'a>> {
        let (neuron, content) = (self.ids[i], self.content);
        let scales = self.store.resident.scales(self.bank, neuron);
        let bundle = match self.place {
            Place::Hot(unit) => {
                let [gate, up, down] = vectors(content, unit, neuron as usize % CLUSTER);
                return Some(NeuronBytes {
                    gate,
                    up,
                    down,
                    scales,
                });
            }
            Place::Shared(part, neurons) => {
                return Some(self.of_part(part, neurons, neuron as usize, scales));
            }
            Place::Stream { bundles, unchecked } => {
                let at = neuron as usize % CLUSTER * content.stride;
                let bundle = &bundles[at..][..content.stride];
                if unchecked {
                    let key = Key::new(self.bank, neuron);
                    let checked = self.store.check_bundle(key, bundle);
                    self.store.intact_or_damage(checked)?;
                }
                bundle
            }
            Place::Cold(held) => return self.cold(neuron, &held[i], scales),
            Place::Mapped => self.store.mapped_bundle(self.bank, neuron)?,
            Place::Nowhere => return None,
        };
        let format = &self.store.layout().format;
        let (up, down) = format.split_rest(&bundle[content.gate_span..]);
        let gate_len = if content.has_gate {
            content.gate_len
        } else {
            0
        };
        Some(NeuronBytes {
            gate: &bundle[..gate_len],
            up,
            down,
            scales,
        })
    }

    /// A neuron of a device's part of `neurons`. Each row has its scales behind it.
    fn of_part(
        &self,
        part: &'a [u8],
        neurons: usize,
        neuron: usize,
        scales: &'a [u8],
    ) -> NeuronBytes<'a> {
        let format = &self.store.layout.format;
        let row = |matrix: usize| {
            let at = (matrix * neurons + neuron) * format.dtype.row_bytes(format.d);
            &part[at..at + format.gate_len()]
        };
        NeuronBytes {
            gate: row(0),
            up: if format.ungated { &[] } else { row(1) },
            down: row(if format.ungated { 1 } else { 2 }),
            scales,
        }
    }

    /// A neuron in a cold slot.
    #[inline]
    fn cold(&self, neuron: u32, held: &'a Held, scales: &'a [u8]) -> Option<NeuronBytes<'a>> {
        let (store, content) = (self.store, self.content);
        let slot = match held {
            Held::Pinned(slot) => store.cold.bytes(*slot),
            Held::Read(slot) => {
                let key = Key::new(self.bank, neuron);
                store.verified(key, store.cold.bytes(*slot))?
            }
            Held::Gate(slot) => slot.as_slice(),
            Held::Nothing | Held::Coming => return None,
        };
        let shift = store.layout().shift(self.bank, neuron, content.start);
        let gate_len = if content.has_gate {
            content.gate_len
        } else {
            0
        };
        let rest = shift + content.gate_span - content.start;
        let (up, down) = store.layout().format.split_rest(&slot[rest..]);
        Some(NeuronBytes {
            gate: &slot[shift..shift + gate_len],
            up,
            down,
            scales,
        })
    }

    /// Touches the first cache line of every cold neuron, so that the cache misses overlap instead
    /// of each stalling [`neuron`](Self::neuron).
    pub fn touch(&self) {
        let Place::Cold(held) = self.place else {
            return;
        };
        let resident = |held: &&Held| match held {
            Held::Pinned(slot) | Held::Read(slot) => self.store.cold.holds(*slot),
            _ => false,
        };
        std::hint::black_box(held.iter().filter(resident).count());
    }

    /// Copies a streamed cluster to its slot of the hot region.
    pub fn keep(&self, slot: &mut Slot) {
        let Place::Stream { bundles, .. } = self.place else {
            return;
        };
        let layout = &self.store.layout;
        let count = layout.cluster_neurons(self.bank, self.cluster).len();
        let bundles = self.content.bundles(bundles, count, layout.format);
        write(self.content, slot, bundles);
    }

    /// Opens a trace span for the cluster on the calling thread.
    pub fn trace(&self, kind: &'static Kind) -> Option<Open<'a>> {
        let values = [self.store.layer.number as u64, u64::from(self.cluster)];
        self.store.tracer().open(kind, values)
    }
}

impl NeuronStore {
    /// The bytes of a ready item.
    #[inline]
    pub fn cluster(&self, item: usize) -> ClusterBytes<'_> {
        let it = &self.layer.items[item];
        let content = self.content(it.bank);
        let places = it.first..it.end;
        let place = match &it.source {
            Source::Hot(slot) => Place::Hot(self.hot.bytes(*slot)),
            Source::Shared => match &self.tier {
                Some(tier) => (tier.shared(it.bank, it.cluster))
                    .map_or(Place::Nowhere, |(part, neurons)| {
                        Place::Shared(part, neurons)
                    }),
                None => Place::Nowhere,
            },
            Source::Stream(Some(slot)) => {
                let first = it.cluster * CLUSTER as u32;
                let shift = self.layout.shift(it.bank, first, 0);
                Place::Stream {
                    bundles: &slot.as_slice()[shift..],
                    unchecked: it.unchecked,
                }
            }
            Source::Cold => Place::Cold(&self.layer.held[places.clone()]),
            Source::Mapped => Place::Mapped,
            Source::Unused | Source::Stream(None) | Source::Device => Place::Nowhere,
        };
        ClusterBytes {
            store: self,
            bank: it.bank,
            cluster: it.cluster,
            ids: &self.layer.ids[places],
            content,
            place,
            gates_known: self.gates_known(item),
        }
    }

    /// A bundle of the mapped file if its checksums match; else records the damage.
    fn mapped_bundle(&self, bank: u32, neuron: u32) -> Option<&[u8]> {
        let mapped = &self.mapped.as_ref()?.bundles;
        self.intact_or_damage(mapped.bundle(&self.layout.container, bank as usize, neuron))
    }

    /// The bytes of a slot just read if their checksums match; else records the damage.
    pub(super) fn verified<'a>(&self, key: Key, slot: &'a [u8]) -> Option<&'a [u8]> {
        let checked = self.check(key, slot, Step::Sums);
        self.intact_or_damage(checked).map(|()| slot)
    }

    /// The value, if intact; else records the first damage for [`intact`](Self::intact).
    fn intact_or_damage<T>(&self, checked: Result<T, impl Into<Error>>) -> Option<T> {
        let damage = |error: Error| {
            let mut first = self.damage.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(error);
        };
        checked.map_err(|e| damage(e.into())).ok()
    }

    /// Returns damage found by compute threads as an error, after aborting the layer.
    pub fn intact(&mut self) -> Result<(), Error> {
        let Some(error) = self.take_damage() else {
            return Ok(());
        };
        self.abandon_layer();
        self.latch(Err(error))
    }

    /// Verifies the checksums of a neuron read into `slot`.
    pub(super) fn check(&self, key: Key, slot: &[u8], step: Step) -> Result<(), Error> {
        let (bank, content) = (key.bank as usize, self.content(key.bank));
        let shift = self.layout.shift(key.bank, key.neuron, content.start);
        let bundle = &slot[shift..];
        let container = &self.layout.container;
        if content.has_gate {
            container.check_gate(bank, key.neuron, &bundle[..content.gate_span])?;
        }
        if step == Step::Sums {
            let rest = &bundle[content.gate_span - content.start..content.len];
            container.check_rest(bank, key.neuron, rest)?;
        }
        Ok(())
    }

    /// Verifies the checksums of a whole cluster.
    pub(super) fn check_cluster(
        &self,
        bank: u32,
        cluster: u32,
        buffer: &[u8],
    ) -> Result<(), Error> {
        let (neurons, content) = (
            self.layout.cluster_neurons(bank, cluster),
            self.content(bank),
        );
        let shift = self.layout.shift(bank, neurons.start, 0);
        for (neuron, bundle) in neurons.zip(buffer[shift..].chunks_exact(content.stride)) {
            self.check_bundle(Key { bank, neuron }, bundle)?;
        }
        Ok(())
    }

    /// Verifies the checksums of a bundle as on flash.
    fn check_bundle(&self, key: Key, bundle: &[u8]) -> Result<(), Error> {
        let (bank, container) = (key.bank as usize, &self.layout.container);
        let (gate, rest) = bundle.split_at(self.content(key.bank).gate_span);
        container.check_gate(bank, key.neuron, gate)?;
        Ok(container.check_rest(bank, key.neuron, rest)?)
    }
}
