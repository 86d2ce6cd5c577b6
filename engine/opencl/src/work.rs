//! What is common to all pieces of work of a device.

use crate::Error;
use crate::handles::Event;
use crate::library::Code;

/// Hidden values of FFNs.
pub(super) const HIDDEN: &str = concat!(
    include_str!("common.cl"),
    include_str!("rows.cl"),
    include_str!("products.cl"),
    include_str!("blocks.cl"),
    include_str!("hidden.cl")
);

/// Their sums.
pub(super) const SUMS: &str = concat!(
    include_str!("common.cl"),
    include_str!("rows.cl"),
    include_str!("sums.cl")
);

/// Products of matrices.
pub(super) const MATRIX: &str = concat!(
    include_str!("common.cl"),
    include_str!("rows.cl"),
    include_str!("products.cl"),
    include_str!("blocks.cl"),
    include_str!("matrix.cl")
);

/// All of them.
pub(super) const SOURCES: [&str; 3] = [HIDDEN, SUMS, MATRIX];

/// Most tokens of an item, which share the reading of a row.
pub(super) const TILE: usize = 4;

/// Whose results work has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Sums,
    Products,
}

/// Work under way.
pub(super) struct Underway {
    pub of: Kind,
    /// Floats that it gives.
    pub results: usize,
    /// The first kernel, and the last copy.
    pub begun: Event,
    pub done: Event,
}

impl Underway {
    /// From the first kernel's submission to the end; 0 where the device has no clock.
    pub fn nanoseconds(&self) -> u64 {
        match (self.begun.queued(), self.done.ended()) {
            (Ok(start), Ok(end)) => end.saturating_sub(start),
            _ => 0,
        }
    }
}

/// Names what failed.
pub(super) fn driver<T>(what: &str, result: Result<T, Code>) -> Result<T, Error> {
    result.map_err(|e| Error(format!("cannot {what}: {e}")))
}

/// There is no work to wait for.
pub(super) fn no_work() -> Error {
    Error("has no such work".into())
}

/// What does not fit, or is not there.
pub(super) const INVALID: Code = Code(opencl_sys::CL_INVALID_VALUE);
