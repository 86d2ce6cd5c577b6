//! Test-compiles grammars in a child process, which is killed if one needs too much time, memory or stack.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::ApproximateTokEnv;
use xxhash_rust::xxh3::xxh3_128;

use super::COMPILE_BYTES;
use super::library::{begin, factory};
use crate::Failure;
use crate::child::{self, ChildBounds, Limits};

/// CPU time limit in seconds.
const SECONDS: u64 = 1;
/// Number of remembered good grammars.
const KNOWN: usize = 256;

/// Test-compiles grammars, each once as long as it is remembered.
#[derive(Debug, Default)]
pub struct Trials {
    /// Hashes of good grammars, oldest first.
    known: Mutex<VecDeque<u128>>,
}

impl Trials {
    /// Test-compiles a grammar.
    ///
    /// # Errors
    /// Why the grammar cannot be used.
    pub fn check(&self, grammar: &TopLevelGrammar) -> Result<(), String> {
        let input = serde_json::to_vec(grammar).map_err(|e| e.to_string())?;
        let hash = xxh3_128(&input);
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known().contains(&hash) {
            return Ok(());
        }
        let bounds = ChildBounds {
            bytes: 1 << 16,
            time: child::LONGEST,
            total: child::LONGEST,
        };
        let ended = child::ask(child::this_program(), &["check-grammar"], input, bounds);
        let ended = ended.map_err(|e| format!("the test process failed: {e}"))?;
        if !ended.succeeded() {
            return Err(format!(
                "it needs more than {SECONDS} second or {} MiB",
                COMPILE_BYTES >> 20
            ));
        }
        let found: Result<(), String> =
            serde_json::from_slice(&ended.output).map_err(|e| e.to_string())?;
        found?;
        let mut known = known();
        if known.len() >= KNOWN {
            known.pop_front();
        }
        known.push_back(hash);
        Ok(())
    }
}

/// The child: compiles the grammar from standard input and writes the error, if any.
///
/// # Errors
/// I/O errors on standard input or output.
pub fn command() -> Result<(), Failure> {
    let input = child::begin(|_| Limits {
        memory: COMPILE_BYTES,
        seconds: SECONDS,
    })?;
    let standard = |e: serde_json::Error| child::failure(e.into());
    let grammar: TopLevelGrammar = serde_json::from_slice(&input).map_err(standard)?;
    // The cost of a grammar hardly depends on the vocabulary.
    let factory = factory(ApproximateTokEnv::single_byte_env);
    let found = factory.and_then(|factory| begin(&factory, grammar).map(|_| ()));
    let output = serde_json::to_vec(&found).map_err(standard)?;
    Ok(std::io::stdout().lock().write_all(&output)?)
}
