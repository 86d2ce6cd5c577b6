//! Tool calls.
//!
//! A model family's format is data ([`CallFormat`], frames in `frame.rs`), read off its chat template. The tools of a
//! request are passed to the template ([`ToolOptions::plan`]); generated text is parsed for calls incrementally
//! ([`CallReader`]). If a call is forced or arguments are strict, a grammar constrains the text (`grammar.rs`).

mod arguments;
mod derive;
mod escape;
mod format;
mod frame;
mod grammar;
mod header;
mod json;
mod literal;
mod options;
mod reader;
mod strings;
mod table;
mod tagged;
mod types;
mod values;
mod writer;

pub use format::{CallFormat, HARMONY, shows_tools, special};
pub use frame::begun;
pub use options::{Plan, ToolOptions};
pub use reader::{CallReader, Part};

#[cfg(test)]
mod tests;
