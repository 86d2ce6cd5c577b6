//! Prompt outputs that requests ask for: log-probabilities of its tokens, mean of its hidden
//! states.

use std::ops::Range;

use super::events::Event;
use super::log_probs::LogProbs;
use super::text::LiveText;
use crate::engine::Engine;
use crate::error::Error;

/// Events about the prompt of `text` from its `rows` of the completed pass. Call before the text
/// advances.
///
/// # Errors
/// A failed read of the output head.
pub(super) fn prompt_events(
    engine: &mut Engine,
    text: &mut LiveText,
    rows: Range<usize>,
) -> Result<[Option<Event>; 2], Error> {
    if text.done == text.prompt.len() {
        return Ok([None, None]);
    }
    Ok([
        log_probs(engine, text, rows.clone())?,
        mean_hidden(engine, text, rows),
    ])
}

/// Log-probabilities of the tokens that follow `rows`, if requested.
fn log_probs(
    engine: &mut Engine,
    text: &LiveText,
    rows: Range<usize>,
) -> Result<Option<Event>, Error> {
    let request = &text.request;
    let next = text.prompt.get(text.done + 1..).unwrap_or_default();
    let top = request.log_probs.filter(|_| request.prompt_log_probs);
    let Some(top) = top.filter(|_| !next.is_empty()) else {
        return Ok(None);
    };
    let Engine { decoder, pass, .. } = engine;
    let rows = rows.start..rows.end.min(rows.start + next.len());
    let mut log_probs = Vec::with_capacity(rows.len());
    let most = decoder.most_logits();
    for start in rows.clone().step_by(most) {
        let part = start..rows.end.min(start + most);
        decoder.head(pass, part.clone())?;
        for (row, at) in part.zip(0..) {
            let token = next[row - rows.start];
            log_probs.push(LogProbs::of(decoder.logits(at), token, top));
        }
    }
    Ok(Some(Event::Prompt {
        id: text.id,
        log_probs,
    }))
}

/// Adds the hidden states of `rows` to the sum; returns the mean after the last rows of the prompt.
fn mean_hidden(engine: &mut Engine, text: &mut LiveText, rows: Range<usize>) -> Option<Event> {
    if text.hidden.is_empty() {
        return None;
    }
    let Engine { decoder, pass, .. } = engine;
    let computed = rows.len();
    for hidden in decoder.hidden(pass, rows).chunks_exact(text.hidden.len()) {
        for (sum, &value) in text.hidden.iter_mut().zip(hidden) {
            *sum += f64::from(value);
        }
    }
    if text.done + computed < text.prompt.len() {
        return None;
    }
    let count = text.prompt.len() as f64;
    Some(Event::Hidden {
        id: text.id,
        mean: (text.hidden.iter().map(|sum| (sum / count) as f32)).collect(),
    })
}
