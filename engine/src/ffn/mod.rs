//! The sparse FFN of one layer: active set, residency, partial sums.
//!
//! The unit of computation is a *cluster* of [`crate::CLUSTER`] consecutive packed ids, computed as
//! soon as its bytes arrive (PowerInfer-2 §4.3). A cluster sums its neurons into its own partial
//! vector, ids ascending; partials are reduced in the order of units and clusters. Packed ids alone
//! thus fix the order of every floating-point sum: thread count, residency and I/O completion order
//! cannot change a bit of the result.
//!
//! `exact` skips what `dense` adds as zeros: neurons whose gate does not fire. `predicted` also
//! skips neurons outside the predicted active set.
//!
//! ```text
//! layer.rs, part.rs   units ─► name.rs: active set ─► store: reads ─► run.rs: partial sums ─► reduce.rs
//!                         └─ lookahead.rs: prefetch for the next layer
//! ```

mod beside;
mod gates;
mod gates_ahead;
mod lane_gates;
mod layer;
mod lookahead;
mod mask;
mod name;
mod oracle;
mod pairs;
mod part;
mod predict;
mod products;
mod recent;
mod reduce;
mod report;
mod run;
mod schedule;
mod seen;
mod shape;
mod state;
mod stored;
mod sums;
#[cfg(test)]
mod tests;
mod top;
mod units;

pub(crate) use layer::add_down_biases;
pub use lookahead::GATE_PIECES;
pub(crate) use oracle::Oracle;
pub(crate) use predict::Predictors;
pub(crate) use recent::RECENT;
pub(crate) use run::SLICE;
pub use seen::FfnSeen;
pub(crate) use shape::FfnShape;
pub(crate) use state::{Ffn, FfnRoom};
pub(crate) use stored::StoredPredictors;
pub(crate) use sums::thread_floats;
pub use units::Choice;
pub(crate) use units::{BankWork, Bias, FfnBiases, LayerInput, NextLayer, Rows};
