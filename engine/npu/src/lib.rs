//! Exact integer products on an NPU through ONNX Runtime, summed by groups of 32 or by whole rows.
//!
//! ```text
//! BY GROUP  sum[g][row][token] = Σ_j  weight[row][g][j] · activation[token][g][j]     i32, |sum| < 2^24
//! BY ROW    sum[0][row][token] = Σ_j  weight[row][j] · activation[token][j]           i32
//!           sum[1][row][token] = Σ_k  outlier[row][k] · picked[token][k]              i32
//! ```
//!
//! NPUs compute static graphs, so there is one graph per tile size (rows × tokens; `tiles.rs`, after HeteroInfer §4.1), and
//! smaller tiles are padded. Weights are inputs of a graph, so rows from flash need no copy. The caller applies scales: sums
//! of floats differ between processors.
//!
//! The library is loaded at the first request for an NPU (`library.rs`). A graph that a provider cannot compute as a whole
//! is an error; only the provider `cpu` uses ONNX Runtime's own kernels.

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

/// Version of the graphs.
pub const GRAPHS: u32 = 4;
