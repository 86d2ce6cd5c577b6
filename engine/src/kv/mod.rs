//! Paged keys and values: pages come from a pool charged to the ledger.

mod layer;
mod page;
mod pool;
mod shape;

pub(crate) use layer::LayerKv;
pub(crate) use pool::{KvPages, KvPool};
pub(crate) use shape::{BLOCK, KvShape};
