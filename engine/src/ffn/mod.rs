//! The sparse FFN of one layer: which neurons, where their bytes are, the sums.
//!
//! Neurons are worked on in *clusters* of [`crate::CLUSTER`] consecutive packed ids, each as soon as
//! its bytes are there (PowerInfer-2 §4.3). A cluster sums its neurons into its own partial vector,
//! ids ascending, and the partials are added in the order of units and clusters. The order of every
//! floating-point sum is thus fixed by packed ids alone: threads, cache contents and the arrival order
//! of reads cannot change a bit of the result.
//!
//! `exact` and `dense` differ in what they skip, not in what they add: a neuron whose gate does not
//! fire contributes zeros in `dense` mode and nothing in `exact` mode. `predicted` leaves out besides
//! what its predictor does not want.
//!
//! ```text
//! layer.rs      units ─► name.rs: which neurons ─► store: where they are ─► run.rs: sums as bytes come ─► reduce.rs
//!                             └─ lookahead.rs: the next layer's, read ahead
//! ```

mod activation;
mod gates;
mod layer;
mod lookahead;
mod mask;
mod name;
mod oracle;
mod pairs;
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
mod units;

pub use lookahead::GATE_PIECES;
pub(crate) use oracle::Oracle;
pub(crate) use predict::Predictors;
pub use seen::FfnSeen;
pub(crate) use shape::FfnShape;
pub(crate) use state::{Ffn, FfnRoom};
pub(crate) use stored::StoredPredictors;
pub(crate) use sums::thread_floats;
pub(crate) use units::{BankWork, LayerInput, Norm, Rows};
