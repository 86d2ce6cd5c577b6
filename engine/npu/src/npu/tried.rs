//! Trials of graphs. A driver may crash or hang while it compiles or runs a graph, so another process tries graphs first
//! and leaves a note beside the compiled ones.

use super::Npu;
use crate::cache::Cache;
use crate::error::Error;
use crate::provider::Provider;
use crate::wanted::Wanted;

impl Npu {
    /// Whether these graphs still need a trial: they are not prepared, and there is no note of a trial. The provider `cpu`
    /// needs none.
    pub fn is_untried(&self, wanted: Wanted) -> bool {
        let is_prepared = match wanted {
            Wanted::Rows(form) => self.numbers.contains_key(&form),
            Wanted::Groups(group) => self.has_groups(group),
        };
        let noted = |cache: &Cache| cache.get(&wanted.note()).is_some();
        self.provider != Provider::Cpu && !is_prepared && !self.cache.as_ref().is_some_and(noted)
    }

    /// Whether a trial of these graphs has failed.
    pub fn is_given_up(&self, wanted: Wanted) -> bool {
        let noted = |cache: &Cache| cache.get(&wanted.failure()).is_some();
        self.given_up.contains(&wanted) || self.cache.as_ref().is_some_and(noted)
    }

    /// Records that a trial of these graphs has failed, also in the cache.
    pub fn give_up(&mut self, wanted: Wanted) {
        self.given_up.insert(wanted);
        if let Some(cache) = self.cache.as_ref() {
            cache.put(&wanted.failure(), &[]);
        }
    }

    /// Compiles and runs graphs, and records in the cache that they work.
    ///
    /// # Errors
    /// The provider cannot compute a graph as a whole, computes wrong sums, or has no memory.
    pub fn try_out(&mut self, wanted: Wanted) -> Result<(), Error> {
        match wanted {
            Wanted::Rows(form) => self.prepare(form)?,
            Wanted::Groups(group) => {
                self.prepare(group.form)?;
                self.prepare_groups(group)?;
            }
        }
        if let Some(cache) = self.cache.as_ref() {
            cache.put(&wanted.note(), &[]);
        }
        Ok(())
    }
}
