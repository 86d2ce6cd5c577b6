//! Number of tokens of the reasoning.

use super::super::calls::Part;

/// Counts the tokens of the reasoning in one text, without its tags and the white space around it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ThoughtTokens {
    /// Tokens of the text so far.
    seen: usize,
    /// The last ones, whose text the parser holds back.
    held: usize,
}

impl ThoughtTokens {
    /// The tokens that `parts`, parsed from the next piece, show to be reasoning. `tokens`: those of the text so
    /// far. `holds`: the parser holds text back.
    pub fn take(&mut self, tokens: usize, parts: &[Part], holds: bool) -> usize {
        let unclear = self.held + tokens.saturating_sub(self.seen);
        self.seen = tokens;
        self.held = 0;
        if has_thought(parts) {
            unclear
        } else {
            self.held = if holds { unclear } else { 0 };
            0
        }
    }

    /// The tokens that the last parts of the text show to be reasoning.
    pub fn rest(&mut self, parts: &[Part]) -> usize {
        let held = std::mem::take(&mut self.held);
        if has_thought(parts) { held } else { 0 }
    }
}

fn has_thought(parts: &[Part]) -> bool {
    parts.iter().any(|part| matches!(part, Part::Thought(_)))
}
