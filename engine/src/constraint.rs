//! What may follow: rules that a text is held to, token by token.

use std::fmt::Debug;

/// Holds one text to rules, a grammar for example. The stepper asks before each token of the text
/// and tells which one was drawn, in order; nothing else changes what the rules allow, so a text
/// depends neither on others nor on preemption.
pub trait Constraint: Debug + Send {
    /// Finds out which tokens may follow; [`allows`](Self::allows) answers then.
    ///
    /// # Errors
    /// Why that cannot be said; the text ends with it.
    fn prepare(&mut self) -> Result<(), String>;

    /// Whether `token` may follow. At least one token may.
    fn allows(&self, token: u32) -> bool;

    /// Takes the token that follows.
    ///
    /// # Errors
    /// Why the rules end here; the text ends with it.
    fn accept(&mut self, token: u32) -> Result<(), String>;

    /// Whether nothing may follow any more.
    fn is_complete(&self) -> bool;

    /// The same rules in the same state, for another continuation.
    fn fork(&self) -> Box<dyn Constraint>;
}
