//! A text as tokens, for commands that run one through a model window by window.

use emberflow_engine::Model;

use crate::Failure;

/// Tokens of a window: `asked`, or `usual` where the model takes as many.
///
/// # Errors
/// Wrong usage, where the model does not take 2 to `most` tokens of that.
pub fn window(asked: Option<u32>, usual: u32, most: u32) -> Result<u32, Failure> {
    let window = asked.unwrap_or(usual.min(most));
    if window < 2 || window > most {
        return Err(Failure::usage(format!(
            "--window {window}: this model takes 2 to {most}"
        )));
    }
    Ok(window)
}

/// The first `limit` tokens of `text`, or all. The text is dropped, so that a memory plan that is
/// made afterwards sees the tokens alone.
///
/// # Errors
/// What the tokenizer refuses.
pub fn tokens(model: &Model, text: String, limit: Option<u64>) -> Result<Vec<u32>, Failure> {
    let mut ids = model.text().tokens(&text)?;
    if let Some(limit) = limit {
        ids.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    }
    Ok(ids)
}
