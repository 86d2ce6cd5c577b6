//! Observation and reporting; no model computation.

mod beside;
mod details;
mod identity;
mod judge;
mod probe;
mod report;
mod sampling;
mod seen;
mod speculation;
mod summary;

pub use details::Details;
pub use judge::Judge;
pub use probe::{Importance, Probe};
pub use report::Report;
pub use sampling::SamplingReport;
