//! The plan: what a model, a machine and a budget make of each other.
//!
//! Statistics of the model × profile of the machine × budget give the division of the memory, the
//! ways to read, thread counts, the chunk of a prompt, and how fast that will be (PowerInfer-2 §5).
//! [`Planner::plan`] is a pure function of what [`Planner`] holds. The arithmetic of bytes is
//! [`crate::memory`]'s, expected times are [`cost`]'s.

pub mod cores;
mod cost;
mod divide;
mod explain;
mod facts;
mod firing;
mod forecast;
mod inputs;
mod pass;
mod plan;
pub mod rates;
mod reads;
mod temperature;
#[cfg(test)]
mod tests;

pub use divide::Division;
pub use facts::Planner;
pub(crate) use inputs::Opened;
pub use pass::{Forecast, Limit, PredictorNeeds};
pub use plan::{Basis, HotCut, Plan};
