//! The container's banks as byte ranges: what a slot holds, and which aligned
//! read covers it.

use emberflow_models::config::ModelConfig;
use emberflow_storage::arena::Arena;
use emberflow_storage::cache::{ColdCache, Policy};
use emberflow_storage::container::{Container, MappedBundles};
use emberflow_storage::io::{Completion, EngineChoice, FileSource, IoThread, Read};
use emberflow_storage::limits::Limits;
use emberflow_storage::profile::{Pattern, ReadCost};

use super::store::Foreseen;
use super::{CLUSTER, FfnShape, ReadCosts};
use crate::Error;
use crate::bundle::NeuronFormat;
use crate::memory::Residency;

/// Whole clusters that can be under way from flash at once: enough for the device
/// to be busy while one is computed.
const STREAM: u32 = 4;

/// The same where long chunks of a prompt stream whole layers: a few for each thread to
/// work on, and as many under way.
const STREAM_PREFILL: u32 = 12;

/// Tokens of a chunk from which on nearly every neuron of a layer is needed by some token
/// (PowerInfer-2 §3.1: 75 % at 32), so that layers are read as a whole.
pub(super) const PREFILL: usize = 32;

/// Who leaves the cold region.
pub(crate) const COLD: Policy = Policy::Lrfu;

/// A checked container and the alignment of direct I/O on it.
pub(crate) struct Banks {
    pub container: Container,
    pub format: NeuronFormat,
    /// Number of banks.
    pub count: usize,
    /// Neurons per bank.
    pub neurons: usize,
    /// Offset and memory alignment of direct I/O; 1 when reads are buffered.
    align: (usize, usize),
    /// Every token needs every neuron.
    pub dense: bool,
    /// Predictors name the neurons that are needed.
    pub predicts: bool,
    /// Buffers for whole clusters on their way.
    pub stream: u32,
}

impl Banks {
    /// Checks that the banks are those of the model, and opens their file for
    /// reads.
    pub fn new(
        container: Container,
        c: &ModelConfig,
        shape: &FfnShape,
        chunk: usize,
    ) -> Result<(Self, FileSource), Error> {
        let bad = |reason: String| Error::Bundles {
            path: container.path().to_path_buf(),
            reason,
        };
        if c.experts != 1 {
            return Err(bad(format!(
                "{} experts per layer; this version runs dense FFNs (1 expert)",
                c.experts
            )));
        }
        let banks = container.banks();
        if banks.len() != c.layers as usize {
            return Err(bad(format!(
                "{} banks, expected one for each of {} layers",
                banks.len(),
                c.layers
            )));
        }
        for (l, bank) in banks.iter().enumerate() {
            if (bank.layer as usize, bank.expert, bank.neurons) != (l, 0, c.ffn) {
                return Err(bad(format!(
                    "bank {l} is layer {} expert {} with {} neurons, \
                     expected layer {l} expert 0 with {}",
                    bank.layer, bank.expert, bank.neurons, c.ffn
                )));
            }
        }
        let file = container
            .file()
            .try_clone()
            .map_err(|e| bad(format!("cannot open the file a second time: {e}")))?;
        let label = container.path().display().to_string();
        let direct = FileSource::from_file(file, label.clone(), container.base());
        let stride = container.geometry().stride;
        let fits =
            |align: u32| align.is_power_of_two() && align <= 4096 && stride.is_multiple_of(align);
        // Bundles smaller than the device's unit would cost a whole unit of memory each; the page
        // cache shares units between them.
        let source = match direct.dio_align() {
            Some(align) if !fits(align.offset) => {
                tracing::info!(
                    stride,
                    unit = align.offset,
                    "bundles do not fill the units of direct i/o here; reading through the page \
                     cache (pack the checkpoint again on this device for direct reads)"
                );
                let file = container
                    .file()
                    .try_clone()
                    .map_err(|e| bad(format!("cannot open the file a third time: {e}")))?;
                FileSource::buffered_only(file, label, container.base())
            }
            _ => direct,
        };
        let align = source
            .dio_align()
            .map_or((1, 1), |a| (a.offset as usize, a.mem as usize));
        let banks = Self {
            format: shape.format,
            count: banks.len(),
            neurons: shape.neurons,
            align,
            dense: shape.dense,
            predicts: false,
            stream: Self::stream_for(chunk),
            container,
        };
        Ok((banks, source))
    }

    /// The container's file, mapped into memory.
    pub fn map(&self) -> Result<MappedBundles, Error> {
        Ok(MappedBundles::new(&self.container)?)
    }

    /// Neurons of the whole model.
    pub fn total(&self) -> u64 {
        (self.count * self.neurons) as u64
    }

    /// Bytes of all Gate rows.
    pub fn gate_bytes(&self) -> u64 {
        let bank = Arena::charge(1, self.neurons * self.format.gate_len());
        self.count as u64 * bank
    }

    /// Bytes of the resident scales.
    pub fn resident_scales(&self) -> u64 {
        self.total() * self.format.resident_scales() as u64
    }

    /// Clusters of each bank.
    pub fn clusters(&self) -> usize {
        self.neurons.div_ceil(CLUSTER)
    }

    /// Clusters of the whole model.
    pub fn total_clusters(&self) -> u64 {
        (self.count * self.clusters()) as u64
    }

    /// Neurons of a cluster.
    pub fn cluster_neurons(&self, cluster: usize) -> std::ops::Range<usize> {
        let first = cluster * CLUSTER;
        first..(first + CLUSTER).min(self.neurons)
    }

    /// Fewest slots of the cold region: two clusters, so that one can be read
    /// while the other is computed.
    pub fn min_slots(&self) -> u64 {
        (2 * CLUSTER as u64).min(self.total())
    }

    /// Stream buffers for chunks of up to `chunk` tokens.
    pub fn stream_for(chunk: usize) -> u32 {
        if chunk >= PREFILL {
            STREAM_PREFILL
        } else {
            STREAM
        }
    }

    /// Bytes of queues, tables and stream buffers for chunks of up to `chunk` tokens.
    pub fn io_bytes(&self, chunk: usize) -> u64 {
        let per_layer = self.neurons * (size_of::<Read>() + 2 * size_of::<Completion>() + 40);
        let units = u32::try_from(self.total_clusters()).unwrap_or(u32::MAX);
        per_layer as u64
            + Foreseen::bytes_for(self.count, self.neurons)
            + ColdCache::overhead(COLD, 0, self.total())
            + ColdCache::overhead(Policy::Lru, units, self.total_clusters())
            + IoThread::overhead(Limits::PRODUCTION)
            + Arena::charge(Self::stream_for(chunk), self.stream_len())
    }

    /// Bytes of a stream buffer: one whole cluster.
    pub fn stream_len(&self) -> usize {
        let stride = self.container.geometry().stride as usize;
        let len = CLUSTER.min(self.neurons) * stride + self.slack();
        len.next_multiple_of(self.slack())
    }

    /// The error of a model with more units than a cache can number.
    pub fn too_many(&self) -> Error {
        Error::Bundles {
            path: self.container.path().to_path_buf(),
            reason: format!(
                "{} banks of {} neurons are more than a cache can number",
                self.count, self.neurons
            ),
        }
    }

    /// First byte of a bundle that a read of Up and Down alone asks for.
    pub fn rest_read(&self) -> usize {
        self.container.geometry().rest_read() as usize
    }

    /// Memory alignment of slots.
    pub fn memory_align(&self) -> usize {
        self.align.1
    }

    /// Bytes to add to a range so that its aligned cover fits.
    pub fn slack(&self) -> usize {
        self.align.0.max(self.align.1)
    }

    /// Aligned read that covers `len` bytes from byte `start` of a bundle on:
    /// offset in the container, and length.
    pub fn cover(&self, bank: usize, neuron: u32, start: usize, len: usize) -> (u64, u32) {
        self.cover_of(
            self.container.neuron_offset(bank, neuron) + start as u64,
            len,
        )
    }

    /// Aligned read that covers `len` bytes from `from` on: offset in the container, and length.
    pub fn cover_of(&self, from: u64, len: usize) -> (u64, u32) {
        let low = from & !(self.align.0 as u64 - 1);
        let high = (from + len as u64).next_multiple_of(self.align.0 as u64);
        (low, (high - low) as u32)
    }

    /// Where the wanted bytes begin in what [`cover`](Self::cover) reads.
    #[inline]
    pub fn shift(&self, bank: usize, neuron: u32, start: usize) -> usize {
        self.shift_of(self.container.neuron_offset(bank, neuron) + start as u64)
    }

    /// The same for bytes from `from` on.
    #[inline]
    pub fn shift_of(&self, from: u64) -> usize {
        (from & (self.align.0 as u64 - 1)) as usize
    }

    /// Length and alignment of a slot for any `len` bytes of the container.
    pub fn piece(&self, len: usize) -> (usize, usize) {
        let (offset, memory) = self.align;
        let cover = len.next_multiple_of(offset) + offset;
        (cover.next_multiple_of(memory), memory)
    }

    /// Bytes of a cache slot.
    pub fn slot_len(&self, residency: Residency) -> u64 {
        self.slot_len_of(&self.part(residency)) as u64
    }

    /// Bytes of a slot for a part.
    pub fn slot_len_of(&self, part: &Part) -> usize {
        part.slot_len(self.align)
    }

    /// What reads from this container's device cost with an I/O engine.
    pub fn read_cost(&self, io: EngineChoice, depth: u32) -> ReadCost {
        let (file, path) = (self.container.file(), self.container.path());
        ReadCost::for_file(file, path, io, depth)
    }

    /// Commands under way when all stream buffers are being filled.
    pub fn stream_depth(&self) -> u32 {
        let commands = self
            .stream_len()
            .div_ceil(Limits::PRODUCTION.block as usize);
        STREAM * u32::try_from(commands).unwrap_or(1)
    }

    /// What reads of its parts cost on a device.
    pub fn read_costs(&self, device: &ReadCost, fire_share: f64) -> ReadCosts {
        let g = self.container.geometry();
        let random = |len: u32| device.read_ns(u64::from(len), Pattern::Random);
        ReadCosts {
            cluster: device.read_ns(self.stream_len() as u64, Pattern::Sequential),
            gate: random(g.gate_read()),
            rest: random(g.stride - g.rest_read()),
            bundle: random(g.stride),
            fire_share,
        }
    }

    /// Bytes of a slot and of its bookkeeping.
    pub fn slot_charge(&self, residency: Residency) -> u64 {
        let slots = |n| ColdCache::overhead(COLD, n, 0);
        self.slot_len(residency) + slots(1) - slots(0)
    }

    /// What a slot holds.
    pub fn part(&self, residency: Residency) -> Part {
        let g = self.container.geometry();
        let start = match residency {
            Residency::Bundles => 0,
            Residency::GatesResident => g.rest_read() as usize,
        };
        Part {
            has_gate: residency == Residency::Bundles,
            start,
            len: g.stride as usize - start,
            stride: g.stride as usize,
            gate_span: g.gate_span as usize,
            gate_len: g.gate_len as usize,
            rest_len: g.rest_len as usize,
        }
    }
}

/// The bytes of a bundle that a slot holds: `[start, start + len)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// Whether the Gate part belongs to it; where it does not fill whole sectors,
    /// its bytes may still lie in the slot.
    pub has_gate: bool,
    pub start: usize,
    pub len: usize,
    pub stride: usize,
    pub gate_span: usize,
    pub gate_len: usize,
    pub rest_len: usize,
}

impl Part {
    /// Its bytes of a neuron without padding.
    pub fn payload(&self) -> usize {
        self.rest_len + if self.has_gate { self.gate_len } else { 0 }
    }

    /// Bytes of a slot for reads of this part with `(offset, memory)` alignment.
    fn slot_len(&self, (offset, memory): (usize, usize)) -> usize {
        let cover = if self.start.is_multiple_of(offset) && self.stride.is_multiple_of(offset) {
            self.len.next_multiple_of(offset)
        } else {
            self.len.next_multiple_of(offset) + offset
        };
        cover.next_multiple_of(memory)
    }
}
