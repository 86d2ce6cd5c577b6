//! What a model writes to itself before it answers.
//!
//! A chat template says in which form ([`Form`]). While a text comes, [`Reading`] takes it apart into thoughts, the
//! answer, and calls of tools.

mod asked;
mod form;
mod harmony;
mod tags;

use super::calls::{Part, Reader};
use harmony::Harmony;
use tags::Tags;

pub use asked::Asked;
pub use form::{Form, Opening};

/// Reads one text.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    thoughts: Thoughts,
    /// For calls in what is no thought.
    calls: Option<Reader>,
}

#[derive(Debug, Clone, Default)]
enum Thoughts {
    #[default]
    None,
    Tags(Tags),
    Harmony(Harmony),
}

impl Reading {
    /// Reads a text in this form, and the rest of it for calls.
    pub fn new(opening: Option<Opening>, calls: Option<Reader>) -> Self {
        match opening {
            None => Self {
                thoughts: Thoughts::None,
                calls,
            },
            Some(Opening {
                form: Form::Tags(tags),
                opened,
            }) => Self {
                thoughts: Thoughts::Tags(Tags::new(tags, opened)),
                calls,
            },
            // Calls are channels like any other.
            Some(Opening {
                form: Form::Harmony,
                ..
            }) => Self {
                thoughts: Thoughts::Harmony(Harmony::new(calls.map(|calls| calls.names()))),
                calls: None,
            },
        }
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        match (&self.thoughts, &self.calls) {
            (Thoughts::Harmony(harmony), _) => harmony.calls(),
            (_, calls) => calls.as_ref().map_or(0, Reader::calls),
        }
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        let parts = match &mut self.thoughts {
            Thoughts::None => vec![Part::Text(piece.to_owned())],
            Thoughts::Tags(tags) => tags.push(piece),
            Thoughts::Harmony(harmony) => harmony.push(piece),
        };
        self.for_calls(parts)
    }

    /// The rest, at the end of the text; `cut` if it was cut off.
    pub fn finish(&mut self, cut: bool) -> Vec<Part> {
        let parts = match &mut self.thoughts {
            Thoughts::None => Vec::new(),
            Thoughts::Tags(tags) => tags.finish(),
            Thoughts::Harmony(harmony) => harmony.finish(),
        };
        let mut parts = self.for_calls(parts);
        parts.extend(self.calls.iter_mut().flat_map(|calls| calls.finish(cut)));
        parts
    }

    fn for_calls(&mut self, parts: Vec<Part>) -> Vec<Part> {
        let Some(calls) = &mut self.calls else {
            return parts;
        };
        let read = parts.into_iter().flat_map(|part| match part {
            Part::Text(text) => calls.push(&text),
            other => vec![other],
        });
        read.collect()
    }
}

#[cfg(test)]
mod tests;
