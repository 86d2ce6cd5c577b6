//! Where the neurons' bytes are: resident Gate rows, the hot region, the cold region, and reads for
//! the rest.
//!
//! The FFN works on one layer at a time, which has one bank or several, and asks for clusters of
//! needed neurons. `plan.rs` says where each cluster's bytes come from, `layer.rs` finds or reads
//! them, `arrivals.rs` takes them in, `bytes.rs` shows them to the threads that compute, and
//! `release.rs` says what stays; `fill.rs` loads memory when a plan takes effect. Every byte that
//! comes from flash is checked against its checksum before it is computed with.

mod ahead;
mod arrivals;
mod asked;
mod border;
mod bytes;
mod content;
mod costs;
mod fill;
mod guesses;
mod hot;
mod layer;
mod layout;
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
mod tag;
#[cfg(test)]
mod tests;
mod window;
mod work;

pub(crate) use bytes::{ClusterBytes, NeuronBytes};
pub(crate) use costs::ReadCosts;

pub(crate) use layout::Layout;
pub(crate) use neurons::{Naming, NeuronStore, StoreSetup, io_bytes};
pub(crate) use resident::{Resident, region};
pub(crate) use work::{MANY, Step};
