//! Graphs that a provider has not survived yet. A driver that crashes or hangs while it compiles or runs them should do so in
//! another process, which makes them first and leaves a note beside the compiled graphs.

use serde::{Deserialize, Serialize};

use crate::GRAPHS;
use crate::cache::Cache;
use crate::error::Error;
use crate::graph::Form;
use crate::groups::GroupForm;
use crate::npu::Npu;
use crate::provider::Provider;

/// Graphs for rows, or for experts in groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wanted {
    /// For rows of a form.
    Rows(Form),
    /// For experts, and the rows of their matrices.
    Groups(GroupForm),
}

impl Wanted {
    /// Names them in the folder of compiled graphs.
    fn note(self) -> Vec<u8> {
        format!("{self:?} {GRAPHS}").into_bytes()
    }

    /// Names in that folder that they failed.
    fn failure(self) -> Vec<u8> {
        format!("{self:?} {GRAPHS} failed").into_bytes()
    }
}

impl Npu {
    /// Whether nothing shows that the provider survives these graphs: they are not here, and no process has left a note of
    /// them. ONNX Runtime's own kernels compile nothing.
    pub fn is_untried(&self, wanted: Wanted) -> bool {
        let is_here = match wanted {
            Wanted::Rows(form) => self.is_prepared(form),
            Wanted::Groups(of) => self.has_groups(of),
        };
        let noted = |cache: &Cache| cache.get(&wanted.note()).is_some();
        self.provider() != Provider::Cpu && !is_here && !self.cache().is_some_and(noted)
    }

    /// Whether a process has not survived these graphs, or they were refused.
    pub fn is_given_up(&self, wanted: Wanted) -> bool {
        let noted = |cache: &Cache| cache.get(&wanted.failure()).is_some();
        self.cache().is_some_and(noted)
    }

    /// Leaves a note that a process has not survived these graphs, or that they were refused.
    pub fn give_up(&self, wanted: Wanted) {
        if let Some(cache) = self.cache() {
            cache.put(&wanted.failure(), &[]);
        }
    }

    /// Makes graphs and runs them, those for the rows of experts too, and leaves a note of that.
    ///
    /// # Errors
    /// The provider does not take one as a whole, computes wrong sums, or has no memory.
    pub fn try_out(&mut self, wanted: Wanted) -> Result<(), Error> {
        match wanted {
            Wanted::Rows(form) => self.prepare(form)?,
            Wanted::Groups(of) => {
                self.prepare(of.form)?;
                self.prepare_groups(of)?;
            }
        }
        if let Some(cache) = self.cache() {
            cache.put(&wanted.note(), &[]);
        }
        Ok(())
    }
}
