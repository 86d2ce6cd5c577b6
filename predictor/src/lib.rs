//! Predicts which neurons fire.
//!
//! The crate covers activations: the neurons that a layer needs for a token ([`ActiveSet`]), cheap
//! predictions of firing neurons ([`Predictor`], [`section`]), training of predictors ([`train`]),
//! rounding against a text's inputs ([`rounding`]), firing statistics of a text ([`record`],
//! [`stats::ActivationStats`]) and the neuron order derived from them ([`order`]). It has no
//! knowledge of residency or I/O; the engine combines the two.
#![forbid(unsafe_code)]

mod active_set;
mod bytes;
mod coarse;
mod fields;
mod firing_trace;
mod low_rank;
mod moments;
pub mod order;
mod predict;
mod products;
mod quality;
pub mod record;
pub mod rounding;
mod routes;
pub mod section;
mod sign;
pub mod stats;
mod thresholds;
mod top;
pub mod train;

pub use active_set::ActiveSet;
pub use bytes::SharedBytes;
pub use coarse::CoarseGate;
pub use firing_trace::FiringTrace;
pub use low_rank::{LowRank, LowRankSpec};
pub use moments::{Moments, Sums, top_multiple};
pub use predict::{
    Features, Predictor, RANGE, Reads, Shared, SharedShape, keep_wanted, predict_all,
};
pub use quality::Quality;
pub use routes::{RouteRecorder, RouteTrace, RoutedSubject};
pub use sign::SignBit;
pub use thresholds::Thresholds;
pub use top::CoarseTop;
