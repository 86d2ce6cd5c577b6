//! Tools that the model may call.
//!
//! The tools of a request go to the chat template ([`Asked::plan`]); what the model writes is read for
//! calls while it comes ([`Reader`]). Where a call is asked for, or its arguments are strict, a grammar holds
//! the text to that.

mod asked;
mod form;
mod grammar;
mod reader;

pub use asked::{Asked, Plan};
pub use form::{HARMONY, special};
pub use reader::{Part, Reader, begun};

#[cfg(test)]
mod tests;
