//! Calls inside of the reasoning.
//!
//! Some models call a tool without closing their reasoning, which then ends. Others write calls in their reasoning that
//! they only consider: those stay reasoning, since it is closed later. So a call is held until that is known. If nothing
//! follows the reasoning, the calls with which it ends were meant after all.

use super::super::calls::{CallReader, Part};
use super::super::whole_calls::CallCount;

/// Parser of the reasoning.
#[derive(Debug, Clone)]
pub struct Drafts {
    fresh: CallReader,
    reader: CallReader,
    /// Text whose parts have not been returned.
    held: String,
    /// A call, and what follows it.
    parts: Vec<Part>,
    /// The calls with which the closed reasoning ends.
    last: Option<DraftsEnd>,
}

impl Drafts {
    /// A parser for the same calls as `calls`.
    pub fn new(calls: &CallReader) -> Self {
        Self {
            fresh: calls.clone(),
            reader: calls.clone(),
            held: String::new(),
            parts: Vec::new(),
            last: None,
        }
    }

    /// Parses the next piece of the reasoning: what is certainly reasoning.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        self.held.push_str(piece);
        let found = self.reader.push(piece);
        let mut thoughts = Vec::new();
        for part in found {
            match part {
                Part::Text(text) if self.parts.is_empty() => {
                    self.held.drain(..text.len().min(self.held.len()));
                    thoughts.push(Part::Thought(text));
                }
                part => self.parts.push(part),
            }
        }
        thoughts
    }

    /// Whether the last pieces are held back until it is clear whether they are a call.
    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// The reasoning is closed: the rest of it.
    pub fn close(&mut self) -> Option<Part> {
        let held = std::mem::take(&mut self.held);
        if held.is_empty() {
            return None;
        }
        let mut reader = std::mem::replace(&mut self.reader, self.fresh.clone());
        let mut parts = std::mem::take(&mut self.parts);
        parts.extend(reader.finish(false));
        let text = |part: &Part| matches!(part, Part::Text(_));
        let end = parts.iter().rposition(text).map_or(0, |at| at + 1);
        let parts = parts.split_off(end);
        let mut count = CallCount::default();
        count.take(&parts);
        let whole = count.finish().is_some_and(|calls| calls > 0);
        self.last = whole.then_some(DraftsEnd {
            parts,
            calls: reader,
        });
        Some(Part::Thought(held))
    }

    /// An answer or a call follows the reasoning.
    pub fn answered(&mut self) {
        self.last = None;
    }

    /// The calls with which the closed reasoning ends, if nothing follows it.
    pub fn last(&mut self) -> Option<DraftsEnd> {
        self.last.take()
    }

    /// The text ended inside of the reasoning: the rest of it, or calls; and the parser that has read them. `cut`: it
    /// ended at its length limit.
    pub fn finish(&mut self, cut: bool) -> DraftsEnd {
        let rest = self.reader.finish(cut);
        let mut parts = std::mem::take(&mut self.parts);
        let called = !parts.is_empty();
        parts.extend(rest.into_iter().map(|part| match part {
            Part::Text(text) if !called => Part::Thought(text),
            part => part,
        }));
        DraftsEnd {
            parts,
            calls: self.reader.clone(),
        }
    }
}

/// The end of the reasoning.
#[derive(Debug, Clone)]
pub struct DraftsEnd {
    /// The rest of the text.
    pub parts: Vec<Part>,
    /// The parser that has read it.
    pub calls: CallReader,
}
