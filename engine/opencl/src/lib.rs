//! OpenCL devices: enumeration, memory, and the kernels for FFN clusters (`hidden.cl`, `sums.cl`) and
//! matrix products (`matrix.cl`). This crate sees bytes and numbers; their meaning is the engine's.
//!
//! The OpenCL library is loaded at the first request for a device (`library.rs`), so neither the build nor the
//! rest of the program depends on it. Statically linked programs cannot load libraries and find no device.
//!
//! Work runs on one in-order queue: copy the inputs from staging memory, run two kernels, copy the sums back.
//! Staging memory is not touched until the result is taken, and the host waits once, at the end. Weights that
//! stream to a device with separate memory use one more queue per buffer (`staging.rs`).

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

mod buffers;
mod device;
mod ffn;
mod forms;
mod handles;
mod library;
mod listed;
mod parts;
mod products;
mod staging;
mod tiles;
mod work;

pub use device::Device;
pub use forms::{Dots, Form, Kernels, MANY, Order, Team};
pub use listed::list;
pub use tiles::{TILE_ROWS, Tiles};

/// Version of the kernels: a hash of their source.
pub const KERNELS: u64 = {
    let mut sources = 0xcbf2_9ce4_8422_2325;
    let mut i = 0;
    while i < work::SOURCES.len() {
        sources = hash(sources, work::SOURCES[i].as_bytes());
        i += 1;
    }
    sources
};

/// FNV-1a, continued from `hash`.
const fn hash(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(0x0100_0000_01b3);
        i += 1;
    }
    hash
}

/// An error of a device or its driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);

/// A device of this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listed {
    /// Device name.
    pub name: String,
    /// Driver version.
    pub driver: String,
    /// The device shares the machine's memory.
    pub unified: bool,
    /// Memory size in bytes.
    pub memory: u64,
    /// Size of the largest buffer in bytes.
    pub longest: u64,
    /// The device is a GPU.
    pub gpu: bool,
    /// Compute units.
    pub units: u32,
    /// f32 division and square root are correctly rounded.
    pub divides: bool,
    /// Extension names.
    pub extensions: Vec<String>,
    /// Kernels for float products and for 8-bit integer products.
    pub kernels: [Kernels; 2],
}

/// Shape of an FFN, and the build options of its kernels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spec {
    /// Build options: all definitions that the kernels need except those of a [`Form`] and an [`Order`].
    pub options: String,
    /// Elements per row.
    pub d: usize,
    /// Neurons per cluster.
    pub cluster: usize,
    /// Input bytes per token.
    pub token_bytes: usize,
    /// Rows have scales per group, and tokens are 8-bit integers.
    pub grouped: bool,
}

/// Capacity of the buffers for a piece of work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// Maximum tokens.
    pub rows: usize,
    /// Maximum clusters.
    pub clusters: usize,
    /// Maximum (cluster, token) pairs.
    pub pairs: usize,
}

/// A piece of work.
#[derive(Debug, Clone, Copy)]
pub struct Work<'a> {
    /// Number of the buffer that holds the neurons.
    pub part: usize,
    /// Neurons in that buffer.
    pub neurons: usize,
    /// First neuron to compute.
    pub first: usize,
    /// Clusters to compute.
    pub clusters: usize,
    /// Tokens.
    pub rows: usize,
    /// Input of the tokens.
    pub x: &'a [u8],
    /// Bit `n × rows + row` selects a (neuron, token) pair; `None` selects all.
    pub mask: Option<&'a [u64]>,
    /// Gate biases of the computed neurons; may be empty.
    pub gate_bias: &'a [f32],
    /// Up biases of the computed neurons; may be empty.
    pub up_bias: &'a [f32],
    /// Activated gates of smaller magnitude count as zero.
    pub cut: f32,
    /// Only neurons below this number count.
    pub end: usize,
    /// Which sums to return.
    pub sums: Sums,
}

/// Which sums a piece of work returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    /// One vector per cluster and row.
    Each,
    /// One vector per row, a running total: the clusters' sums, added in order.
    Total {
        /// Start at zero; otherwise continue the previous work's total, which had the same rows.
        begins: bool,
        /// Return the total; otherwise later work continues it.
        ends: bool,
    },
}

impl Sums {
    /// Number of vectors returned for `clusters` clusters and `rows` rows.
    pub fn vectors(self, clusters: usize, rows: usize) -> usize {
        match self {
            Self::Each => clusters * rows,
            Self::Total { ends: true, .. } => rows,
            Self::Total { ends: false, .. } => 0,
        }
    }
}

/// Host memory that a device may read too.
pub type HostBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Shape of a matrix, and the build options of its kernels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MatrixSpec {
    /// Build options, as in [`Spec`].
    pub options: String,
    /// Rows.
    pub rows: usize,
    /// Bytes of quantised values per row.
    pub quants: usize,
    /// Bytes of scales per row, stored after the values.
    pub scales: usize,
    /// Bytes of scales that tiles keep together.
    pub scale: usize,
    /// Input bytes per token.
    pub token_bytes: usize,
}

impl MatrixSpec {
    /// Bytes per row.
    pub fn row_bytes(&self) -> usize {
        self.quants + self.scales
    }

    /// Layout of the rows in tiles.
    pub fn tiles(&self) -> Tiles {
        Tiles {
            quants: self.quants,
            scales: self.scales,
            scale: self.scale,
        }
    }
}

/// A range of rows of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Number of the matrix.
    pub matrix: usize,
    /// Row range.
    pub rows: Range<usize>,
}

/// Counters of a finished piece of work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Taken {
    /// (neuron, token) pairs that fired.
    pub fired: u64,
    /// Time from submission to the last sum by the device's clock; 0 without a clock.
    pub nanoseconds: u64,
}
