//! Constraints on generated text, token by token.

use std::fmt::Debug;

/// Restricts one text, for example to a grammar. Before each token the stepper asks which tokens
/// may follow, and then reports the one that was drawn. Nothing else changes the state, so a text
/// depends neither on others nor on preemption.
pub trait Constraint: Debug + Send {
    /// Computes the set of tokens that may follow, for [`allows`](Self::allows).
    ///
    /// # Errors
    /// The reason why it cannot be computed; the text ends with it.
    fn prepare(&mut self) -> Result<(), String>;

    /// Whether `token` may follow. At least one token must.
    fn allows(&self, token: u32) -> bool;

    /// Advances by the token that was drawn.
    ///
    /// # Errors
    /// The reason why the token is not valid; the text ends with it.
    fn accept(&mut self, token: u32) -> Result<(), String>;

    /// Whether no token may follow.
    fn is_complete(&self) -> bool;

    /// A copy in the same state, for another continuation.
    fn fork(&self) -> Box<dyn Constraint>;
}
