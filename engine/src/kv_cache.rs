//! Keys and values of one sequence.
//!
//! Layout per layer: `[kv_head][position][head_dim]`, so that the scores of one
//! head walk memory in order. Entries are f16 (default) or f32; both are rows
//! of the kernels' block formats.

use emberflow_kernels::{Cpu, DType, Row};
use emberflow_models::config::ModelConfig;

/// Keys and values for up to `capacity` positions of every layer.
#[derive(Debug)]
pub struct KvCache {
    dtype: DType,
    kv_heads: usize,
    head_dim: usize,
    capacity: usize,
    /// `[layer][K then V]`, each `kv_heads × capacity × head_dim` elements.
    data: Vec<[Vec<u8>; 2]>,
}

/// Which half of the cache.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Half {
    Keys = 0,
    Values = 1,
}

impl KvCache {
    /// Bytes such a cache holds; saturates.
    pub fn bytes_for(dtype: DType, c: &ModelConfig, capacity: usize) -> u64 {
        [c.layers, c.kv_heads]
            .into_iter()
            .map(u64::from)
            .chain([capacity as u64, dtype.row_bytes(c.head_dim as usize) as u64])
            .fold(2, u64::saturating_mul)
    }

    /// An empty cache. The memory is zero pages until it is used.
    pub fn new(dtype: DType, c: &ModelConfig, capacity: usize) -> Self {
        let (kv_heads, head_dim) = (c.kv_heads as usize, c.head_dim as usize);
        let half = || vec![0u8; kv_heads * capacity * dtype.row_bytes(head_dim)];
        Self {
            dtype,
            kv_heads,
            head_dim,
            capacity,
            data: (0..c.layers).map(|_| [half(), half()]).collect(),
        }
    }

    /// Positions it can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    fn place(&self, head: usize, position: usize) -> std::ops::Range<usize> {
        let row = self.dtype.row_bytes(self.head_dim);
        let start = (head * self.capacity + position) * row;
        start..start + row
    }

    /// Stores one head's vector.
    pub(crate) fn store(
        &mut self,
        cpu: Cpu,
        layer: usize,
        half: Half,
        head: usize,
        position: usize,
        vector: &[f32],
    ) {
        debug_assert!(head < self.kv_heads && position < self.capacity);
        let place = self.place(head, position);
        let stored = &mut self.data[layer][half as usize][place];
        if self.dtype == DType::F16 {
            cpu.f32_to_f16_bytes(vector, stored);
        } else {
            for (bytes, v) in stored.chunks_exact_mut(4).zip(vector) {
                bytes.copy_from_slice(&v.to_le_bytes());
            }
        }
    }

    /// One head's stored vector.
    pub(crate) fn row(&self, layer: usize, half: Half, head: usize, position: usize) -> Row<'_> {
        let bytes = &self.data[layer][half as usize][self.place(head, position)];
        Row::inline(self.dtype, self.head_dim, bytes)
    }
}
