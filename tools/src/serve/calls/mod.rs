//! Tool calls.
//!
//! The tools of a request are passed to the chat template ([`Asked::plan`]); generated text is parsed for calls
//! incrementally ([`Reader`]). If a call is forced or arguments are strict, a grammar constrains the text.

mod asked;
mod form;
mod grammar;
mod reader;

pub use asked::{Asked, Plan};
pub use form::{HARMONY, special};
pub use reader::{Part, Reader, begun};

#[cfg(test)]
mod tests;
