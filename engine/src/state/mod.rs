//! State of a sequence between passes.
//!
//! ```text
//! pages       keys and values of positions; truncated and shared at any length
//! pools       vectors of pools of positions: in pages, one vector for each complete pool
//! recurrent   one block of fixed size; goes back only to snapshots
//! ```
//!
//! A layer's mixer determines how much state of each kind it needs ([`StateShape`]). All kinds come
//! from pools that are charged to the ledger when the engine is opened.

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
pub use sequence::{Restored, Sequence, Span};
pub(crate) use shape::{BLOCK, HeadLayers, KvShape, PoolShape, StateShape};
