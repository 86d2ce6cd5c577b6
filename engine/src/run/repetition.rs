//! Texts that end in a loop.

use std::fmt;

use serde::Serialize;

/// Longest period that is found, in tokens.
const LONGEST: usize = 256;

/// Fewest tokens of a tail that counts as a loop, and fewest copies of its period. Lists, tables and refrains have less.
const TOKENS: usize = 128;
const COPIES: usize = 4;

/// The end of a text that consists of copies of the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Repetition {
    /// Tokens of one copy.
    pub period: usize,
    /// Tokens of all copies, the last of which may be incomplete.
    pub tokens: usize,
}

impl Repetition {
    /// The loop in which a text of `tokens` ends, if it does.
    pub fn of(tokens: &[u32]) -> Option<Self> {
        let mut tail = Tail::default();
        tokens.iter().for_each(|&token| tail.push(token));
        tail.repetition()
    }

    /// Complete copies.
    pub fn copies(&self) -> usize {
        self.tokens / self.period
    }
}

impl fmt::Display for Repetition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let copies = self.copies();
        match self.period {
            1 => write!(f, "the same token {copies} times"),
            period => write!(f, "the same {period} tokens {copies} times"),
        }
    }
}

/// The end of a text that grows token by token. It depends on the tokens only.
#[derive(Debug, Clone, Default)]
pub struct Tail {
    /// The last [`LONGEST`] tokens, as a ring.
    last: Vec<u32>,
    /// Tokens so far.
    count: usize,
    /// For each period from 1 on: the number of last tokens that equal the one a period before.
    equal: Vec<usize>,
}

impl Tail {
    /// Adds the next token.
    pub fn push(&mut self, token: u32) {
        if self.equal.len() < self.last.len() {
            self.equal.push(0);
        }
        for (at, equal) in self.equal.iter_mut().enumerate() {
            let before = self.last[(self.count - 1 - at) % LONGEST];
            *equal = if before == token { *equal + 1 } else { 0 };
        }
        match self.last.get_mut(self.count % LONGEST) {
            Some(place) => *place = token,
            None => self.last.push(token),
        }
        self.count += 1;
    }

    /// The loop at the end, with the shortest period.
    pub fn repetition(&self) -> Option<Repetition> {
        let tails = self
            .equal
            .iter()
            .zip(1..)
            .map(|(equal, period)| Repetition {
                period,
                tokens: equal + period,
            });
        tails
            .filter(|tail| tail.tokens >= TOKENS.max(COPIES * tail.period))
            .min_by_key(|tail| tail.period)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens that do not repeat.
    fn prose(count: u32) -> Vec<u32> {
        (1000..1000 + count).collect()
    }

    #[test]
    fn a_tail_of_copies_is_a_loop_from_its_128th_token_on() {
        for period in [1, 2, 7, 31, 32, 33, 100, 256] {
            let least = TOKENS.max(COPIES * period);
            let mut text = prose(70);
            text.extend((0..least).map(|at| (at % period) as u32));
            let found = Repetition::of(&text);
            assert_eq!(
                found,
                Some(Repetition {
                    period,
                    tokens: least
                })
            );
            assert_eq!(found.unwrap().copies(), least / period);
            assert_eq!(Repetition::of(&text[..text.len() - 1]), None, "{period}");
            // Only the end counts.
            text.push(999);
            assert_eq!(Repetition::of(&text), None, "{period}");
        }
    }

    #[test]
    fn longer_periods_and_other_texts_are_no_loop() {
        assert_eq!(Repetition::of(&[]), None);
        assert_eq!(Repetition::of(&prose(5000)), None);
        let long: Vec<u32> = (0..4000).map(|at| at % 257).collect();
        assert_eq!(Repetition::of(&long), None);
        // A table whose rows differ in one number.
        let table: Vec<u32> = (0..200).flat_map(|row| [1, 2, 3, 10 + row, 4]).collect();
        assert_eq!(Repetition::of(&table), None);
    }

    #[test]
    fn the_first_copy_counts_and_the_period_is_the_shortest() {
        let text = [5, 6].repeat(100);
        let found = Repetition::of(&text).unwrap();
        assert_eq!((found.period, found.tokens, found.copies()), (2, 200, 100));
        assert_eq!(found.to_string(), "the same 2 tokens 100 times");
        let found = Repetition::of(&[5; 130]).unwrap();
        assert_eq!(found.to_string(), "the same token 130 times");
    }
}
