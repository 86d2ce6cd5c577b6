//! Keys and values of one sequence.
//!
//! ```text
//! per layer  keys    [kv_head][block of 32 positions][element][32 positions]
//!            values  [kv_head][position][width]    width = head_dim, up to a multiple of 32
//! ```
//!
//! Both are what the attention kernels take: scores are computed for 32 positions at
//! once, and both halves of a head are walked in order. Entries are f16 (default) or f32.

use std::ops::Range;

use emberflow_kernels::{Cpu, DType, GROUP};
use emberflow_models::config::ModelConfig;
use emberflow_storage::io::prefer_huge_pages;

/// Positions whose attention is one piece of work; a multiple of [`GROUP`]. Cutting by
/// position alone makes the sums independent of threads and chunks.
pub(crate) const BLOCK: usize = 256;

/// Keys and values for up to `capacity` positions of every layer.
#[derive(Debug)]
pub struct KvCache {
    shape: Shape,
    /// `[layer][K then V]`.
    data: Vec<[Vec<u8>; 2]>,
    /// Room for what the blocks of one token add up to, see [`KvCache::parts`].
    partials: Vec<f32>,
}

/// Sizes of a layer, all in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub dtype: DType,
    /// Query heads.
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Positions.
    pub capacity: usize,
}

impl Shape {
    fn new(dtype: DType, c: &ModelConfig, capacity: usize) -> Self {
        Self {
            dtype,
            heads: c.heads as usize,
            kv_heads: c.kv_heads as usize,
            head_dim: c.head_dim as usize,
            capacity,
        }
    }

    /// Elements of a stored value.
    fn width(self) -> usize {
        self.head_dim.next_multiple_of(GROUP)
    }

    /// Elements of keys and of values of one head.
    fn head(self) -> [usize; 2] {
        let keys = self.capacity.div_ceil(GROUP).saturating_mul(GROUP);
        [
            keys.saturating_mul(self.head_dim),
            self.capacity.saturating_mul(self.width()),
        ]
    }

    fn bytes(self, elements: usize) -> usize {
        elements.saturating_mul(self.dtype.row_bytes(1))
    }

    /// Elements of [`KvCache::partials`]; none if there is only one block.
    fn partials(self) -> usize {
        match self.capacity.div_ceil(BLOCK) {
            0 | 1 => 0,
            blocks => blocks
                .saturating_mul(self.heads)
                .saturating_mul(self.width() + 2),
        }
    }
}

/// One layer of a cache.
#[derive(Clone, Copy)]
pub(crate) struct LayerKv<'a> {
    shape: Shape,
    keys: &'a [u8],
    values: &'a [u8],
}

impl<'a> LayerKv<'a> {
    /// The format of the entries.
    pub fn dtype(self) -> DType {
        self.shape.dtype
    }

    /// Elements of a stored value, its padding included.
    pub fn width(self) -> usize {
        self.shape.width()
    }

    /// The key blocks of one head that hold `positions`, and the first position of the
    /// first block.
    pub fn keys(self, head: usize, positions: Range<usize>) -> (&'a [u8], usize) {
        let shape = self.shape;
        let start = positions.start / GROUP * GROUP;
        let end = positions.end.next_multiple_of(GROUP);
        let head = head * shape.head()[0];
        let [from, to] = [start, end].map(|p| shape.bytes(head + p * shape.head_dim));
        (&self.keys[from..to], start)
    }

    /// The values of one head at `positions`.
    pub fn values(self, head: usize, positions: Range<usize>) -> &'a [u8] {
        let shape = self.shape;
        let head = head * shape.head()[1];
        let ends = [positions.start, positions.end];
        let [from, to] = ends.map(|p| shape.bytes(head + p * shape.width()));
        &self.values[from..to]
    }
}

impl KvCache {
    /// Bytes such a cache holds; saturates.
    pub fn bytes_for(dtype: DType, c: &ModelConfig, capacity: usize) -> u64 {
        let shape = Shape::new(dtype, c, capacity);
        let [keys, values] = shape.head();
        let head = shape.bytes(keys.saturating_add(values)) as u64;
        let partials = 4u64.saturating_mul(shape.partials() as u64);
        head.saturating_mul(u64::from(c.kv_heads))
            .saturating_mul(u64::from(c.layers))
            .saturating_add(partials)
    }

    /// An empty cache. The memory is zero pages until it is used.
    pub fn new(dtype: DType, c: &ModelConfig, capacity: usize) -> Self {
        Self::with_shape(Shape::new(dtype, c, capacity), c.layers as usize)
    }

    /// An empty cache of `layers` layers.
    pub(crate) fn with_shape(shape: Shape, layers: usize) -> Self {
        let layer = || {
            let head = shape.head();
            head.map(|elements| {
                let mut part = vec![0u8; shape.bytes(elements) * shape.kv_heads];
                // Long contexts are read as fast as weights only from huge pages.
                prefer_huge_pages(&mut part);
                part
            })
        };
        Self {
            data: (0..layers).map(|_| layer()).collect(),
            partials: vec![0.0; shape.partials()],
            shape,
        }
    }

    /// Positions it can hold.
    pub fn capacity(&self) -> usize {
        self.shape.capacity
    }

    /// Bytes of the keys and values of one position of every layer.
    pub fn position_bytes(&self) -> u64 {
        let shape = self.shape;
        let head = shape.bytes(shape.head_dim + shape.width());
        (self.data.len() * shape.kv_heads * head) as u64
    }

    /// Overwrites everything with a small number.
    pub(crate) fn fill(&mut self) {
        for part in self.data.iter_mut().flatten() {
            part.fill(0x2c);
        }
    }

    /// Stores one head's key.
    pub(crate) fn store_key(
        &mut self,
        cpu: Cpu,
        layer: usize,
        head: usize,
        position: usize,
        key: &[f32],
    ) {
        let shape = self.shape;
        debug_assert!(head < shape.kv_heads && position < shape.capacity);
        let block = head * shape.head()[0] + position / GROUP * GROUP * shape.head_dim;
        let at = shape.bytes(block + position % GROUP);
        let (step, size) = (shape.bytes(GROUP), shape.bytes(1));
        let places = self.data[layer][0][at..].chunks_mut(step);
        let mut elements = [0u8; 4 * GROUP];
        let mut places = places.map(|place| &mut place[..size]);
        for part in key.chunks(GROUP) {
            let elements = &mut elements[..shape.bytes(part.len())];
            write(cpu, shape.dtype, part, elements);
            for (element, place) in elements.chunks_exact(size).zip(&mut places) {
                place.copy_from_slice(element);
            }
        }
    }

    /// Stores one head's value.
    pub(crate) fn store_value(
        &mut self,
        cpu: Cpu,
        layer: usize,
        head: usize,
        position: usize,
        value: &[f32],
    ) {
        let shape = self.shape;
        debug_assert!(head < shape.kv_heads && position < shape.capacity);
        let at = shape.bytes(head * shape.head()[1] + position * shape.width());
        let bytes = shape.bytes(value.len());
        let stored = &mut self.data[layer][1][at..at + bytes];
        write(cpu, shape.dtype, value, stored);
    }

    /// One layer to read.
    pub(crate) fn layer(&self, layer: usize) -> LayerKv<'_> {
        let [keys, values] = &self.data[layer];
        LayerKv {
            shape: self.shape,
            keys,
            values,
        }
    }

    /// A cache of the same size that holds the first `positions` too. The memory behind them is
    /// zero pages until it is used.
    pub(crate) fn fork(&self, positions: usize) -> Self {
        let shape = self.shape;
        let mut copy = Self::with_shape(shape, self.data.len());
        let used = [
            positions.next_multiple_of(GROUP) * shape.head_dim,
            positions * shape.width(),
        ];
        for (from, to) in self.data.iter().zip(&mut copy.data) {
            for (i, (from, to)) in from.iter().zip(to).enumerate() {
                let [head, used] = [shape.head()[i], used[i]].map(|n| shape.bytes(n));
                let heads = from.chunks_exact(head.max(1));
                for (from, to) in heads.zip(to.chunks_exact_mut(head.max(1))) {
                    to[..used].copy_from_slice(&from[..used]);
                }
            }
        }
        copy
    }

    /// One layer to read, and memory for the partial results of one token: for every
    /// block of [`BLOCK`] positions and every query head `width + 2` floats. It is empty
    /// if the capacity is one block.
    pub(crate) fn parts(&mut self, layer: usize) -> (LayerKv<'_>, &mut [f32]) {
        let [keys, values] = &self.data[layer];
        let layer = LayerKv {
            shape: self.shape,
            keys,
            values,
        };
        (layer, &mut self.partials)
    }
}

/// Writes floats in the format of the cache.
fn write(cpu: Cpu, dtype: DType, from: &[f32], to: &mut [u8]) {
    if dtype == DType::F16 {
        cpu.f32_to_f16_bytes(from, to);
    } else {
        for (bytes, v) in to.chunks_exact_mut(4).zip(from) {
            bytes.copy_from_slice(&v.to_le_bytes());
        }
    }
}
