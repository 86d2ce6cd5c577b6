//! Neurons in memory and on flash: resident Gate rows, the hot region, the cold region, and reads
//! of missing neurons.
//!
//! The FFN works layer by layer and requests clusters of needed neurons from [`NeuronStore`], which
//! owns four parts and connects them:
//!
//! ```text
//!                 NeuronStore
//!    ┌──────────┬──────┴────┬───────────┐
//! Residency   Reads       Prefetch     Job
//! in memory   in flight   proposals    needed now
//! ```
//!
//! No part refers to another one or to its owner. [`rules`] decide where a cluster's bytes come
//! from, [`bytes`] exposes them to compute threads. Every byte from flash is verified against its
//! checksum before it is used.
//! checksum before it is used.

mod bits;
mod bytes;
mod content;
mod costs;
mod job;
mod latch;
mod layout;
mod mapping;
mod neurons;
mod prefetch;
mod reads;
mod residency;
mod rules;
#[cfg(test)]
mod tests;

pub(crate) use bytes::{ClusterBytes, NeuronBytes};
pub(crate) use costs::ReadCosts;
pub(crate) use job::Step;
#[cfg(test)]
pub(crate) use layout::Cover;
pub(crate) use layout::Layout;
pub(crate) use neurons::{NeuronStore, RowReads, StoreSetup, io_bytes, region_memory};
pub use prefetch::foresight::Foreseen;
pub(crate) use reads::SMALL;
pub use residency::LayerResidency;
pub(crate) use residency::{Known, Naming, Resident, region};
