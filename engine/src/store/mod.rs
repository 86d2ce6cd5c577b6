//! Residency of the neurons: resident Gate rows, the hot region, the cold region, and reads for
//! misses.
//!
//! The FFN works layer by layer and requests clusters of needed neurons. `plan.rs` decides where
//! each cluster's bytes come from, `layer.rs` looks them up or submits reads, `arrivals.rs` handles
//! completions, `bytes.rs` exposes the bytes to compute threads, `release.rs` decides what stays
//! resident, and `fill.rs` warms memory when a plan takes effect. Every byte from flash is verified
//! against its checksum before it is used.

mod ahead;
mod arrivals;
mod asked;
mod border;
mod by_layer;
mod bytes;
mod content;
mod costs;
mod fill;
pub(crate) mod foresight;
mod guesses;
mod hot;
mod layer;
mod layout;
mod mapping;
mod margins;
mod neurons;
mod plan;
mod reader;
mod recover;
pub mod regions;
mod release;
mod resident;
mod rows;
mod spread;
mod streamed;
mod tag;
#[cfg(test)]
mod tests;
mod tier;
mod work;

pub use by_layer::LayerResidency;
pub(crate) use bytes::{ClusterBytes, NeuronBytes};
pub(crate) use costs::ReadCosts;

pub(crate) use layout::Layout;
pub(crate) use neurons::{Known, Naming, NeuronStore, StoreSetup, io_bytes};
pub(crate) use resident::{Resident, region};
pub(crate) use tier::{PassRows, StreamedFrom, TierSetup};
pub(crate) use work::Step;
