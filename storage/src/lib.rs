//! Emberflow.

pub mod arena;
pub mod budget;
pub mod cache;
pub mod io;
pub mod limits;
pub mod mem;
