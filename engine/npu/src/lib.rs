//! Exact integer products on an NPU, by ONNX Runtime: sums of groups of 32 weights and activations, or of whole rows.
//!
//! ```text
//! sum[g][row][token] = Σ_j  weight[row][g][j] · activation[token][g][j]        |sum| < 2^24, so any order gives it
//! sum[0][row][token] = Σ_j  weight[row][j] · activation[token][j]              as i32, likewise
//! sum[1][row][token] = Σ_k  outlier[row][k] · picked[token][k]
//! ```
//!
//! NPUs compute static graphs: there is one for each of some numbers of rows and tokens (`tiles.rs`, after HeteroInfer,
//! §4.1), and what is left is padded. Weights are inputs of a graph, so that rows which come from flash are read where they
//! are. Scales are the caller's: they are floats, of which no two processors have the same sums.
//!
//! The library is looked for when an NPU is asked for (`library.rs`). Apart from the provider `cpu` nothing is left to the
//! library's own kernels: a graph that a provider does not take as a whole is an error.

mod cache;
mod driver;
mod error;
mod floats;
mod graph;
mod groups;
mod library;
mod npu;
mod onnx;
mod operands;
mod plugin;
mod provider;
#[cfg(test)]
mod tests;
mod tiles;
mod trial;
mod wanted;

pub use error::{Cause, Error};
pub use graph::{Form, Summed, Weights};
pub use groups::{GROUP_SIZES, GroupForm, GroupRuns};
pub use npu::{Listed, Npu, list};
pub use operands::{Operands, Sums};
pub use provider::Provider;
pub use tiles::{RUN_BYTES, WIDTHS};
pub use wanted::Wanted;

/// Tells versions of the graphs from each other.
pub const GRAPHS: u32 = 4;
