//! The memory ledger: every large allocation of the process is charged against one budget.

/// A charge that does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "memory budget of {budget} bytes is too small: {what} needs {needed} bytes, {left} are left"
)]
pub struct BudgetError {
    /// What the memory was for.
    pub what: &'static str,
    /// Bytes it needs.
    pub needed: u64,
    /// Bytes that were left.
    pub left: u64,
    /// The whole budget in bytes.
    pub budget: u64,
}

/// Which part of the budget is charged to what. Charge before allocating.
#[derive(Debug, Clone)]
pub struct Ledger {
    budget: u64,
    entries: Vec<(&'static str, u64)>,
}

impl Ledger {
    /// An empty ledger over `budget` bytes.
    #[must_use]
    pub fn new(budget: u64) -> Self {
        Self {
            budget,
            entries: Vec::new(),
        }
    }

    /// Charges `bytes` to `what`; repeated charges add up.
    ///
    /// # Errors
    /// [`BudgetError`] if less is left; the ledger is then unchanged.
    pub fn charge(&mut self, what: &'static str, bytes: u64) -> Result<(), BudgetError> {
        let left = self.left();
        if bytes > left {
            return Err(BudgetError {
                what,
                needed: bytes,
                left,
                budget: self.budget,
            });
        }
        match self.entries.iter_mut().find(|(name, _)| *name == what) {
            // No overflow: the sum of all entries is at most the budget.
            Some((_, held)) => *held += bytes,
            None => self.entries.push((what, bytes)),
        }
        Ok(())
    }

    /// Releases up to `bytes` charged to `what` and returns how much that was.
    pub fn release(&mut self, what: &'static str, bytes: u64) -> u64 {
        match self.entries.iter_mut().find(|(name, _)| *name == what) {
            Some((_, held)) => {
                let given = bytes.min(*held);
                *held -= given;
                given
            }
            None => 0,
        }
    }

    /// Changes the budget. It may fall below the bytes in use; [`Ledger::left`] is then 0 until
    /// enough is released, see [`Ledger::excess`].
    pub fn set_budget(&mut self, bytes: u64) {
        self.budget = bytes;
    }

    /// The budget in bytes.
    #[must_use]
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes charged in total.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.entries
            .iter()
            .fold(0u64, |sum, (_, n)| sum.saturating_add(*n))
    }

    /// Bytes that can still be charged.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.budget.saturating_sub(self.used())
    }

    /// Bytes charged beyond the budget, after it was lowered.
    #[must_use]
    pub fn excess(&self) -> u64 {
        self.used().saturating_sub(self.budget)
    }

    /// Bytes charged to `what`.
    #[must_use]
    pub fn held(&self, what: &str) -> u64 {
        self.entries
            .iter()
            .find(|(name, _)| *name == what)
            .map_or(0, |(_, n)| *n)
    }

    /// All names with their bytes, in the order of their first charge.
    #[must_use]
    pub fn entries(&self) -> &[(&'static str, u64)] {
        &self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_add_up_and_refusals_change_nothing() {
        let mut l = Ledger::new(100);
        l.charge("kv", 30).unwrap();
        l.charge("cold", 50).unwrap();
        l.charge("kv", 10).unwrap();
        assert_eq!(l.left(), 10);
        let err = l.charge("scratch", 11).unwrap_err();
        assert_eq!((err.needed, err.left, err.budget), (11, 10, 100));
        assert_eq!(l.entries(), [("kv", 40), ("cold", 50)]);
        assert_eq!(
            err.to_string(),
            "memory budget of 100 bytes is too small: scratch needs 11 bytes, 10 are left"
        );
        assert_eq!(l.charge("x", u64::MAX).unwrap_err().left, 10);
    }

    #[test]
    fn release_gives_back_at_most_what_is_held() {
        let mut l = Ledger::new(100);
        l.charge("cold", 60).unwrap();
        assert_eq!(l.release("cold", 20), 20);
        assert_eq!(l.release("cold", 100), 40);
        assert_eq!(l.release("never", 1), 0);
        assert_eq!(l.left(), 100);
    }

    #[test]
    fn a_lowered_budget_shows_its_excess() {
        let mut l = Ledger::new(100);
        l.charge("cold", 60).unwrap();
        l.set_budget(45);
        assert_eq!((l.left(), l.excess()), (0, 15));
        l.release("cold", 20);
        assert_eq!((l.left(), l.excess()), (5, 0));
    }
}
