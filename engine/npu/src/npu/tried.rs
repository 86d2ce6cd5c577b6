//! Which graphs a provider has survived. Another process makes them first, as a driver may crash or hang while it compiles or
//! runs them, and leaves a note beside the compiled graphs.

use super::Npu;
use crate::cache::Cache;
use crate::error::Error;
use crate::provider::Provider;
use crate::wanted::Wanted;

impl Npu {
    /// Whether nothing shows that the provider survives these graphs: they are not here, and no process has left a note of
    /// them. The provider `cpu` alone is not suspected.
    pub fn is_untried(&self, wanted: Wanted) -> bool {
        let is_here = match wanted {
            Wanted::Rows(form) => self.numbers.contains_key(&form),
            Wanted::Groups(of) => self.has_groups(of),
        };
        let noted = |cache: &Cache| cache.get(&wanted.note()).is_some();
        self.provider != Provider::Cpu && !is_here && !self.cache.as_ref().is_some_and(noted)
    }

    /// Whether a process has not survived these graphs, or they were refused.
    pub fn is_given_up(&self, wanted: Wanted) -> bool {
        let noted = |cache: &Cache| cache.get(&wanted.failure()).is_some();
        self.given_up.contains(&wanted) || self.cache.as_ref().is_some_and(noted)
    }

    /// Remembers that a process has not survived these graphs, or that they were refused, and leaves a note of that.
    pub fn give_up(&mut self, wanted: Wanted) {
        self.given_up.insert(wanted);
        if let Some(cache) = self.cache.as_ref() {
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
        if let Some(cache) = self.cache.as_ref() {
            cache.put(&wanted.note(), &[]);
        }
        Ok(())
    }
}
