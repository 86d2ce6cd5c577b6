//! Solar Open's message format: `<|think|>…<|end|>`, then `<|begin|>assistant` and `<|content|>` with the answer or
//! `<|tool_calls|>` with calls. The prompt ends with `<|begin|>assistant`.

use super::super::calls::{Part, begun};

const BEGIN: &str = "<|begin|>";
const THINK: &str = "<|think|>";
const CONTENT: &str = "<|content|>";
const TOOL_CALLS: &str = "<|tool_calls|>";
const END: &str = "<|end|>";

/// Marker tokens of Solar Open.
pub const SOLAR: [&str; 5] = [BEGIN, THINK, CONTENT, TOOL_CALLS, END];

/// Maximum bytes between the beginning of a message and its content.
const MAX_HEADER: usize = 64;

/// State of the parser.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum SolarState {
    /// Before the token that gives the kind of a message.
    #[default]
    Header,
    /// At the beginning of a thought.
    Opened,
    Thought,
    Answer,
    /// Among calls, which another parser reads.
    Calls,
}

/// Parser of one text.
#[derive(Debug, Clone, Default)]
pub struct Solar {
    state: SolarState,
    held: String,
}

impl Solar {
    /// Parses the next piece.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        self.held.push_str(piece);
        let mut parts = Vec::new();
        while !self.held.is_empty() && self.step(&mut parts) {}
        parts
    }

    /// Parses the rest at the end of the text.
    pub fn finish(&mut self) -> Vec<Part> {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            _ if rest.trim().is_empty() => Vec::new(),
            SolarState::Header if rest.trim_start().starts_with(BEGIN) => Vec::new(),
            SolarState::Thought => vec![Part::Thought(rest.trim_end().to_owned())],
            _ => vec![Part::Text(rest)],
        }
    }

    /// Whether the last pieces are held back until it is clear what they are.
    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Handles what can be classified; returns whether to continue.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.state {
            SolarState::Header => self.header(),
            SolarState::Opened => {
                self.held = self.held.trim_start().to_owned();
                if !self.held.is_empty() {
                    self.state = SolarState::Thought;
                }
                true
            }
            SolarState::Thought => self.body(parts, Part::Thought),
            SolarState::Answer => self.body(parts, Part::Text),
            SolarState::Calls => {
                parts.push(Part::Text(std::mem::take(&mut self.held)));
                false
            }
        }
    }

    fn header(&mut self) -> bool {
        let start = self.held.trim_start();
        let begun = [BEGIN, THINK, CONTENT, TOOL_CALLS]
            .map(|sign| start.len() < sign.len() && sign.starts_with(start));
        if begun.contains(&true) {
            return false;
        }
        // The sender stands between the beginning and the kind.
        let kinds = [THINK, CONTENT, TOOL_CALLS];
        let sent = start.strip_prefix(BEGIN).and_then(|sent| {
            let at = kinds.iter().filter_map(|kind| sent.find(kind)).min()?;
            Some(&sent[at..])
        });
        let rest = sent.unwrap_or(start);
        let (state, rest) = if rest.starts_with(TOOL_CALLS) {
            (SolarState::Calls, rest)
        } else if let Some(thought) = rest.strip_prefix(THINK) {
            (SolarState::Opened, thought)
        } else if let Some(answer) = rest.strip_prefix(CONTENT) {
            (SolarState::Answer, answer)
        } else if start.starts_with(BEGIN) && start.len() <= MAX_HEADER {
            return false;
        } else {
            (SolarState::Answer, &*self.held)
        };
        self.held = rest.to_owned();
        self.state = state;
        true
    }

    fn body(&mut self, parts: &mut Vec<Part>, part: fn(String) -> Part) -> bool {
        let ends = [END, BEGIN];
        let found = ends.iter().filter_map(|end| self.held.find(end)).min();
        let clear = found.unwrap_or_else(|| {
            let begun = ends.iter().map(|end| begun(&self.held, end)).max();
            self.held.len() - begun.unwrap_or(0)
        });
        // White space before the end of a thought belongs to it.
        let clear = match self.state {
            SolarState::Thought => self.held[..clear].trim_end().len(),
            _ => clear,
        };
        let rest = self.held.split_off(clear);
        let text = std::mem::replace(&mut self.held, rest);
        if !text.is_empty() {
            parts.push(part(text));
        }
        if found.is_some() {
            let rest = self.held.trim_start();
            self.held = rest.strip_prefix(END).unwrap_or(rest).to_owned();
            self.state = SolarState::Header;
        }
        found.is_some()
    }
}
