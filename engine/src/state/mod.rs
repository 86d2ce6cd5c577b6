//! What a sequence keeps between passes.
//!
//! ```text
//! pages       keys and values of positions; cut back and shared at any length
//! pools       vectors of pools of positions: as pages, a vector for each pool that is complete
//! recurrent   one block of fixed size; goes back only to where a snapshot was kept
//! ```
//!
//! A layer's mixer says how much it keeps of which kind ([`StateShape`]). Both kinds come from pools
//! that the ledger is charged for when the engine is opened.

mod entries;
mod layer;
mod page;
mod pages;
mod pool;
mod recurrent;
mod sequence;
mod shape;

pub(crate) use layer::LayerKv;
#[cfg(test)]
pub(crate) use pages::{KvPages, KvPool};
pub(crate) use recurrent::RecurrentPart;
pub(crate) use sequence::StatePool;
pub use sequence::{Sequence, Span};
pub(crate) use shape::{BLOCK, HeadLayers, KvShape, PoolShape, StateShape};
