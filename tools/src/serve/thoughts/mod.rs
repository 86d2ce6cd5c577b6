//! Reasoning: text that a model writes before its answer.
//!
//! The chat template determines the format ([`ReasoningFormat`]). [`Reading`] splits generated text into reasoning, answer and
//! tool calls, piece by piece.

mod count;
mod drafts;
mod form;
mod harmony;
mod options;
mod solar;
mod tags;

use super::calls::{CallReader, Part};
use drafts::Drafts;
use harmony::Harmony;
use solar::Solar;
use tags::Tags;

pub use count::ThoughtTokens;
pub use form::{Opening, ReasoningFormat};
pub use options::ReasoningOptions;

/// Parser of one text.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    thoughts: Thoughts,
    /// Parser of calls outside of the reasoning.
    calls: Option<CallReader>,
    /// Parser of calls inside of it.
    drafts: Option<Drafts>,
}

#[derive(Debug, Clone, Default)]
enum Thoughts {
    #[default]
    None,
    Tags(Tags),
    Harmony(Harmony),
    Solar(Solar),
}

impl Reading {
    /// A parser for this format of reasoning, and for calls in the rest.
    pub fn new(opening: Option<Opening>, calls: Option<CallReader>) -> Self {
        match opening {
            None => Self {
                calls,
                ..Self::default()
            },
            Some(Opening {
                form: ReasoningFormat::Tags(tags),
                opened,
            }) => Self {
                thoughts: Thoughts::Tags(Tags::new(tags, opened)),
                drafts: calls
                    .as_ref()
                    .filter(|calls| calls.marks())
                    .map(Drafts::new),
                calls,
            },
            // In Harmony, calls are channels too.
            Some(Opening {
                form: ReasoningFormat::Harmony,
                ..
            }) => Self {
                thoughts: Thoughts::Harmony(Harmony::new(calls)),
                ..Self::default()
            },
            Some(Opening {
                form: ReasoningFormat::Solar,
                ..
            }) => Self {
                thoughts: Thoughts::Solar(Solar::default()),
                calls,
                ..Self::default()
            },
        }
    }

    /// Parses the next piece.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        let parts = match &mut self.thoughts {
            Thoughts::None => vec![Part::Text(piece.to_owned())],
            Thoughts::Tags(tags) => tags.push(piece),
            Thoughts::Harmony(harmony) => harmony.push(piece),
            Thoughts::Solar(solar) => solar.push(piece),
        };
        self.for_calls(parts)
    }

    /// Parses the rest at the end of the text; `cut` if it ended at its length limit.
    pub fn finish(&mut self, cut: bool) -> Vec<Part> {
        let parts = match &mut self.thoughts {
            Thoughts::None => Vec::new(),
            Thoughts::Tags(tags) => tags.finish(),
            Thoughts::Harmony(harmony) => harmony.finish(),
            Thoughts::Solar(solar) => solar.finish(),
        };
        let mut parts = self.for_calls(parts);
        let inside = matches!(&self.thoughts, Thoughts::Tags(tags) if tags.is_inside());
        if !inside {
            parts.extend(self.calls.iter_mut().flat_map(|calls| calls.finish(cut)));
        }
        let drafts = self.drafts.as_mut();
        let ended = drafts.and_then(|drafts| match inside {
            true => Some(drafts.finish(cut)),
            false => drafts.last(),
        });
        if let Some(ended) = ended {
            parts.extend(ended.parts);
            self.calls = Some(ended.calls);
        }
        parts
    }

    /// Whether the last pieces are held back until it is clear whether they are reasoning.
    pub fn holds(&self) -> bool {
        match &self.thoughts {
            Thoughts::None => false,
            Thoughts::Tags(tags) => tags.holds() || self.drafts.as_ref().is_some_and(Drafts::holds),
            Thoughts::Harmony(harmony) => harmony.holds(),
            Thoughts::Solar(solar) => solar.holds(),
        }
    }

    fn for_calls(&mut self, parts: Vec<Part>) -> Vec<Part> {
        let Some(calls) = &mut self.calls else {
            return parts;
        };
        let mut read = Vec::new();
        for part in parts {
            match (part, &mut self.drafts) {
                (Part::Thought(text), Some(drafts)) => read.extend(drafts.push(&text)),
                (Part::Text(text), drafts) => {
                    if let Some(drafts) = drafts {
                        read.extend(drafts.close());
                        drafts.answered();
                    }
                    read.extend(calls.push(&text));
                }
                (other, _) => read.push(other),
            }
        }
        if let (Thoughts::Tags(tags), Some(drafts)) = (&self.thoughts, &mut self.drafts)
            && !tags.is_inside()
        {
            read.extend(drafts.close());
        }
        read
    }
}

#[cfg(test)]
mod tests;
