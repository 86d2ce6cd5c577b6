//! Graphs that are wanted, and the names of notes of them beside compiled graphs.

use serde::{Deserialize, Serialize};

use crate::GRAPHS;
use crate::graph::Form;
use crate::groups::GroupForm;

/// Graphs for rows, or for experts in groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wanted {
    /// For rows of a form.
    Rows(Form),
    /// For experts, and the rows of their matrices.
    Groups(GroupForm),
}

impl Wanted {
    /// Names them in the folder of compiled graphs.
    pub(crate) fn note(self) -> Vec<u8> {
        format!("{self:?} {GRAPHS}").into_bytes()
    }

    /// Names in that folder that they failed.
    pub(crate) fn failure(self) -> Vec<u8> {
        format!("{self:?} {GRAPHS} failed").into_bytes()
    }
}
