//! Rules that a text is held to: JSON, a schema, a grammar, an expression, a choice.
//!
//! A request's rules are read (`asked.rs`), bounded (`schema.rs`, `lark.rs`, `gbnf.rs`), put into words that the
//! crate `llguidance` knows (`plain.rs`) and compiled by the crate
//! `llguidance` away from the engine's thread ([`Compiler`]). What comes out is a
//! [`Constraint`](emberflow_engine::Constraint) for each of the request's texts (`held.rs`): a matcher
//! over the bytes of the vocabulary.

mod apart;
mod asked;
mod compiler;
mod gbnf;
mod held;
mod lark;
mod library;
mod plain;
mod schema;
mod trial;

use serde_json::Value;

pub use asked::{Asked, Rules};
pub use compiler::{Compiler, Preface, TEXT_BYTES, Vocabulary};
pub use trial::command;

#[cfg(test)]
pub mod tests;

/// Schemas for a grammar that the server writes, bounded alone and together.
///
/// # Errors
/// What is too much.
pub fn bounded(schemas: Vec<Value>) -> Result<Vec<Value>, String> {
    schemas.iter().try_for_each(schema::check)?;
    let all = Value::Array(schemas);
    schema::check(&all)?;
    let schemas = all.as_array().into_iter().flatten();
    schemas
        .map(|schema| Ok(compiler::with_options(&plain::plain(schema)?)))
        .collect()
}

/// Memory that compiling takes, in a trial and then here; one at a time compiles.
pub const COMPILE_BYTES: u64 = 8 << 20;

/// Most bytes of a schema without its descriptions, a grammar, an expression or a choice.
const MAX_SOURCE: usize = 32 << 10;
