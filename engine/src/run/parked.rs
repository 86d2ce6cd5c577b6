//! Rows of passes that were stopped between two layers.

use super::request::RequestId;
use crate::forward::pass::Pass;

/// Rows of a pass that belong to one request.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestRows {
    pub id: RequestId,
    pub rows: usize,
}

/// A request's rows, and the layers they have passed.
pub(super) struct StoppedRows {
    pub part: RequestRows,
    /// Number of completed layers.
    pub layers: usize,
    /// Activations: the residual stream; further streams and per-layer inputs (`aux`).
    pub x: Vec<f32>,
    pub aux: Vec<f32>,
}

/// Rows that wait to be resumed.
#[derive(Default)]
pub(super) struct Parked(Vec<StoppedRows>);

impl Parked {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Rows of all requests.
    pub fn rows(&self) -> usize {
        self.parts().map(|part| part.rows).sum()
    }

    /// The requests that have rows here, in the order in which they were parked.
    pub fn parts(&self) -> impl Iterator<Item = RequestRows> {
        self.0.iter().map(|stopped| stopped.part)
    }

    /// Whether rows of a request are here.
    pub fn has(&self, id: RequestId) -> bool {
        self.parts().any(|part| part.id == id)
    }

    pub fn add(&mut self, stopped: StoppedRows) {
        self.0.push(stopped);
    }

    /// Discards a request's rows.
    pub fn discard(&mut self, id: RequestId) {
        self.0.retain(|stopped| stopped.part.id != id);
    }

    /// Completed layers of the first of these requests.
    pub fn layers(&self, wanted: impl Fn(RequestId) -> bool) -> Option<usize> {
        let first = self.0.iter().find(|stopped| wanted(stopped.part.id));
        first.map(|stopped| stopped.layers)
    }

    /// Moves a request's rows to the end of `pass` if they have passed `layers` layers.
    pub fn resume(&mut self, id: RequestId, layers: usize, pass: &mut Pass) -> Option<RequestRows> {
        let ours = |stopped: &StoppedRows| stopped.part.id == id && stopped.layers == layers;
        let index = self.0.iter().position(ours)?;
        let StoppedRows { part, x, aux, .. } = self.0.remove(index);
        for (all, own) in [(&mut pass.x, &x), (&mut pass.aux, &aux)] {
            let width = own.len() / part.rows;
            all[pass.rows * width..][..own.len()].copy_from_slice(own);
        }
        pass.rows += part.rows;
        Some(part)
    }
}
