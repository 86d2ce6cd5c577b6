//! Bytes on flash and in memory: the container format, I/O engines, the slot arena, the cache and
//! the memory budget.
//!
//! Neurons move from `container` through `io` into `arena` slots and the `cache`. This crate knows
//! layers, experts, neurons and byte geometry, but not what a weight means.

pub mod arena;
pub mod budget;
pub mod cache;
pub mod container;
pub mod durable;
pub mod io;
pub mod limits;
pub mod mem;
mod pages;
pub mod profile;
mod random;
mod sync;
pub mod trace;

pub use container::error::{Error, Part, Result};
pub use pages::{prefer_huge_pages, trim_heap};
