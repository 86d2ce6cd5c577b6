//! Measures the machine for the planner: kernels of decoding, bookkeeping of the cache, and the layers of a small
//! model.

pub mod cache;
mod layers;
mod machine;
mod timing;

pub use layers::layers;
pub use machine::{Effort, LONG, measure};
