//! Cached bundles: which neurons are in memory, and whose place the next one takes.
//!
//! The cache never does I/O. A miss hands out a slot, the caller moves it into a read, and the
//! completion is admitted. One direction, no callbacks.

mod eviction;
mod lrfu;
mod lru;
mod rings;
mod slot_cache;
mod table;
mod worth;

pub use eviction::Eviction;
pub use rings::Rings;
pub use slot_cache::{CacheStats, SlotCache, SlotId};
pub use table::Key;
