//! Constrained generation: JSON, schemas, grammars, regular expressions, choices.
//!
//! A request's constraint is parsed (`options.rs`), its cost is bounded (`schema.rs`, `lark.rs`, `gbnf.rs`), schemas
//! are rewritten for llguidance (`plain.rs`), and llguidance compiles it outside of the engine thread ([`Compiler`]).
//! The result is a [`Constraint`](emberflow_engine::Constraint) per text (`matcher.rs`): a matcher over token bytes.

mod compiler;
mod disjoint;
mod formats;
mod gbnf;
mod keywords;
mod lark;
mod library;
mod matcher;
mod options;
mod plain;
mod schema;
mod trial;

use serde_json::Value;

pub use compiler::{Compiler, Preface, TEXT_BYTES, Vocabulary};
pub use formats::format_pattern;
pub use options::{ConstraintOptions, Rules};
pub use trial::command;

#[cfg(test)]
pub mod tests;

/// The schema of a function's parameters.
#[derive(Debug, Clone)]
pub struct ParameterSchema<'a> {
    /// The function's name.
    pub name: &'a str,
    /// The schema.
    pub schema: Value,
    /// Whether unknown keywords are refused.
    pub strict: bool,
}

/// The same schemas for a grammar written by the server, each and all together within the limits.
///
/// # Errors
/// A limit is exceeded, or a schema cannot be expressed.
pub fn bounded(mut all: Vec<ParameterSchema<'_>>) -> Result<Vec<ParameterSchema<'_>>, String> {
    let named = |name: &str, why: String| format!("the parameters of `{name}`: {why}");
    for of in &all {
        schema::check(&of.schema).map_err(|why| named(of.name, why))?;
    }
    let schemas = all.iter().map(|of| of.schema.clone());
    schema::check(&schemas.collect())?;
    for of in &mut all {
        let plain = plain::plain(&of.schema, of.strict).map_err(|why| named(of.name, why))?;
        of.schema = compiler::with_options(&plain);
    }
    Ok(all)
}

/// Memory for a compilation, in the child and then here; compilations run one at a time.
pub const COMPILE_BYTES: u64 = 8 << 20;

/// Maximum bytes of a schema without descriptions, of a grammar, a regular expression or a choice.
pub const MAX_SOURCE: usize = 32 << 10;
