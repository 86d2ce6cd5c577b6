//! Reasoning between two tags.

use super::super::calls::{Part, begun};
use super::form::Signs;

/// State of the parser.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TagState {
    /// Only white space so far.
    Before,
    /// At the beginning of the reasoning.
    Opened,
    /// In the reasoning.
    Inside,
    /// Between reasoning and answer.
    Closed,
    /// In the answer.
    Answer,
}

/// Parser of one text.
#[derive(Debug, Clone)]
pub struct Tags {
    signs: &'static Signs,
    state: TagState,
    /// Text that cannot be classified yet.
    held: String,
}

impl Tags {
    /// `opened`: the prompt ends inside the reasoning.
    pub fn new(signs: &'static Signs, opened: bool) -> Self {
        Self {
            signs,
            state: if opened {
                TagState::Opened
            } else {
                TagState::Before
            },
            held: String::new(),
        }
    }

    /// Whether the text is in its reasoning.
    pub fn is_inside(&self) -> bool {
        matches!(self.state, TagState::Opened | TagState::Inside)
    }

    /// Parses the next piece.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        if self.state == TagState::Answer {
            return vec![Part::Text(piece.to_owned())];
        }
        self.held.push_str(piece);
        let mut parts = Vec::new();
        while !self.held.is_empty() && self.step(&mut parts) {}
        parts
    }

    /// Whether text is held back.
    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Parses the rest at the end of the text.
    pub fn finish(&mut self) -> Vec<Part> {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            _ if rest.is_empty() => Vec::new(),
            TagState::Before | TagState::Answer => vec![Part::Text(rest)],
            TagState::Opened | TagState::Inside => match rest.trim_end() {
                "" => Vec::new(),
                rest => vec![Part::Thought(rest.to_owned())],
            },
            TagState::Closed => Vec::new(),
        }
    }

    /// Handles what can be classified; returns whether to continue.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        let Signs { open, close } = self.signs;
        let start = self.held.trim_start();
        match self.state {
            TagState::Before if start.len() < open.len() && open.starts_with(start) => {
                return false;
            }
            TagState::Before => match start.strip_prefix(open) {
                Some(thoughts) => {
                    self.held = thoughts.to_owned();
                    self.state = TagState::Opened;
                }
                None => self.state = TagState::Answer,
            },
            TagState::Opened | TagState::Closed if start.is_empty() => {
                self.held.clear();
                return false;
            }
            TagState::Opened => {
                // A model may repeat the opening tag with which the prompt ends.
                if start.len() < open.len() && open.starts_with(start) {
                    return false;
                }
                match start.strip_prefix(open) {
                    Some(rest) => self.held = rest.to_owned(),
                    None => {
                        self.held = start.to_owned();
                        self.state = TagState::Inside;
                    }
                }
            }
            TagState::Closed => {
                self.held = start.to_owned();
                self.state = TagState::Answer;
            }
            TagState::Inside => {
                let found = self.held.find(close);
                let clear = found.unwrap_or_else(|| self.held.len() - begun(&self.held, close));
                // White space before the closing tag belongs to it.
                let clear = self.held[..clear].trim_end().len();
                let rest = self.held.split_off(clear);
                let thought = std::mem::replace(&mut self.held, rest);
                if !thought.is_empty() {
                    parts.push(Part::Thought(thought));
                }
                if found.is_none() {
                    return false;
                }
                self.held = self.held.trim_start()[close.len()..].to_owned();
                self.state = TagState::Closed;
            }
            TagState::Answer => {
                parts.push(Part::Text(std::mem::take(&mut self.held)));
                return false;
            }
        }
        true
    }
}
