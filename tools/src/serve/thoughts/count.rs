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

#[cfg(test)]
mod tests {
    use super::super::{Opening, Reading, ReasoningFormat};
    use super::*;

    /// The count after a text whose tokens are these pieces; an empty one is completed by the next.
    fn counted(form: ReasoningFormat, opened: bool, pieces: &[&str]) -> usize {
        let mut reader = Reading::new(Some(Opening { form, opened }), None);
        let (mut tokens, mut all) = (ThoughtTokens::default(), 0);
        for (at, piece) in pieces.iter().enumerate() {
            if !piece.is_empty() {
                let parts = reader.push(piece);
                all += tokens.take(at + 1, &parts, reader.holds());
            }
        }
        all + tokens.rest(&reader.finish(true))
    }

    #[test]
    fn tokens_between_the_tags_count() {
        let think = ReasoningFormat::of_template("<think>").unwrap();
        let count = |opened, pieces: &[&str]| counted(think, opened, pieces);
        let whole = [
            "<think>", "\n", "Let", " me", " see", ".", "\n", "</think>", "\n\n", "Done", ".",
        ];
        assert_eq!(count(false, &whole), 4);
        assert_eq!(count(true, &whole[1..]), 4, "opened by the prompt");
        let split = [
            "<th", "ink>", "Hm", "\n", "x <", " y", "</", "think", ">", "Yes",
        ];
        assert_eq!(count(false, &split), 4, "tags of several tokens");
        assert_eq!(
            count(true, &["", "", "\u{1f642}", "</think>", "Yes"]),
            3,
            "a character of three tokens"
        );
        assert_eq!(count(true, &["Hm", " so", "\n"]), 2, "cut off");
        assert_eq!(
            count(true, &["Hm", " </"]),
            2,
            "cut off in what could be a tag"
        );
        assert_eq!(count(false, &["No", " thoughts"]), 0);
        let harmony = ReasoningFormat::Harmony;
        let channels = [
            "<|channel|>",
            "analysis",
            "<|message|>",
            "We",
            " see",
            "<|end|>",
            "<|start|>",
            "assistant",
            "<|channel|>",
            "final",
            "<|message|>",
            "Hi",
        ];
        assert_eq!(counted(harmony, false, &channels), 2);
        let messages = [
            "<|think|>",
            "We",
            " see",
            "<|end|>",
            "<|begin|>",
            "assistant",
            "<|content|>",
            "Hi",
        ];
        assert_eq!(counted(ReasoningFormat::Solar, false, &messages), 2);
    }
}
