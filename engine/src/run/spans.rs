//! Which rows go into the next pass. Pure, so that it can be tested without a model.

/// What one request could add to a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wants {
    /// Nothing: it was set aside, or it waits for somebody else's prompt.
    Nothing,
    /// The token that was generated last.
    Decode,
    /// The rest of its prompt, so many tokens.
    Prompt(usize),
}

/// Divides the `rows` rows of a pass among requests in the order in which they came. Every text that
/// decodes gets its row in every pass; prompts fill what is left, the oldest first. So a prompt never
/// holds up another text for longer than one pass, and a pass has one row at least if anybody wants
/// one.
pub(super) fn divide(wants: impl Iterator<Item = Wants> + Clone, rows: usize) -> Vec<usize> {
    let decoding = wants.clone().filter(|&w| w == Wants::Decode).count();
    let mut left = rows.saturating_sub(decoding);
    let give = |wants| match wants {
        Wants::Nothing => 0,
        Wants::Decode => 1,
        Wants::Prompt(rest) => {
            let piece = rest.min(left);
            left -= piece;
            piece
        }
    };
    wants.map(give).collect()
}

#[cfg(test)]
mod tests {
    use super::Wants::{Decode, Nothing, Prompt};
    use super::*;

    fn divided(wants: &[Wants], rows: usize) -> Vec<usize> {
        divide(wants.iter().copied(), rows)
    }

    #[test]
    fn a_prompt_fills_what_decoding_rows_leave() {
        assert_eq!(divided(&[Prompt(100)], 16), [16]);
        assert_eq!(divided(&[Prompt(10)], 16), [10]);
        assert_eq!(divided(&[Decode, Prompt(100), Decode], 16), [1, 14, 1]);
        assert_eq!(divided(&[Nothing, Decode], 16), [0, 1]);
    }

    #[test]
    fn the_oldest_prompt_comes_first() {
        assert_eq!(
            divided(&[Prompt(10), Prompt(10), Prompt(10)], 16),
            [10, 6, 0]
        );
    }

    #[test]
    fn decoding_texts_may_take_all_rows() {
        assert_eq!(divided(&[Decode, Prompt(5), Decode], 2), [1, 0, 1]);
    }
}
