//! Windows of a text, for commands that learn from one.

use emberflow_models::config::ModelConfig;
use emberflow_models::tokenizer::Tokenizer;

use crate::Failure;

/// Tokens of a window.
const WINDOW: usize = 512;

/// Bytes of text that surely hold a window's tokens.
const BYTES_PER_TOKEN: usize = 16;

/// How many windows to choose.
#[derive(Debug, Clone, Copy)]
pub struct Amount {
    /// Tokens of all windows, about.
    pub tokens: usize,
    /// Fewest windows.
    pub least: usize,
}

/// The tokens of windows evenly spread over a text, each after the tokens that the model wants before
/// a text. All of a text with fewer tokens than asked for.
///
/// # Errors
/// Wrong usage, for a text that does not give the fewest windows, and what the tokenizer refuses.
pub fn choose(
    tokenizer: &Tokenizer,
    config: &ModelConfig,
    bytes: &[u8],
    amount: Amount,
) -> Result<Vec<Vec<u32>>, Failure> {
    let window = WINDOW.min(config.max_context as usize);
    let count = amount.tokens.div_ceil(window).max(amount.least);
    let start = &tokenizer.around().before;
    let body = window.saturating_sub(start.len()).max(1);
    let length = (body * BYTES_PER_TOKEN).min(bytes.len().div_ceil(count));
    let mut windows = Vec::new();
    for i in 0..count {
        let at = i * (bytes.len() / count);
        // a cut character becomes a replacement character, which is cut off
        let piece = String::from_utf8_lossy(&bytes[at..(at + length).min(bytes.len())]);
        let piece = piece.trim_matches(char::REPLACEMENT_CHARACTER);
        let found = tokenizer.encode(piece, false)?;
        if let Some(&token) = found.iter().find(|&&token| token >= config.vocab) {
            let vocab = config.vocab;
            return Err(emberflow_engine::Error::Token { token, vocab }.into());
        }
        let mut ids = start.clone();
        ids.extend(found.into_iter().take(body));
        if ids.len() > start.len().max(1) {
            windows.push(ids);
        }
    }
    if windows.len() < amount.least {
        return Err(Failure::usage(format!(
            "the text gives {} windows of tokens, at least {} are needed; give more text",
            windows.len(),
            amount.least
        )));
    }
    Ok(windows)
}
