//! The planner: memory division, read strategy, threads, chunk size and expected speed for one
//! model, machine and budget.
//!
//! Inputs are the model's statistics, the machine's profile and the budget (PowerInfer-2 §5).
//! [`Planner::plan`] is a pure function of [`Planner`]. Byte arithmetic is in [`crate::memory`],
//! expected times are in `cost.rs`.

mod beside;
mod budget;
pub mod cores;
mod cost;
mod explain;
mod facts;
mod firing;
mod forecast;
mod held;
mod inputs;
pub mod machine;
mod pass;
mod plan;
mod prompts;
pub mod rates;
mod reads;
mod room;
mod search;
mod temperature;
#[cfg(test)]
mod tests;

pub use budget::Division;
pub use facts::Planner;
pub use firing::Firing;
pub(crate) use inputs::{Opened, longest_pass};
pub use pass::{Forecast, Limit, PredictorNeeds, Shape};
pub use plan::{Basis, DraftPass, HotCut, Plan};
pub(crate) use search::{Candidates, FORECAST_MARGIN};
