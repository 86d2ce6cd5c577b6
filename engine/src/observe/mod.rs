//! Observation and reporting; no model computation.

mod details;
pub mod energy;
mod judge;
mod probe;
mod report;
mod seen;
mod summary;

pub use details::Details;
pub use judge::Judge;
pub use probe::Probe;
pub use report::Report;
