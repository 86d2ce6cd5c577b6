//! Tool calls.
//!
//! The tools of a request are passed to the chat template ([`ToolOptions::plan`]); generated text is parsed for calls
//! incrementally ([`CallReader`]). If a call is forced or arguments are strict, a grammar constrains the text.

mod elements;
mod form;
mod grammar;
mod options;
mod reader;

pub use form::{HARMONY, special};
pub use options::{Plan, ToolOptions};
pub use reader::{CallReader, Part, begun};

#[cfg(test)]
mod tests;
