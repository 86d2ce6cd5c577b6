//! Requested graphs, and the keys of their notes in the cache.

use serde::{Deserialize, Serialize};

use crate::GRAPHS;
use crate::graph::Form;
use crate::groups::GroupForm;

/// A request for graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wanted {
    /// Graphs for rows.
    Rows(Form),
    /// Graphs for groups of experts, and for their rows.
    Groups(GroupForm),
}

impl Wanted {
    /// Cache key of the note that these graphs have worked.
    pub(crate) fn note(self) -> Vec<u8> {
        format!("{self:?} {GRAPHS}").into_bytes()
    }

    /// Cache key of the note that these graphs have failed.
    pub(crate) fn failure(self) -> Vec<u8> {
        format!("{self:?} {GRAPHS} failed").into_bytes()
    }
}
