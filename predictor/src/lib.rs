//! Which neurons fire.
//!
//! This crate knows activations: which neurons of a layer are needed for a
//! token ([`ActiveSet`]), how they fire over a text ([`record`],
//! [`stats::ActivationStats`]) and the order of neurons that follows from it
//! ([`order`]). It knows nothing of residency or I/O; the engine joins the two.
#![forbid(unsafe_code)]

mod active_set;
pub mod order;
pub mod record;
pub mod stats;

pub use active_set::ActiveSet;
