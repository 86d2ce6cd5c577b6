//! Views of the bytes of ready clusters for compute threads, and checksum verification.

use emberflow_storage::arena::Slot;
use emberflow_storage::cache::Key;
use emberflow_storage::trace::{Kind, Open, Tracer};

use super::content::SlotContent;
use super::job::{Held, Step};
use super::latch::Latch;
use super::layout::Layout;
use super::mapping::Mapping;
use super::residency::{Residency, vectors, write};
use crate::cluster::CLUSTER;
use crate::error::Error;

/// The bytes of one neuron.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NeuronBytes<'a> {
    /// Gate row; empty when Gate rows are resident.
    pub gate: &'a [u8],
    /// Up row.
    pub up: &'a [u8],
    /// Down column.
    pub down: &'a [u8],
    /// Resident scales; empty when inline.
    pub scales: &'a [u8],
}

/// Location of a ready cluster's bytes.
#[derive(Clone, Copy)]
pub(super) enum Place<'a> {
    Nowhere,
    /// A slot of the hot region.
    Hot(&'a [u8]),
    /// Rows of a device's part of the bank, which has this many neurons; matrix after matrix.
    Shared(&'a [u8], usize),
    /// A stream buffer with bundles as on flash.
    Stream {
        bundles: &'a [u8],
        unchecked: bool,
    },
    /// Cold slots, by needed neuron.
    Cold(&'a [Held]),
    Mapped,
}

/// The memory that holds clusters.
#[derive(Clone, Copy)]
pub(super) struct ClusterMemory<'a> {
    pub layout: &'a Layout,
    pub residency: &'a Residency,
    pub mapped: Option<&'a Mapping>,
    pub latch: &'a Latch,
    pub tracer: &'a Tracer,
}

/// The needed neurons of a ready cluster.
#[derive(Clone, Copy)]
pub(crate) struct ClusterBytes<'a> {
    pub(super) memory: ClusterMemory<'a>,
    /// The layer, for traces.
    pub(super) layer: usize,
    pub(super) bank: u32,
    pub(super) cluster: u32,
    pub(super) ids: &'a [u32],
    pub(super) content: &'a SlotContent,
    pub(super) place: Place<'a>,
    /// Gates are computed before the sums.
    pub gates_known: bool,
}

impl<'a> ClusterBytes<'a> {
    /// Cluster index in the bank.
    pub fn cluster(&self) -> u32 {
        self.cluster
    }

    /// Packed ids of the needed neurons, ascending.
    pub fn ids(&self) -> &'a [u32] {
        self.ids
    }

    /// The bytes of the `i`-th needed neuron. `None` if [`resolve`](super::NeuronStore::resolve)
    /// dropped it or if it is damaged; [`intact`](super::NeuronStore::intact) reports damage.
    #[inline]
    pub fn neuron(&self, i: usize) -> Option<NeuronBytes<'a>> {
        let (neuron, content) = (self.ids[i], self.content);
        let scales = self.memory.residency.gates().scales(self.bank, neuron);
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
                let offset = neuron as usize % CLUSTER * content.stride;
                let bundle = &bundles[offset..][..content.stride];
                if unchecked {
                    let key = Key::new(self.bank, neuron);
                    let checked = check_bundle(self.memory.layout, content, key, bundle);
                    self.memory.latch.intact(checked)?;
                }
                bundle
            }
            Place::Cold(held) => return self.cold(neuron, &held[i], scales),
            Place::Mapped => {
                let key = Key::new(self.bank, neuron);
                let bundle = (self.memory.mapped)?.bundle(self.memory.layout, key);
                self.memory.latch.intact(bundle)?
            }
            Place::Nowhere => return None,
        };
        let format = &self.memory.layout.format;
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

    /// A neuron in the device's part of the bank. Each row is followed by its scales.
    fn of_part(
        &self,
        part: &'a [u8],
        neurons: usize,
        neuron: usize,
        scales: &'a [u8],
    ) -> NeuronBytes<'a> {
        let format = &self.memory.layout.format;
        let row = |matrix: usize| {
            let offset = (matrix * neurons + neuron) * format.dtype.row_bytes(format.d);
            &part[offset..offset + format.gate_len()]
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
        let (content, ClusterMemory { layout, latch, .. }) = (self.content, self.memory);
        let cache = &self.memory.residency.cold.cache;
        let slot = match held {
            Held::Pinned(slot) => cache.bytes(*slot),
            Held::Read(slot) => {
                let (key, slot) = (Key::new(self.bank, neuron), cache.bytes(*slot));
                latch.intact(check(layout, content, key, slot, Step::Sums))?;
                slot
            }
            Held::Gate(slot) => slot.as_slice(),
            Held::Nothing | Held::Coming => return None,
        };
        let shift = layout.shift(self.bank, neuron, content.start);
        let gate_len = if content.has_gate {
            content.gate_len
        } else {
            0
        };
        let rest = shift + content.gate_span - content.start;
        let (up, down) = layout.format.split_rest(&slot[rest..]);
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
        let cache = &self.memory.residency.cold.cache;
        let resident = |held: &&Held| match held {
            Held::Pinned(slot) | Held::Read(slot) => cache.holds(*slot),
            _ => false,
        };
        std::hint::black_box(held.iter().filter(resident).count());
    }

    /// Copies a streamed cluster to `slot` of the hot region.
    pub fn keep(&self, slot: &mut Slot) {
        let Place::Stream { bundles, .. } = self.place else {
            return;
        };
        let layout = self.memory.layout;
        let count = layout.cluster_neurons(self.bank, self.cluster).len();
        let bundles = self.content.bundles(bundles, count, layout.format);
        write(self.content, slot, bundles);
    }

    /// Opens a trace span for this cluster on the calling thread.
    pub fn trace(&self, kind: &'static Kind) -> Option<Open<'a>> {
        let values = [self.layer as u64, u64::from(self.cluster)];
        self.memory.tracer.open(kind, values)
    }
}

/// Verifies the checksums of a neuron read into `slot`: of its Gate row, or of the whole bundle.
pub(super) fn check(
    layout: &Layout,
    content: &SlotContent,
    key: Key,
    slot: &[u8],
    step: Step,
) -> Result<(), Error> {
    let (bank, container) = (key.bank as usize, &layout.container);
    let bundle = &slot[layout.shift(key.bank, key.neuron, content.start)..];
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
    layout: &Layout,
    content: &SlotContent,
    [bank, cluster]: [u32; 2],
    buffer: &[u8],
) -> Result<(), Error> {
    let neurons = layout.cluster_neurons(bank, cluster);
    let shift = layout.shift(bank, neurons.start, 0);
    for (neuron, bundle) in neurons.zip(buffer[shift..].chunks_exact(content.stride)) {
        check_bundle(layout, content, Key { bank, neuron }, bundle)?;
    }
    Ok(())
}

/// Verifies the checksums of a bundle in flash layout.
fn check_bundle(
    layout: &Layout,
    content: &SlotContent,
    key: Key,
    bundle: &[u8],
) -> Result<(), Error> {
    let (bank, container) = (key.bank as usize, &layout.container);
    let (gate, rest) = bundle.split_at(content.gate_span);
    container.check_gate(bank, key.neuron, gate)?;
    Ok(container.check_rest(bank, key.neuron, rest)?)
}
