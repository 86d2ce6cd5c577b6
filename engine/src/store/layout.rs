//! The banks of a container as byte ranges, and the aligned reads that cover parts of bundles.

use std::ops::Range;

use emberflow_storage::arena::Arena;
use emberflow_storage::cache::{Eviction, SlotCache};
use emberflow_storage::container::{Container, MappedBundles};
use emberflow_storage::io::{FileSource, IoChoice};
use emberflow_storage::limits::Limits;
use emberflow_storage::profile::{Pattern, ReadCost};

use super::content::{Align, SlotContent};
use super::costs::ReadCosts;
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
pub struct Layout {
    /// The container.
    pub container: Container,
    /// Format of its bundles.
    pub format: NeuronFormat,
    /// Banks of each layer.
    layers: Vec<Range<u32>>,
    /// Neurons of each bank.
    neurons: Vec<u32>,
    /// Most clusters visited at once; most neurons visited by a row.
    at_once: usize,
    neurons_visited: usize,
    align: Align,
}

impl Layout {
    /// Groups the banks of `container` by layer, and opens its file for reading. `layers`: the layers with
    /// banks, ascending; they are numbered by their index in this list.
    ///
    /// # Errors
    /// Banks out of order, or a file that cannot be reopened.
    pub(crate) fn new(
        container: Container,
        format: NeuronFormat,
        layers: impl Iterator<Item = u32>,
    ) -> Result<(Self, FileSource), Error> {
        let bad = |reason: String| Error::Bundles {
            path: container.path().to_path_buf(),
            reason,
        };
        let layers: Vec<u32> = layers.collect();
        let mut of_layer = vec![0..0; layers.len()];
        let mut neurons = Vec::with_capacity(container.banks().len());
        for (number, bank) in (0..).zip(container.banks()) {
            let Ok(place) = layers.binary_search(&bank.layer) else {
                return Err(bad(format!(
                    "bank {number} is of layer {}, which has none in the model",
                    bank.layer
                )));
            };
            let banks = &mut of_layer[place];
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
        if let Some(place) = of_layer.iter().position(|banks| banks.start == banks.end) {
            return Err(bad(format!("layer {} has no bank", layers[place])));
        }
        let (source, align) = open_source(&container)?;
        let mut layout = Self {
            format,
            layers: of_layer,
            neurons,
            at_once: 0,
            neurons_visited: 0,
            align,
            container,
        };
        layout.set_visited(usize::MAX, true);
        Ok((layout, source))
    }

    /// Limits the clusters of a layer visited at once to those that one row visits: the `chosen`
    /// largest experts of a layer with several banks, plus its last bank if `shared`.
    pub(crate) fn set_visited(&mut self, chosen: usize, shared: bool) {
        let of_layer = |banks: &Range<u32>, of: &dyn Fn(u32) -> usize| {
            let experts = banks.len() - usize::from(shared && banks.len() > 1);
            let most = (banks.clone().take(experts).map(of).max()).unwrap_or(0);
            let rest: usize = banks.clone().skip(experts).map(of).sum();
            chosen.min(experts).saturating_mul(most) + rest
        };
        let clusters = |bank| self.clusters(bank);
        let most = self.layers.iter().map(|banks| of_layer(banks, &clusters));
        let neurons = |bank| self.neurons(bank);
        let all = self.layers.iter().map(|banks| of_layer(banks, &neurons));
        let mean = all.sum::<usize>().div_ceil(self.layers.len().max(1));
        self.at_once = most.max().unwrap_or(0);
        self.neurons_visited = mean.min(self.most_in_layer());
    }

    /// Whether any layer has several banks, of which a row visits only some.
    pub fn has_experts(&self) -> bool {
        self.neurons.len() > self.layers.len()
    }

    /// Most clusters that a row visits in a layer.
    pub fn clusters_at_once(&self) -> usize {
        self.at_once
    }

    /// Neurons in these clusters.
    pub(crate) fn neurons_at_once(&self) -> usize {
        (self.at_once * CLUSTER).min(self.most_in_layer())
    }

    /// Neurons that a row visits in a layer, on average.
    pub(crate) fn neurons_visited(&self) -> usize {
        self.neurons_visited
    }

    /// The container's file, mapped into memory.
    pub(crate) fn map(&self) -> Result<MappedBundles, Error> {
        Ok(MappedBundles::new(&self.container)?)
    }

    /// Number of banks.
    pub fn banks(&self) -> usize {
        self.neurons.len()
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The banks of a layer; empty beyond the last layer.
    pub fn banks_of(&self, layer: usize) -> Range<u32> {
        self.layers.get(layer).cloned().unwrap_or(0..0)
    }

    /// The layer of a bank.
    pub fn layer_of(&self, bank: u32) -> usize {
        self.layers.partition_point(|banks| banks.end <= bank)
    }

    /// Neurons of each bank.
    pub(crate) fn sizes(&self) -> &[u32] {
        &self.neurons
    }

    /// Neurons of a bank.
    pub fn neurons(&self, bank: u32) -> usize {
        self.neurons[bank as usize] as usize
    }

    /// Neurons of the largest bank.
    pub fn most_neurons(&self) -> usize {
        self.neurons.iter().max().map_or(0, |&n| n as usize)
    }

    /// Neurons of all banks of the largest layer.
    pub(crate) fn most_in_layer(&self) -> usize {
        let of_layer = |banks: &Range<u32>| banks.clone().map(|b| self.neurons(b)).sum();
        self.layers.iter().map(of_layer).max().unwrap_or(0)
    }

    /// Neurons of the whole model.
    pub(crate) fn total(&self) -> u64 {
        self.neurons.iter().map(|&n| u64::from(n)).sum()
    }

    /// Clusters of a bank.
    pub(crate) fn clusters(&self, bank: u32) -> usize {
        self.neurons(bank).div_ceil(CLUSTER)
    }

    /// Clusters of each bank.
    pub fn clusters_of_each(&self) -> Vec<u32> {
        let clusters = |&n: &u32| n.div_ceil(CLUSTER as u32);
        self.neurons.iter().map(clusters).collect()
    }

    /// Clusters of the whole model.
    pub fn total_clusters(&self) -> u64 {
        self.clusters_of_each().iter().map(|&n| u64::from(n)).sum()
    }

    /// Neurons of a cluster.
    pub fn cluster_neurons(&self, bank: u32, cluster: u32) -> Range<u32> {
        let first = cluster * CLUSTER as u32;
        first..(first + CLUSTER as u32).min(self.neurons[bank as usize])
    }

    /// Bytes of the resident scales.
    pub(crate) fn resident_scales(&self) -> u64 {
        self.total() * self.format.resident_scales() as u64
    }

    /// Bytes of all Gate rows.
    pub(crate) fn gate_bytes(&self) -> u64 {
        let bank = |&n: &u32| Arena::charge(1, n as usize * self.format.gate_len());
        self.neurons.iter().map(bank).sum()
    }

    /// Fewest slots of the cold region: two clusters, for double buffering.
    pub(crate) fn min_slots(&self) -> u64 {
        (2 * CLUSTER as u64).min(self.total())
    }

    /// Bytes of the largest bank.
    pub(crate) fn most_bank_bytes(&self) -> usize {
        self.most_neurons() * self.container.geometry().stride as usize
    }

    /// Bytes of a stream buffer: one whole cluster.
    pub(crate) fn stream_len(&self) -> usize {
        let stride = self.container.geometry().stride as usize;
        let len = CLUSTER.min(self.most_neurons()) * stride + self.slack();
        len.next_multiple_of(4096)
    }

    /// Queue depth while `buffers` stream buffers are filled.
    pub(crate) fn stream_depth(&self, buffers: u32) -> u32 {
        let commands = self
            .stream_len()
            .div_ceil(Limits::PRODUCTION.block as usize);
        buffers * u32::try_from(commands).unwrap_or(1)
    }

    /// The error for a model with more neurons than a cache can index.
    pub(crate) fn too_many(&self) -> Error {
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
    pub(crate) fn memory_align(&self) -> usize {
        self.align.memory
    }

    /// Largest number of bytes by which alignment extends a range.
    pub(crate) fn slack(&self) -> usize {
        self.align.offset.max(self.align.memory)
    }

    /// The aligned read covering `len` bytes of a bundle from byte `start` on.
    pub(crate) fn cover(&self, bank: u32, neuron: u32, start: usize, len: usize) -> Cover {
        self.cover_of(self.offset(bank, neuron) + start as u64, len)
    }

    /// The aligned read covering `len` bytes from file offset `from` on.
    pub(crate) fn cover_of(&self, from: u64, len: usize) -> Cover {
        let low = from & !(self.align.offset as u64 - 1);
        let high = (from + len as u64).next_multiple_of(self.align.offset as u64);
        Cover {
            offset: low,
            len: (high - low) as u32,
        }
    }

    /// The aligned read covering a whole cluster.
    pub(crate) fn cover_cluster(&self, bank: u32, cluster: u32) -> Cover {
        let neurons = self.cluster_neurons(bank, cluster);
        let stride = self.container.geometry().stride as usize;
        self.cover(bank, neurons.start, 0, neurons.len() * stride)
    }

    /// Two reads instead of one, for the ablation without bundles.
    pub(crate) fn halves(&self, whole: Cover) -> [Cover; 2] {
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
    pub(crate) fn shift(&self, bank: u32, neuron: u32, start: usize) -> usize {
        self.shift_of(self.offset(bank, neuron) + start as u64)
    }

    /// The same for bytes from file offset `from` on.
    #[inline]
    pub(crate) fn shift_of(&self, from: u64) -> usize {
        (from & (self.align.offset as u64 - 1)) as usize
    }

    /// File offset of a bundle.
    #[inline]
    pub(crate) fn offset(&self, bank: u32, neuron: u32) -> u64 {
        self.container.neuron_offset(bank as usize, neuron)
    }

    /// (Length, alignment) of a slot for `len` bytes at any file offset.
    pub(crate) fn piece(&self, len: usize) -> (usize, usize) {
        let cover = len.next_multiple_of(self.align.offset) + self.align.offset;
        (cover.next_multiple_of(self.align.memory), self.align.memory)
    }

    /// Slot layout with or without resident Gate rows.
    pub(crate) fn content(&self, gates_resident: bool) -> SlotContent {
        let up_len = self.format.up_len();
        SlotContent::new(
            self.container.geometry(),
            up_len,
            gates_resident,
            self.align,
        )
    }

    /// Bytes of a slot including bookkeeping.
    pub(crate) fn slot_charge(&self, gates_resident: bool, eviction: Eviction) -> u64 {
        let overhead = |slots| SlotCache::overhead(eviction, slots, 0);
        self.content(gates_resident).slot_len as u64 + overhead(1) - overhead(0)
    }

    /// Read cost model of the device that holds this container, for one I/O engine and queue depth.
    pub(crate) fn read_cost(&self, io: IoChoice, depth: u32) -> ReadCost {
        let (file, path) = (self.container.file(), self.container.path());
        ReadCost::for_file(file, path, io, depth)
    }

    /// Costs of reading the parts of this container's bundles.
    pub(crate) fn read_costs(&self, device: &ReadCost, fire_share: f64) -> ReadCosts {
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
    let direct = FileSource::from_file(again()?, label.clone(), container.base());
    let stride = container.geometry().stride;
    let fits =
        |align: u32| align.is_power_of_two() && align <= 4096 && stride.is_multiple_of(align);
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
    let align = source.dio_align().map_or(
        Align {
            offset: 1,
            memory: 1,
        },
        |a| Align {
            offset: a.offset as usize,
            memory: a.mem as usize,
        },
    );
    Ok((source, align))
}
