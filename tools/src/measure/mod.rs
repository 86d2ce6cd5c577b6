//! Measuring the machine that plans are made for: a few seconds of the kernels that decoding uses, of
//! the bookkeeping of the cache, and of a small model's layers.

pub mod cache;
mod layers;
mod machine;
mod timing;

pub use layers::layers;
pub use machine::{Effort, LONG, measure};
