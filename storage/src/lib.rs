//! Bytes on flash and in memory: the container, I/O engines, the arena, cache regions, the budget.
//!
//! Neurons travel `container` → `io` → `arena` slots → `cache`. This crate knows layers, experts,
//! neurons and byte geometry, never what a weight means.

pub mod arena;
pub mod budget;
pub mod cache;
pub mod container;
mod error;
pub mod io;
pub mod limits;
pub mod mem;
pub mod profile;
mod random;
mod sync;
pub mod trace;

pub use error::{Error, Part, Result};
