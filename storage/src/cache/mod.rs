//! Cached bundles: which neurons are in memory, and whose place the next one takes.
//!
//! The cache never does I/O. A miss hands out a slot, the caller moves it into a read, and the
//! completion is admitted. One direction, no callbacks.

mod cold;
mod lrfu;
mod lru;
mod policy;
mod rings;
mod table;
mod worth;

pub use cold::{CacheStats, ColdCache, SlotId};
pub use policy::Policy;
pub use rings::Rings;
pub use table::Key;
