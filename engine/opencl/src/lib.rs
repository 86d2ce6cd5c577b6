//! An OpenCL device: what there is, its memory, and the kernels that compute the FFN of a part of
//! a bank (`hidden.cl`, `sums.cl`) and products of matrices (`matrix.cl`). It knows bytes and
//! numbers; what they mean is the engine's matter.
//!
//! The OpenCL library is looked for when a device is asked for (`library.rs`): no build and no other
//! use of the program needs it, and all targets use the same code. Static programs cannot load one;
//! there no device is found.
//!
//! One in-order queue. A piece of work is: inputs, from staging memory that stays untouched until
//! the work is taken; two kernels; sums back. The host waits once, at the end. Weights that pass through a device
//! with a memory of its own come by other queues, one for each buffer (`staging.rs`).

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

/// Tells versions of the kernels from each other: a hash of their source.
pub const KERNELS: u64 = {
    let mut of_all = 0xcbf2_9ce4_8422_2325;
    let mut i = 0;
    while i < work::SOURCES.len() {
        of_all = hash(of_all, work::SOURCES[i].as_bytes());
        i += 1;
    }
    of_all
};

/// FNV-1a, from a hash on.
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
    /// Its name.
    pub name: String,
    /// Version of its driver.
    pub driver: String,
    /// Its memory is the machine's.
    pub unified: bool,
    /// Bytes of its memory.
    pub memory: u64,
    /// The longest buffer, in bytes.
    pub longest: u64,
    /// A graphics processor.
    pub gpu: bool,
    /// Compute units.
    pub units: u32,
    /// Divisions and square roots of f32 can be rounded correctly.
    pub divides: bool,
    /// Names of its extensions.
    pub extensions: Vec<String>,
    /// Its kernels for products of floats, and for those of integers of 8 bits.
    pub kernels: [Kernels; 2],
}

/// Kernels for pieces of work.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spec {
    /// Build options: the definitions that the kernels ask for, but those of a [`Form`] and an [`Order`].
    pub options: String,
    /// Elements of a row.
    pub d: usize,
    /// Neurons of a cluster.
    pub cluster: usize,
    /// Bytes of a token's input.
    pub token_bytes: usize,
    /// Rows have groups with scales, and tokens are integers of 8 bits.
    pub grouped: bool,
}

/// The largest pieces of work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// Most tokens.
    pub rows: usize,
    /// Most clusters.
    pub clusters: usize,
    /// Most (cluster, token) pairs.
    pub pairs: usize,
}

/// A piece of work.
#[derive(Debug, Clone, Copy)]
pub struct Work<'a> {
    /// Number of the buffer with the neurons, and how many these are.
    pub part: usize,
    /// See `part`.
    pub neurons: usize,
    /// The first neuron to compute, and the number of clusters from there on.
    pub first: usize,
    /// See `first`.
    pub clusters: usize,
    /// Tokens.
    pub rows: usize,
    /// Their input.
    pub x: &'a [u8],
    /// The pairs that are wanted, bit `n × rows + row`; `None` for all.
    pub mask: Option<&'a [u64]>,
    /// Biases of these neurons, or none.
    pub gate_bias: &'a [f32],
    /// See `gate_bias`.
    pub up_bias: &'a [f32],
    /// Smaller magnitudes of activated gates are zero.
    pub cut: f32,
    /// Neurons of the part that count, from its first one on.
    pub end: usize,
    /// What comes out.
    pub sums: Sums,
}

/// What comes of a piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    /// A vector for each cluster and row.
    Each,
    /// A vector for each row: the clusters' sums, added one after the other.
    Total {
        /// To zero; else to what the work before came to, for as many rows.
        begins: bool,
        /// It is asked for; else further work goes on from there.
        ends: bool,
    },
}

impl Sums {
    /// Vectors that come out of so many clusters and rows.
    pub fn vectors(self, clusters: usize, rows: usize) -> usize {
        match self {
            Self::Each => clusters * rows,
            Self::Total { ends: true, .. } => rows,
            Self::Total { ends: false, .. } => 0,
        }
    }
}

/// Bytes of the host that a device may read as well.
pub type HostBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A matrix for products.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MatrixSpec {
    /// Build options, as of a [`Spec`].
    pub options: String,
    /// Rows.
    pub rows: usize,
    /// Bytes of a row's quants, and of its scales behind them.
    pub quants: usize,
    /// See `quants`.
    pub scales: usize,
    /// Bytes of scales that lie together in tiles.
    pub scale: usize,
    /// Bytes of a token's input.
    pub token_bytes: usize,
}

impl MatrixSpec {
    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.quants + self.scales
    }

    /// Its rows in tiles.
    pub fn tiles(&self) -> Tiles {
        Tiles {
            quants: self.quants,
            scales: self.scales,
            scale: self.scale,
        }
    }
}

/// Rows of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Its number.
    pub matrix: usize,
    /// The rows.
    pub rows: Range<usize>,
}

/// What came out besides sums.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Taken {
    /// Pairs that fired.
    pub fired: u64,
    /// From submission to the last sum, by the device's clock.
    pub nanoseconds: u64,
}
