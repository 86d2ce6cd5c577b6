//! Drafts from the text itself (prompt lookup decoding): the longest suffix that occurs earlier continues as it did there.
//!
//! The text is searched, without an index: 30,000 tokens take 10 µs, a token of a model tens of milliseconds.

/// Fewest tokens of a suffix: one alone continues differently nearly always.
const SHORTEST: usize = 2;

/// Tokens of a suffix up to which a longer one is better.
const LONGEST: usize = 16;

/// Lengths of the suffix from which on its continuation is counted separately.
const CLASSES: [usize; 3] = [3, 5, 9];

/// Number of classes of matches.
pub(super) const MATCHES: usize = CLASSES.len() + 1;

/// An earlier place whose tokens are those at the end of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Match {
    /// The position after it.
    next: usize,
    /// Tokens that are equal, up to [`LONGEST`].
    len: usize,
}

impl Match {
    /// The last of the longest matches.
    pub fn find(text: &[u32]) -> Option<Self> {
        let (&last, before) = text.split_last()?;
        let mut best: Option<Self> = None;
        for (at, _) in before.iter().enumerate().filter(|&(_, &t)| t == last) {
            let pairs = before[..at].iter().rev().zip(before.iter().rev());
            let equal = pairs.take(LONGEST - 1).take_while(|(a, b)| a == b).count();
            if best.is_none_or(|best| 1 + equal >= best.len) {
                best = Some(Self {
                    next: at + 1,
                    len: 1 + equal,
                });
            }
        }
        best.filter(|best| best.len >= SHORTEST)
    }

    /// Its class by length.
    pub fn class(self) -> usize {
        CLASSES.iter().filter(|&&from| self.len >= from).count()
    }

    /// Appends the next `depth` tokens to `drafts`. At the end of the text it goes on with the drafts, so that a loop
    /// is continued.
    pub fn follow(self, text: &[u32], depth: usize, drafts: &mut Vec<u32>) {
        let first = drafts.len();
        for place in self.next..self.next + depth {
            let token = match place.checked_sub(text.len()) {
                None => text[place],
                Some(at) => drafts[first + at],
            };
            drafts.push(token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafts(text: &[u32], depth: usize) -> Vec<u32> {
        let mut drafts = vec![99];
        if let Some(found) = Match::find(text) {
            found.follow(text, depth, &mut drafts);
        }
        drafts.split_off(1)
    }

    #[test]
    fn the_longest_match_counts_then_the_last_one() {
        assert_eq!(drafts(&[1, 2, 3, 4, 1, 2], 2), [3, 4]);
        assert_eq!(drafts(&[1, 2, 3, 1, 2, 4, 1, 2], 1), [4], "the last one");
        let longer = [7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2];
        assert_eq!(drafts(&longer, 3), [3, 8, 1], "the longest one");
        assert_eq!(Match::find(&longer).map(Match::class), Some(1));
        for nothing in [&[][..], &[1], &[1, 1], &[1, 2, 3], &[1, 2, 3, 2]] {
            assert!(drafts(nothing, 4).is_empty(), "{nothing:?}");
        }
    }

    #[test]
    fn a_loop_goes_on() {
        assert_eq!(drafts(&[5, 6, 7, 5, 6, 7], 7), [5, 6, 7, 5, 6, 7, 5]);
        assert_eq!(drafts(&[4, 4, 4], 3), [4, 4, 4]);
    }

    #[test]
    fn longer_matches_have_a_class_of_their_own() {
        let class = |len: u32| {
            let text: Vec<u32> = (0..len).chain([77]).chain(0..len).collect();
            Match::find(&text).map(Match::class)
        };
        assert_eq!(class(1), None);
        let classes = [2, 3, 4, 5, 8, 9, 40].map(|len| class(len).unwrap());
        assert_eq!(classes, [0, 1, 1, 2, 2, 3, 3]);
    }
}
