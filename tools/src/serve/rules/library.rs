//! llguidance with limits.

use std::panic::AssertUnwindSafe;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{Matcher, ParserFactory};

use super::matcher::explain;

/// Limits of llguidance. A lexer state takes about half a kilobyte, a unit of fuel some nanoseconds.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2000,
        initial_lexer_fuel: 200_000,
        step_lexer_fuel: 100_000,
        step_max_items: 20_000,
        max_lexer_states: 5000,
        max_grammar_size: 12_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

/// A parser factory for a vocabulary.
///
/// # Errors
/// A vocabulary that llguidance rejects.
pub fn factory(vocabulary: impl FnOnce() -> TokEnv) -> Result<ParserFactory, String> {
    let made = catch_unwind(AssertUnwindSafe(|| {
        let slices = SlicedBiasComputer::json_slices();
        ParserFactory::new(&vocabulary(), InferenceCapabilities::default(), &slices)
    }));
    let mut factory = made.map_err(|e| explain(&e))?;
    factory.quiet();
    *factory.limits_mut() = limits();
    Ok(factory)
}

/// Compiles a grammar and computes the tokens that may come first.
///
/// # Errors
/// Why the grammar cannot be used.
pub fn begin(factory: &ParserFactory, grammar: TopLevelGrammar) -> Result<Matcher, String> {
    let matcher = catch_unwind(AssertUnwindSafe(|| {
        let mut matcher = Matcher::new(Ok(factory.create_parser(grammar)?));
        let first = matcher.compute_mask_or_eos()?;
        Ok((!first.is_zero()).then_some(matcher))
    }));
    match matcher {
        Ok(Some(matcher)) => Ok(matcher),
        Ok(None) => Err("no text satisfies it".to_owned()),
        Err(e) => Err(explain(&e)),
    }
}
