//! How far a layer has come whose clusters pass through a device.

use crate::device::Ticket;

/// Work of a device on a group that is under way.
pub(super) struct Underway {
    pub ticket: Ticket,
    pub clusters: usize,
    /// When, by the tracer.
    pub start: u64,
}

/// How far a layer has come.
#[derive(Default)]
pub(super) struct Streaming {
    /// Groups that were begun.
    pub groups: usize,
    /// Clusters of the group that are to be uploaded yet.
    pub missing: usize,
    /// The group was submitted.
    pub submitted: bool,
    pub underway: Option<Underway>,
}
