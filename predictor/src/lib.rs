//! Which neurons fire.
//!
//! This crate knows activations: which neurons of a layer are needed for a
//! token ([`ActiveSet`]), which ones a cheap look at the token says will fire
//! ([`Predictor`], [`section`]), how such predictors are made ([`train`]), how neurons
//! fire over a text ([`record`], [`stats::ActivationStats`]) and the order of neurons that
//! follows from it ([`order`]). It knows nothing of residency or I/O; the engine joins the
//! two.
#![forbid(unsafe_code)]

mod active_set;
mod bytes;
mod coarse;
mod firing_trace;
mod low_rank;
pub mod order;
mod predict;
mod quality;
pub mod record;
pub mod section;
mod sign;
pub mod stats;
mod thresholds;
pub mod train;

pub use active_set::ActiveSet;
pub use bytes::SharedBytes;
pub use coarse::CoarseGate;
pub use firing_trace::FiringTrace;
pub use low_rank::{LowRank, LowRankSpec};
pub use predict::{
    Features, Predictor, RANGE, Reads, Shared, SharedShape, keep_wanted, predict_all,
};
pub use quality::Quality;
pub use sign::SignBit;
pub use thresholds::Thresholds;
