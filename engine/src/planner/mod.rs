//! The plan: what a model, a machine and a budget make of each other.
//!
//! Statistics of the model × profile of the machine × budget give the division of the memory, the
//! ways to read, thread counts, the chunk of a prompt, and how fast that will be (PowerInfer-2 §5).
//! [`Planner::plan`] is a pure function of what [`Planner`] holds. The arithmetic of bytes is
//! [`crate::memory`]'s, expected times are [`cost`]'s.

pub mod cores;
pub mod cost;
mod drift;
mod explain;
pub mod firing;
mod inputs;
mod plan;
mod planner;
pub mod rates;
mod reads;
mod temperature;
#[cfg(test)]
mod tests;

pub use cost::PredictorNeeds;
pub(crate) use inputs::Opened;
pub use plan::{Basis, HotCut, Plan};
pub use planner::Planner;
pub(crate) use planner::stream_buffers;
