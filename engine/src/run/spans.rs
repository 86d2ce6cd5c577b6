//! Row scheduling of a pass: without a model, so that simulated loads use it too.

/// Rows that one request could use in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    /// None: preempted, or waiting for another request's prefill.
    Nothing,
    /// None now: it has rows in a pass that was set aside.
    Underway,
    /// One row: its last generated token.
    Decode,
    /// The remaining tokens of its prompt.
    Prompt(usize),
}

/// Rows that a pass of a model in memory computes in hardly more time than one.
pub const FREE_ROWS: usize = 32;

/// Size of the passes that rows are divided for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassSize {
    /// Most rows.
    pub rows: usize,
    /// Up to this many rows, a pass takes hardly longer than with one.
    pub free: usize,
}

/// Divides the rows of passes among requests. Every decoding request gets one row, prompts share
/// the rest:
///
/// - The prompt with the fewest tokens left comes first, so a short one does not wait for long ones.
/// - Others fill the pass to twice the rows of the first one, or [`PassSize::free`]: they delay its
///   first token by no more than it takes itself.
/// - The oldest prompt comes first whenever the younger ones have had as many rows before it as it
///   takes next. So they have at most as many rows as it has, and a pass: it is not starved.
///
/// Who has a sequence at all is decided before, by the server's schedule, which has no rows to count.
///
/// A pass is never empty while any request can run.
#[derive(Debug)]
pub struct Turns<I> {
    /// The oldest prompt.
    oldest: Option<I>,
    /// Rows that younger prompts have had before it, less its own.
    owed: usize,
}

impl<I: Copy + PartialEq> Turns<I> {
    /// Nobody has had any rows.
    pub fn new() -> Self {
        Self {
            oldest: None,
            owed: 0,
        }
    }

    /// The rows of each request in the next pass. `wants` is in order of arrival.
    pub fn divide(&mut self, wants: &[(I, Wants)], size: PassSize) -> Vec<usize> {
        let mut given = vec![0; wants.len()];
        let mut left = size.rows;
        let mut prompts = Vec::new();
        for (at, &(_, wants)) in wants.iter().enumerate() {
            match wants {
                Wants::Nothing | Wants::Underway => {}
                Wants::Decode => {
                    given[at] = 1;
                    left = left.saturating_sub(1);
                }
                Wants::Prompt(rest) => prompts.push((at, rest)),
            }
        }
        let has_prompt = |w: &Wants| matches!(w, Wants::Underway | Wants::Prompt(_));
        let oldest = wants.iter().position(|(_, wants)| has_prompt(wants));
        let id = oldest.map(|at| wants[at].0);
        if id != self.oldest {
            (self.oldest, self.owed) = (id, 0);
        }
        let (owed, most) = (self.owed, left);
        let due = |at, rest: usize| Some(at) == oldest && owed >= rest.min(most);
        prompts.sort_by_key(|&(at, rest)| (!due(at, rest), rest));
        for (place, &(at, rest)) in prompts.iter().enumerate() {
            given[at] = rest.min(left);
            left -= given[at];
            if place == 0 {
                left = left.min(given[at].max(size.free.saturating_sub(given[at])));
            }
        }
        let rows_of = |index: usize| given[index];
        let oldest_prompt = oldest.filter(|&index| matches!(wants[index].1, Wants::Prompt(_)));
        let oldest_rows = oldest_prompt.map_or(0, rows_of);
        let total: usize = prompts.iter().map(|&(index, _)| rows_of(index)).sum();
        self.count(oldest_rows, total - oldest_rows, size);
        given
    }

    /// Counts a pass with `own` rows of the oldest prompt and `younger` rows of others.
    fn count(&mut self, own: usize, younger: usize, size: PassSize) {
        // A pass without the oldest one takes some time, however short.
        let younger = match (own, younger) {
            (0, 1..) => younger.max(size.free),
            _ => younger,
        };
        self.owed = (self.owed + younger).saturating_sub(own);
    }

    /// Whether a prompt with `rest` tokens left goes before what remains of a pass with `rows` rows,
    /// between two of its layers.
    pub fn overtakes(&self, rest: usize, rows: usize, size: PassSize) -> bool {
        2 * rest.max(size.free) <= rows && self.owed < rows
    }
}

impl<I: Copy + PartialEq> Default for Turns<I> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::Wants::{Decode, Nothing, Prompt, Underway};
    use super::*;

    const CHUNK: PassSize = PassSize { rows: 16, free: 4 };

    fn divided(wants: &[Wants], rows: usize) -> Vec<usize> {
        let wants: Vec<_> = wants.iter().copied().enumerate().collect();
        Turns::new().divide(&wants, PassSize { rows, free: 4 })
    }

    #[test]
    fn prefill_fills_the_rows_that_decode_leaves() {
        assert_eq!(divided(&[Prompt(100)], 16), [16]);
        assert_eq!(divided(&[Prompt(10)], 16), [10]);
        assert_eq!(divided(&[Decode, Prompt(100), Decode], 16), [1, 14, 1]);
        assert_eq!(divided(&[Nothing, Decode], 16), [0, 1]);
        assert_eq!(divided(&[Underway, Prompt(3)], 16), [0, 3]);
    }

    #[test]
    fn the_oldest_of_equal_prompts_comes_first() {
        assert_eq!(
            divided(&[Prompt(10), Prompt(10), Prompt(10)], 16),
            [10, 6, 0]
        );
    }

    #[test]
    fn the_shortest_prompt_comes_first_and_others_double_its_pass_at_most() {
        let long = [Prompt(100), Prompt(90), Prompt(80)];
        assert_eq!(
            divided(&[&long[..], &[Prompt(5)]].concat(), 16),
            [0, 0, 5, 5]
        );
        assert_eq!(
            divided(&[&long[..], &[Prompt(1)]].concat(), 16),
            [0, 0, 3, 1]
        );
        assert_eq!(divided(&[Prompt(9), Prompt(8), Prompt(7)], 64), [0, 7, 7]);
        assert_eq!(divided(&[Prompt(4), Prompt(3), Prompt(2)], 64), [0, 2, 2]);
        // Where each pass reads the weights, short passes save nothing.
        let wants = [(0, Prompt(100)), (1, Prompt(2))];
        let reads = PassSize { rows: 16, free: 16 };
        assert_eq!(Turns::new().divide(&wants, reads), [14, 2]);
    }

    #[test]
    fn decode_may_take_all_rows() {
        assert_eq!(divided(&[Decode, Prompt(5), Decode], 2), [1, 0, 1]);
    }

    /// Runs a prompt of `long` tokens against an endless stream of prompts of `short` ones, `at_once` at any time. Returns
    /// the rows that these got before it was complete.
    fn rows_of_a_stream(long: usize, short: usize, at_once: usize) -> usize {
        let mut turns = Turns::new();
        let mut wants = vec![(0, Prompt(long))];
        wants.extend((1..=at_once).map(|id| (id, Prompt(short))));
        let (mut next, mut others) = (at_once + 1, 0);
        while wants[0].0 == 0 {
            let given = turns.divide(&wants, CHUNK);
            others += given[1..].iter().sum::<usize>();
            let came = wants.len();
            for (one, rows) in wants.iter_mut().zip(given) {
                if let Prompt(rest) = &mut one.1 {
                    *rest -= rows;
                }
            }
            wants.retain(|one| one.1 != Prompt(0));
            for _ in wants.len()..came {
                wants.push((next, Prompt(short)));
                next += 1;
            }
        }
        others
    }

    #[test]
    fn a_stream_of_short_prompts_gets_no_more_than_a_long_one() {
        for (short, at_once) in [(1, 1), (3, 1), (3, 9), (15, 2), (40, 3), (99, 5)] {
            let others = rows_of_a_stream(1000, short, at_once);
            assert!(
                others <= 1000 + 2 * CHUNK.rows,
                "{at_once} of {short}: {others} rows before 1000"
            );
        }
        // They do go first.
        assert!(rows_of_a_stream(1000, 15, 2) >= 800);
    }

    #[test]
    fn a_pass_underway_is_overtaken_until_others_had_as_many_rows() {
        let mut turns = Turns::new();
        assert_eq!(turns.divide(&[(0, Prompt(100))], CHUNK), [16]);
        assert!(turns.overtakes(8, 16, CHUNK), "half of the pass");
        assert!(!turns.overtakes(9, 16, CHUNK));
        assert!(!turns.overtakes(1, 7, CHUNK), "it saves nothing");
        let mut passes = 0;
        while turns.overtakes(2, 16, CHUNK) {
            passes += 1;
            let wants = [(0, Underway), (passes, Prompt(2))];
            assert_eq!(turns.divide(&wants, CHUNK), [0, 2]);
        }
        assert_eq!(passes, 4, "four passes that count four rows each");
        // Its next piece comes first too.
        let wants = [(0, Prompt(84)), (9, Prompt(2))];
        assert_eq!(turns.divide(&wants, CHUNK), [16, 0]);
        assert_eq!(turns.divide(&[(0, Prompt(68)), wants[1]], CHUNK), [2, 2]);
    }
}
