//! Definitions that all kinds of work share.

use crate::Error;
use crate::handles::Event;
use crate::library::Code;

/// Source of the kernels for hidden values.
pub(super) const HIDDEN: &str = concat!(
    include_str!("common.cl"),
    include_str!("rows.cl"),
    include_str!("products.cl"),
    include_str!("blocks.cl"),
    include_str!("hidden.cl")
);

/// Source of the kernels for sums of Down rows.
pub(super) const SUMS: &str = concat!(
    include_str!("common.cl"),
    include_str!("rows.cl"),
    include_str!("sums.cl")
);

/// Source of the kernels for matrix products.
pub(super) const MATRIX: &str = concat!(
    include_str!("common.cl"),
    include_str!("rows.cl"),
    include_str!("products.cl"),
    include_str!("blocks.cl"),
    include_str!("matrix.cl")
);

/// All sources.
pub(super) const SOURCES: [&str; 3] = [HIDDEN, SUMS, MATRIX];

/// Maximum tokens per work item. They share each read of a row.
pub(super) const TILE: usize = 4;

/// Kind of results.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Sums,
    Products,
}

/// Work that the device is computing.
pub(super) struct Underway {
    pub kind: Kind,
    /// Number of floats returned.
    pub results: usize,
    /// First kernel.
    pub begun: Event,
    /// Last copy.
    pub done: Event,
}

impl Underway {
    /// Time from the submission of the first kernel to the end; 0 if the queue has no clock.
    pub fn nanoseconds(&self) -> u64 {
        match (self.begun.queued(), self.done.ended()) {
            (Ok(start), Ok(end)) => end.saturating_sub(start),
            _ => 0,
        }
    }
}

/// Adds the failed operation to a driver error.
pub(super) fn driver<T>(what: &str, result: Result<T, Code>) -> Result<T, Error> {
    result.map_err(|e| Error(format!("cannot {what}: {e}")))
}

/// Error: there is no current work.
pub(super) fn no_work() -> Error {
    Error("has no such work".into())
}

/// Error code for arguments out of range.
pub(super) const INVALID: Code = Code(opencl_sys::CL_INVALID_VALUE);
