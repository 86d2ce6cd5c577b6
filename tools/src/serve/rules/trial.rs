//! Grammars are tried in a process of their own before the server compiles them: one that needs more
//! time, memory or stack than there may be ends there.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::ApproximateTokEnv;
use xxhash_rust::xxh3::xxh3_128;

use super::COMPILE_BYTES;
use super::library::{begin, factory};
use crate::Failure;
use crate::child::{self, Limits};

/// Most processor time, in seconds.
const SECONDS: u64 = 1;
/// Grammars that are known to be good.
const KNOWN: usize = 256;

/// Tries grammars, each once as long as it is remembered.
#[derive(Debug, Default)]
pub struct Trials {
    /// Hashes, the oldest first.
    known: Mutex<VecDeque<u128>>,
}

impl Trials {
    /// Tries a grammar.
    ///
    /// # Errors
    /// Why no text can be held to it.
    pub fn check(&self, grammar: &TopLevelGrammar) -> Result<(), String> {
        let input = serde_json::to_vec(grammar).map_err(|e| e.to_string())?;
        let hash = xxh3_128(&input);
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known().contains(&hash) {
            return Ok(());
        }
        let ended = child::ask("check-grammar", &input, 1 << 16);
        let ended = ended.map_err(|e| format!("it could not be tried: {e}"))?;
        if !ended.status.success() {
            return Err(format!(
                "it takes more than {SECONDS} second or {} MiB",
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

/// The child: compiles the grammar in standard input, and writes why that fails.
///
/// # Errors
/// Standard input or output that fails.
pub fn command() -> Result<(), Failure> {
    let input = child::begin(|_| Limits {
        memory: COMPILE_BYTES,
        seconds: SECONDS,
    })?;
    let standard = |e: serde_json::Error| child::failure(e.into());
    let grammar: TopLevelGrammar = serde_json::from_slice(&input).map_err(standard)?;
    // What the tokens are makes no difference to what a grammar costs.
    let factory = factory(ApproximateTokEnv::single_byte_env);
    let found = factory.and_then(|factory| begin(&factory, grammar).map(|_| ()));
    let output = serde_json::to_vec(&found).map_err(standard)?;
    Ok(std::io::stdout().lock().write_all(&output)?)
}
