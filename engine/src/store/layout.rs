//! The banks of a container as byte ranges, and the aligned reads that cover parts of bundles.

use std::ops::Deref;
use std::sync::Arc;

use emberflow_storage::arena::Arena;
use emberflow_storage::cache::{Eviction, SlotCache};
use emberflow_storage::container::{Container, MappedBundles};
use emberflow_storage::io::{FileSource, IoChoice};
use emberflow_storage::limits::Limits;
use emberflow_storage::profile::{Pattern, ReadCost};

use super::content::{Align, SlotContent};
use super::costs::ReadCosts;
use crate::banks::Banks;
use crate::bundle::NeuronFormat;
use crate::cluster::CLUSTER;
use crate::error::Error;

/// An aligned byte range of the container.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cover {
    pub offset: u64,
    pub len: u32,
}

/// A validated container, its banks by layer, and its direct I/O alignment.
///
/// A bank holds the bundles of one FFN: (layer, expert). Banks are numbered in container order,
/// layer by layer.
pub(crate) struct Layout {
    pub container: Container,
    /// Its banks.
    pub banks: Arc<Banks>,
    align: Align,
}

impl Deref for Layout {
    type Target = Banks;

    fn deref(&self) -> &Banks {
        &self.banks
    }
}

impl Layout {
    /// Groups the banks of `container` by layer, and opens its file for reading. `layers`: the layers with
    /// banks, ascending; they are numbered by their index in this list.
    ///
    /// # Errors
    /// Banks out of order, or a file that cannot be reopened.
    pub fn new(
        container: Container,
        format: NeuronFormat,
        layers: impl Iterator<Item = u32>,
    ) -> Result<(Self, FileSource), Error> {
        let bad = |reason: String| Error::Bundles {
            path: container.path().to_path_buf(),
            reason,
        };
        let layers: Vec<u32> = layers.collect();
        let mut layer_banks = vec![0..0; layers.len()];
        let mut neurons = Vec::with_capacity(container.banks().len());
        for (number, bank) in (0..).zip(container.banks()) {
            let Ok(place) = layers.binary_search(&bank.layer) else {
                return Err(bad(format!(
                    "bank {number} is of layer {}, which has none in the model",
                    bank.layer
                )));
            };
            let banks = &mut layer_banks[place];
            if banks.start == banks.end {
                *banks = number..number;
            }
            if number != banks.end || bank.expert != banks.len() as u32 {
                return Err(bad(format!(
                    "bank {number} is expert {} of layer {}, out of order",
                    bank.expert, bank.layer
                )));
            }
            banks.end = number + 1;
            neurons.push(bank.neurons);
        }
        let empty = (layer_banks.iter()).position(|banks| banks.start == banks.end);
        // A model whose matrices lie by rows has no banks at all.
        if let Some(place) = empty.filter(|_| !neurons.is_empty()) {
            return Err(bad(format!("layer {} has no bank", layers[place])));
        }
        let (source, align) = open_source(&container)?;
        let layout = Self {
            banks: Arc::new(Banks::new(format, layer_banks, neurons)),
            align,
            container,
        };
        Ok((layout, source))
    }

    /// The container's files, opened once more.
    ///
    /// # Errors
    /// A file that cannot be reopened.
    pub fn source(&self) -> Result<FileSource, Error> {
        open_source(&self.container).map(|(source, _)| source)
    }

    /// As [`Banks::set_visited`].
    pub fn set_visited(&mut self, chosen: usize, shared: bool) {
        Arc::make_mut(&mut self.banks).set_visited(chosen, shared);
    }

    /// The container's file, mapped into memory.
    pub fn map(&self) -> Result<MappedBundles, Error> {
        Ok(MappedBundles::new(&self.container)?)
    }

    /// Bytes of the resident scales.
    pub fn resident_scales(&self) -> u64 {
        self.total() * self.format.resident_scales() as u64
    }

    /// Bytes of all Gate rows.
    pub fn gate_bytes(&self) -> u64 {
        let bank = |&n: &u32| Arena::charge(1, n as usize * self.format.gate_len());
        self.sizes().iter().map(bank).sum()
    }

    /// Fewest slots of the cold region: two clusters, for double buffering.
    pub fn min_slots(&self) -> u64 {
        (2 * CLUSTER as u64).min(self.total())
    }

    /// Bytes of the largest bank.
    pub fn most_bank_bytes(&self) -> usize {
        self.most_neurons() * self.container.geometry().stride as usize
    }

    /// Bytes of a stream buffer: one whole cluster.
    pub fn stream_len(&self) -> usize {
        let stride = self.container.geometry().stride as usize;
        let len = CLUSTER.min(self.most_neurons()) * stride + self.slack();
        len.next_multiple_of(4096)
    }

    /// Queue depth while `buffers` stream buffers are filled.
    pub fn stream_depth(&self, buffers: u32) -> u32 {
        let commands = self
            .stream_len()
            .div_ceil(Limits::PRODUCTION.block as usize);
        buffers * u32::try_from(commands).unwrap_or(1)
    }

    /// The error for a model with more neurons than a cache can index.
    pub fn too_many(&self) -> Error {
        Error::Bundles {
            path: self.container.path().to_path_buf(),
            reason: format!(
                "{} neurons in {} banks are more than a cache can index",
                self.total(),
                self.banks()
            ),
        }
    }

    /// Memory alignment of slots.
    pub fn memory_align(&self) -> usize {
        self.align.memory
    }

    /// Largest number of bytes by which alignment extends a range.
    pub fn slack(&self) -> usize {
        self.align.offset.max(self.align.memory)
    }

    /// The aligned read covering `len` bytes of a bundle from byte `start` on.
    pub fn cover(&self, bank: u32, neuron: u32, start: usize, len: usize) -> Cover {
        self.cover_of(self.offset(bank, neuron) + start as u64, len)
    }

    /// The aligned read covering `len` bytes from file offset `from` on.
    pub fn cover_of(&self, from: u64, len: usize) -> Cover {
        let low = from & !(self.align.offset as u64 - 1);
        let high = (from + len as u64).next_multiple_of(self.align.offset as u64);
        let high = high.min(self.container.end_of_file(from)).max(low);
        Cover {
            offset: low,
            len: (high - low) as u32,
        }
    }

    /// The aligned read covering a whole cluster.
    pub fn cover_cluster(&self, bank: u32, cluster: u32) -> Cover {
        let neurons = self.cluster_neurons(bank, cluster);
        let stride = self.container.geometry().stride as usize;
        self.cover(bank, neurons.start, 0, neurons.len() * stride)
    }

    /// Two reads instead of one, for a policy without bundles.
    pub fn halves(&self, whole: Cover) -> [Cover; 2] {
        let unit = self.slack() as u32;
        let first = (whole.len / 2).next_multiple_of(unit).min(whole.len);
        let rest = Cover {
            offset: whole.offset + u64::from(first),
            len: whole.len - first,
        };
        [
            Cover {
                len: first,
                ..whole
            },
            rest,
        ]
    }

    /// Offset of the requested bytes within a read made by [`cover`](Self::cover).
    #[inline]
    pub fn shift(&self, bank: u32, neuron: u32, start: usize) -> usize {
        self.shift_of(self.offset(bank, neuron) + start as u64)
    }

    /// The same for bytes from file offset `from` on.
    #[inline]
    pub fn shift_of(&self, from: u64) -> usize {
        (from & (self.align.offset as u64 - 1)) as usize
    }

    /// File offset of a bundle.
    #[inline]
    pub fn offset(&self, bank: u32, neuron: u32) -> u64 {
        self.container.neuron_offset(bank as usize, neuron)
    }

    /// (Length, alignment) of a slot for `len` bytes at any file offset.
    pub fn piece(&self, len: usize) -> (usize, usize) {
        let cover = len.next_multiple_of(self.align.offset) + self.align.offset;
        (cover.next_multiple_of(self.align.memory), self.align.memory)
    }

    /// Slot layout with or without resident Gate rows.
    pub fn content(&self, gates_resident: bool) -> SlotContent {
        let up_len = self.format.up_len();
        SlotContent::new(
            self.container.geometry(),
            up_len,
            gates_resident,
            self.align,
        )
    }

    /// Bytes of a slot including bookkeeping.
    pub fn slot_charge(&self, gates_resident: bool, eviction: Eviction) -> u64 {
        let overhead = |slots| SlotCache::overhead(eviction, slots, 0);
        self.content(gates_resident).slot_len as u64 + overhead(1) - overhead(0)
    }

    /// Read cost model of the device that holds this container, for one I/O engine and queue depth.
    pub fn read_cost(&self, io: IoChoice, depth: u32) -> ReadCost {
        let (file, path) = (self.container.file(), self.container.path());
        ReadCost::for_file(file, path, io, depth)
    }

    /// Costs of reading the parts of this container's bundles.
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
}

/// Opens the container's file for reading. Uses the page cache if bundles do not fill the device's
/// direct I/O unit: direct I/O would then waste memory per bundle.
fn open_source(container: &Container) -> Result<(FileSource, Align), Error> {
    let again = || {
        container.file().try_clone().map_err(|e| Error::Bundles {
            path: container.path().to_path_buf(),
            reason: format!("cannot open the file again: {e}"),
        })
    };
    let label = container.path().display().to_string();
    if let Some(source) = container.outside_source() {
        let align = align_of(&source);
        return Ok((source, align));
    }
    let direct = FileSource::from_file(again()?, label.clone(), container.base());
    let stride = container.geometry().stride;
    let by_rows = container.banks().is_empty();
    let fits = |align: u32| {
        align.is_power_of_two() && align <= 4096 && (by_rows || stride.is_multiple_of(align))
    };
    let source = match direct.dio_align() {
        Some(align) if !fits(align.offset) => {
            tracing::info!(
                stride,
                unit = align.offset,
                "bundles do not fill the units of direct i/o here; reading through the page cache \
                 (pack the checkpoint again on this device for direct reads)"
            );
            FileSource::buffered_only(again()?, label, container.base())
        }
        _ => direct,
    };
    let align = align_of(&source);
    Ok((source, align))
}

/// Alignment of direct reads; none if reads are buffered.
fn align_of(source: &FileSource) -> Align {
    let none = Align {
        offset: 1,
        memory: 1,
    };
    source.dio_align().map_or(none, |a| Align {
        offset: a.offset as usize,
        memory: a.mem as usize,
    })
}
