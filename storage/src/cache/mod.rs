//! Cache of bundles: which neurons are resident, and which one is evicted for the next.
//!
//! The default policy of the engine is an LRFU variant; [`Eviction`] gives the formula and the
//! rules.
//!
//! The cache never does I/O. A miss reserves a slot, the caller moves the slot into a read, and
//! admits it on completion. There are no callbacks.

mod crf;
mod eviction;
mod lrfu;
mod lru;
mod rings;
mod slot_cache;
mod table;

pub use eviction::Eviction;
pub use rings::Rings;
pub use slot_cache::{CacheStats, SlotCache, SlotId};
pub use table::Key;
