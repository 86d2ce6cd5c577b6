//! Follow relation of a regular expression: pairs of characters that it reads consecutively.
//!
//! A match that has read `x` continues to the next character `y` only if some part of the pattern
//! that accepts `y` follows a part that accepts `x`, or if there is an assertion between them. If
//! neither holds for a pair, no match and no failed attempt looks across a position between these
//! two characters: the matches on either side do not depend on the other side. This is the follow
//! relation of Glushkov's automaton. Counts and backtracking are ignored, which only adds pairs.

use fancy_regex::{Assertion, Expr, LookAround};
use regex_syntax::hir::{Class, HirKind};

/// Most character positions of a pattern; longer ones are not analysed.
const MAX_LEAVES: usize = 512;

/// The pairs of characters that a pattern reads consecutively.
#[derive(Debug, Default)]
pub(super) struct Follow {
    /// The characters accepted at each position of the pattern, as inclusive ranges.
    leaves: Vec<Vec<(char, char)>>,
    /// The possible successors of each position.
    next: Vec<Vec<usize>>,
    /// Whether an assertion may be tried after each position.
    asserted: Vec<bool>,
}

/// First and last positions of a part of a pattern.
#[derive(Default)]
struct Part {
    first: Vec<usize>,
    last: Vec<usize>,
    /// Matches the empty text.
    empty: bool,
    /// Tries an assertion before reading a character.
    asserts: bool,
    /// Tries an assertion that looks at the previous character.
    behind: bool,
}

impl Follow {
    /// The relation of `pattern`; `None` if it looks back beyond its match, matches the empty text,
    /// or has a part that is not analysed.
    pub fn of(pattern: &str) -> Option<Self> {
        let tree = Expr::parse_tree(pattern).ok()?;
        let mut follow = Self::default();
        let whole = follow.part(&tree.expr)?;
        (!whole.empty && !whole.behind).then_some(follow)
    }

    /// Whether some attempt to match looks beyond `x` when followed by `y`.
    pub fn looks_across(&self, x: char, y: char) -> bool {
        let accepts = |leaf: usize, c: char| {
            let ranges = &self.leaves[leaf];
            ranges.iter().any(|&(from, to)| from <= c && c <= to)
        };
        (0..self.leaves.len()).filter(|&i| accepts(i, x)).any(|i| {
            let next = &self.next[i];
            self.asserted[i] || next.iter().any(|&j| accepts(j, y))
        })
    }

    fn part(&mut self, expr: &Expr) -> Option<Part> {
        match expr {
            Expr::Empty => Some(Part {
                empty: true,
                ..Part::default()
            }),
            Expr::Any { newline: true } => self.class("(?s:.)"),
            Expr::Any { newline: false } => self.class("."),
            Expr::Assertion(Assertion::EndText | Assertion::EndLine { .. }) => Some(Part {
                empty: true,
                asserts: true,
                ..Part::default()
            }),
            Expr::Assertion(Assertion::WordBoundary | Assertion::NotWordBoundary) => Some(Part {
                empty: true,
                asserts: true,
                behind: true,
                ..Part::default()
            }),
            Expr::Literal { val, casei } => val.chars().try_fold(
                Part {
                    empty: true,
                    ..Part::default()
                },
                |before, c| {
                    let text = fancy_regex::escape(c.encode_utf8(&mut [0; 4])).into_owned();
                    let after = self.class(&with_case(&text, *casei))?;
                    Some(self.one_after_another(before, after))
                },
            ),
            Expr::Delegate { inner, casei, .. } => self.class(&with_case(inner, *casei)),
            Expr::Concat(parts) => parts.iter().try_fold(
                Part {
                    empty: true,
                    ..Part::default()
                },
                |before, part| {
                    let after = self.part(part)?;
                    Some(self.one_after_another(before, after))
                },
            ),
            Expr::Alt(parts) => parts.iter().try_fold(Part::default(), |mut all, part| {
                let one = self.part(part)?;
                all.first.extend(one.first);
                all.last.extend(one.last);
                all.empty |= one.empty;
                all.asserts |= one.asserts;
                all.behind |= one.behind;
                Some(all)
            }),
            Expr::Group(part) | Expr::AtomicGroup(part) => self.part(part),
            Expr::LookAround(part, LookAround::LookAhead | LookAround::LookAheadNeg) => {
                let inner = self.part(part)?;
                Some(Part {
                    first: inner.first,
                    last: Vec::new(),
                    empty: true,
                    asserts: true,
                    behind: inner.behind,
                })
            }
            Expr::Repeat { child, lo, .. } => {
                let mut inner = self.part(child)?;
                self.join(&inner.last, &inner);
                inner.empty |= *lo == 0;
                Some(inner)
            }
            _ => None,
        }
    }

    fn one_after_another(&mut self, mut before: Part, after: Part) -> Part {
        self.join(&before.last, &after);
        if before.empty {
            before.first.extend(&after.first);
            before.asserts |= after.asserts;
            before.behind |= after.behind;
        }
        if !after.empty {
            before.last.clear();
        }
        before.last.extend(after.last);
        before.empty &= after.empty;
        before
    }

    /// `after` may follow one of the positions `before`.
    fn join(&mut self, before: &[usize], after: &Part) {
        for &place in before {
            self.next[place].extend(&after.first);
            self.next[place].sort_unstable();
            self.next[place].dedup();
            self.asserted[place] |= after.asserts;
        }
    }

    /// One character from a class, in the syntax of the `regex` crate.
    fn class(&mut self, pattern: &str) -> Option<Part> {
        let hir = regex_syntax::parse(pattern).ok()?;
        let ranges = match hir.kind() {
            HirKind::Class(Class::Unicode(class)) => {
                let ranges = class.ranges().iter();
                ranges.map(|range| (range.start(), range.end())).collect()
            }
            HirKind::Class(Class::Bytes(class)) => {
                let ranges = class.ranges().iter();
                ranges
                    .map(|range| (char::from(range.start()), char::from(range.end())))
                    .collect()
            }
            HirKind::Literal(literal) => {
                let mut chars = std::str::from_utf8(&literal.0).ok()?.chars();
                let only = chars.next().filter(|_| chars.next().is_none())?;
                vec![(only, only)]
            }
            _ => return None,
        };
        if self.leaves.len() == MAX_LEAVES {
            return None;
        }
        let place = self.leaves.len();
        self.leaves.push(ranges);
        self.next.push(Vec::new());
        self.asserted.push(false);
        Some(Part {
            first: vec![place],
            last: vec![place],
            ..Part::default()
        })
    }
}

fn with_case(pattern: &str, insensitive: bool) -> String {
    if insensitive {
        format!("(?i:{pattern})")
    } else {
        pattern.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GPT-2's pattern, and Llama 3's.
    const PATTERNS: [&str; 2] = [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ];

    #[test]
    fn words_end_at_white_space_and_white_space_looks_ahead() {
        for pattern in PATTERNS {
            let follow = Follow::of(pattern).unwrap();
            for (x, y, across) in [
                ('e', ' ', false),
                ('e', '\n', false),
                ('é', '\t', false),
                ('字', '，', false),
                ('e', 'f', true),
                (' ', 'e', true),
                (' ', ' ', true),
                // an assertion is tried after any white space
                ('\n', '的', true),
                ('\'', 's', true),
                ('.', '.', true),
                ('7', ' ', false),
            ] {
                assert_eq!(follow.looks_across(x, y), across, "{x:?} {y:?} {pattern}");
            }
        }
        let [gpt2, llama3] = PATTERNS.map(|pattern| Follow::of(pattern).unwrap());
        assert!(!gpt2.looks_across('.', '\n') && llama3.looks_across('.', '\n'));
        assert!(!gpt2.looks_across('\'', 'x') && llama3.looks_across('\'', 'x'));
    }

    #[test]
    fn a_failed_attempt_counts_as_much_as_a_match() {
        let follow = Follow::of("ab*c|d(?=ef)|(?!gh)g|(?i:kl)").unwrap();
        for (pair, across) in [
            ("ab", true),
            ("bb", true),
            ("bc", true),
            ("ac", true),
            ("ca", false),
            ("da", true), // the assertion is tried at whatever follows
            ("ef", true),
            ("gh", true),
            ("ga", false),
            ("KL", true),
        ] {
            let mut chars = pair.chars();
            let (x, y) = (chars.next().unwrap(), chars.next().unwrap());
            assert_eq!(follow.looks_across(x, y), across, "{pair}");
        }
    }

    #[test]
    fn what_looks_back_or_matches_nothing_is_not_analysed() {
        assert!(Follow::of(r"\d{1,3}(?=(?:\d{3})*\b)").is_some());
        for pattern in [
            "a*",
            r"\bword",
            r"a?(?!\b)b",
            "(?<=a)b",
            "^a",
            r"(a)\1",
            "a|",
            r"\Ga",
        ] {
            assert!(Follow::of(pattern).is_none(), "{pattern}");
        }
    }
}
