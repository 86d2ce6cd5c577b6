//! Rules for generated texts from a checkpoint's authors, in addition to sampling parameters.

use serde::{Deserialize, Serialize};

/// Rules for generated texts, with names and meanings as in transformers' `generation_config.json`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TextRules {
    /// Tokens that are never generated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub suppress_tokens: Vec<u32>,
    /// Tokens that are not generated right after the prompt.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub begin_suppress_tokens: Vec<u32>,
    /// The token that follows a prompt of one token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forced_bos_token_id: Option<u32>,
    /// No run of this many tokens occurs twice, prompt included; 0 = off.
    #[serde(skip_serializing_if = "is_zero")]
    pub no_repeat_ngram_size: u32,
    /// Runs of tokens that are never completed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bad_words_ids: Vec<Vec<u32>>,
    /// Texts that end a generated text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_strings: Vec<String>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl TextRules {
    /// Whether there are no rules.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Removes candidates that the rules forbid after `history`, the tokens so far. `begins`: the
    /// prompt has just ended. `token` returns a candidate's token.
    pub fn hold<C>(
        &self,
        candidates: &mut Vec<C>,
        token: impl Fn(&C) -> u32,
        history: &[u32],
        begins: bool,
    ) {
        if let (Some(forced), [_]) = (self.forced_bos_token_id, history) {
            candidates.retain(|c| token(c) == forced);
            return;
        }
        let mut forbidden = self.suppress_tokens.clone();
        // After a forced token the text begins with the next one.
        let forced = usize::from(self.forced_bos_token_id.is_some());
        if begins && history.len() > forced || forced == 1 && history.len() == 2 {
            forbidden.extend(&self.begin_suppress_tokens);
        }
        for word in &self.bad_words_ids {
            if let Some((last, before)) = word.split_last()
                && history.ends_with(before)
            {
                forbidden.push(*last);
            }
        }
        let size = self.no_repeat_ngram_size as usize;
        if size > 0 && history.len() >= size {
            let end = &history[history.len() - (size - 1)..];
            let runs = history.windows(size).filter(|run| run.starts_with(end));
            forbidden.extend(runs.map(|run| run[size - 1]));
        }
        if !forbidden.is_empty() {
            forbidden.sort_unstable();
            candidates.retain(|c| forbidden.binary_search(&token(c)).is_err());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten tokens after transformers 5.23's processors.
    fn left(rules: &TextRules, history: &[u32], begins: bool) -> Vec<u32> {
        let mut all: Vec<u32> = (0..10).collect();
        rules.hold(&mut all, |token| *token, history, begins);
        all
    }

    fn without(gone: &[u32]) -> Vec<u32> {
        (0..10).filter(|token| !gone.contains(token)).collect()
    }

    /// `SuppressTokensLogitsProcessor` and `SuppressTokensAtBeginLogitsProcessor`.
    #[test]
    fn suppressed_tokens_do_not_come() {
        let rules = TextRules {
            suppress_tokens: vec![7, 2],
            begin_suppress_tokens: vec![5],
            ..TextRules::default()
        };
        assert_eq!(left(&rules, &[1, 2], true), without(&[2, 5, 7]));
        assert_eq!(left(&rules, &[1, 2, 3], false), without(&[2, 7]));
    }

    /// `ForcedBOSTokenLogitsProcessor`: only after a single token.
    #[test]
    fn a_forced_token_follows_a_single_one() {
        let rules = TextRules {
            forced_bos_token_id: Some(4),
            begin_suppress_tokens: vec![5],
            ..TextRules::default()
        };
        assert_eq!(left(&rules, &[1], true), [4]);
        assert_eq!(left(&rules, &[1, 4], false), without(&[5]));
        assert_eq!(left(&rules, &[1, 4, 6], false), without(&[]));
    }

    /// `NoBadWordsLogitsProcessor`.
    #[test]
    fn bad_words_are_not_completed() {
        let rules = TextRules {
            bad_words_ids: vec![vec![3], vec![1, 2, 6]],
            ..TextRules::default()
        };
        assert_eq!(left(&rules, &[1, 2], false), without(&[3, 6]));
        assert_eq!(left(&rules, &[2, 1], false), without(&[3]));
        assert_eq!(left(&rules, &[2], false), without(&[3]));
    }

    /// `NoRepeatNGramLogitsProcessor`.
    #[test]
    fn no_run_comes_twice() {
        let rules = |size| TextRules {
            no_repeat_ngram_size: size,
            ..TextRules::default()
        };
        assert_eq!(
            left(&rules(2), &[1, 2, 3, 1, 4, 1], false),
            without(&[2, 4])
        );
        assert_eq!(left(&rules(3), &[1, 2, 3, 1, 2], false), without(&[3]));
        assert_eq!(left(&rules(1), &[1, 2], false), without(&[1, 2]));
        assert_eq!(left(&rules(3), &[1, 2], false), without(&[]));
    }
}
