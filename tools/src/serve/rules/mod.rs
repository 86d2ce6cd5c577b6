//! Constrained generation: JSON, schemas, grammars, regular expressions, choices.
//!
//! A request's constraint is parsed (`options.rs`), its cost is bounded (`schema.rs`, `lark.rs`, `gbnf.rs`), schemas
//! are rewritten for llguidance (`plain.rs`), and llguidance compiles it outside of the engine thread ([`Compiler`]).
//! The result is a [`Constraint`](emberflow_engine::Constraint) per text (`matcher.rs`): a matcher over token bytes.

mod compiler;
mod disjoint;
mod gbnf;
mod lark;
mod library;
mod matcher;
mod options;
mod plain;
mod schema;
mod trial;

use serde_json::Value;

pub use compiler::{Compiler, Preface, TEXT_BYTES, Vocabulary};
pub use options::{ConstraintOptions, Rules};
pub use trial::command;

#[cfg(test)]
pub mod tests;

/// Schemas for a grammar written by the server, each and all together within the limits.
///
/// # Errors
/// A limit is exceeded.
pub fn bounded(schemas: Vec<Value>) -> Result<Vec<Value>, String> {
    schemas.iter().try_for_each(schema::check)?;
    let all = Value::Array(schemas);
    schema::check(&all)?;
    let schemas = all.as_array().into_iter().flatten();
    schemas
        .map(|schema| Ok(compiler::with_options(&plain::plain(schema)?)))
        .collect()
}

/// Memory for a compilation, in the child and then here; compilations run one at a time.
pub const COMPILE_BYTES: u64 = 8 << 20;

/// Maximum bytes of a schema without descriptions, of a grammar, a regular expression or a choice.
pub const MAX_SOURCE: usize = 32 << 10;
