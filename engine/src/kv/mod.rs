//! Keys and values of sequences, in pages from a pool that an entry of the ledger pays for.

mod layer;
mod page;
mod pool;
mod shape;

pub(crate) use layer::LayerKv;
pub(crate) use pool::{KvPages, KvPool};
pub(crate) use shape::{BLOCK, KvShape};
