//! Row scheduling of a pass: a pure function, testable without a model.

/// Rows that one request could use in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    /// None: preempted, or waiting for another request's prefill.
    Nothing,
    /// One row: its last generated token.
    Decode,
    /// The remaining tokens of its prompt.
    Prompt(usize),
}

/// Divides the `rows` rows of a pass among requests in order of arrival. Every decoding request
/// gets one row; prefill fills the rest, oldest prompt first. So a prompt delays another request by
/// at most one pass, and a pass is never empty while any request can run.
pub fn divide(wants: impl Iterator<Item = Wants> + Clone, rows: usize) -> Vec<usize> {
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
    fn prefill_fills_the_rows_that_decode_leaves() {
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
    fn decode_may_take_all_rows() {
        assert_eq!(divided(&[Decode, Prompt(5), Decode], 2), [1, 0, 1]);
    }
}
