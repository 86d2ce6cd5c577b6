//! `model.ember`: one self-describing, checksummed file for a whole model.
//!
//! [`Writer`] computes order, padding, alignment and checksums. [`Container`] only checks: it
//! recomputes the layout from the counts and rejects a file whose offsets differ. This module knows
//! the geometry of bytes, but not what a weight means.
//!
//! * [`geometry`]: layout, padding and split of one neuron's bundle.
//! * [`layout`]: location of everything, computed by one function for writer and reader.
//! * [`format`](mod@format): the bytes of the superblock and the table records.

pub(crate) mod error;
pub mod format;
pub mod geometry;
#[cfg(test)]
mod golden;
mod journal;
pub mod layout;
mod layout_error;
pub mod limits;
mod mapped;
mod outside;
mod outside_tensors;
mod parts;
mod prove;
mod reader;
mod rows;
mod sink;
mod source;
mod stripes;
mod unit;
mod verify;
mod writer;

pub use format::{BankEntry, Section, TensorEntry};
pub use geometry::{BundleGeometry, Placement, Prefer};
pub use layout::{Layout, Spec};
pub use layout_error::LayoutError;
pub use mapped::MappedBundles;
pub use outside::Outside;
pub use outside_tensors::OutsideTensors;
pub use parts::{BankSpec, TensorSpec};
pub use reader::{Container, SectionSize};
pub use rows::{ROW_CHECKSUM, TensorRows, append_row, table_row};
pub use sink::{BankSink, ByteSink};
pub use stripes::{DamagedStripe, StripeChecksums, Stripes};
pub use unit::Unit;
pub use verify::{Problem, VerifyReport};
pub use writer::{Options, Writer};

/// The checksum of a part of a bundle.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}
