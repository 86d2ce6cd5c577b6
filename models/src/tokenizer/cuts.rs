//! Cuts: positions where a text can be divided so that the tokens of its parts are the tokens of
//! the whole.
//!
//! A position is classified by the two adjacent characters, `x` before and `y` after. It is a cut
//! if no component of the tokenizer depends on both sides: no added token contains the pair or ends
//! there, the normaliser maps each character independently, and no pattern of the splitter reads
//! from `x` to `y` ([`Follow`]). Then either the splitter puts a boundary there in any context, or
//! no token of the vocabulary contains the pair, so that no merge crosses it.
//!
//! Some tokenizers treat the start of a text differently (they insert a space). Later parts are
//! therefore tokenised with `x` before them, and the tokens of `x` alone are dropped.

use std::collections::{HashMap, HashSet};
use std::sync::{LazyLock, Mutex, PoisonError};

use fancy_regex::Regex;
use serde_json::Value;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::{AddedToken, Model, NormalizedString, Normalizer};

use super::bpe::Bpe;
use super::check::{byte_level_char, kind_of, literal, steps_of};
use super::file::Inner;
use super::follow::Follow;

/// The pattern of `ByteLevel`.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The pattern of `Whitespace`.
const WORDS: &str = r"\w+|[^\w\s]+";

/// Most cached pairs.
const KEPT: usize = 4096;

/// Properties of a tokenizer that determine the cuts.
#[derive(Debug)]
pub(super) struct Cuts {
    added: Added,
    normalizers: Vec<Norm>,
    steps: Vec<Step>,
    ignores_merges: bool,
    /// One more than the largest token id.
    size: u32,
    judged: Mutex<HashMap<(char, char), bool>>,
    /// By `y`, the characters that precede it in some token.
    before: Mutex<HashMap<char, HashSet<char>>>,
}

/// Added tokens, as given and as normalised.
#[derive(Debug, Default)]
struct Added {
    pairs: HashSet<(char, char)>,
    last: HashSet<char>,
    /// First characters of tokens that must stand alone.
    alone: HashSet<char>,
}

#[derive(Debug)]
enum Norm {
    /// One of Unicode's forms.
    Unicode(NormalizerWrapper),
    Lowercase,
    /// Inserts something before the text.
    Prepend,
    Replace {
        from: String,
        to: String,
    },
}

#[derive(Debug)]
enum Step {
    Split {
        follow: Follow,
        regex: Regex,
        /// Each match is a separate piece.
        isolates: bool,
    },
    /// A literal text, which may be joined to a neighbouring piece.
    Literal(String),
    Bytes,
    Metaspace {
        replacement: char,
        splits: bool,
    },
    Digits {
        each: bool,
    },
    Punctuation {
        isolates: bool,
    },
    WhiteSpace,
}

impl Cuts {
    /// The rules of `tokenizer`; `None` if it has a component that is not analysed.
    pub fn of(tokenizer: &Inner, size: u32) -> Option<Self> {
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let normalizers = steps_of(Some(&normalizer), "normalizer", "normalizers").ok()?;
        let splitter = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let splitters = steps_of(Some(&splitter), "pre_tokenizer", "pretokenizers").ok()?;
        let mut steps = Vec::new();
        for (place, step) in splitters.into_iter().enumerate() {
            steps.extend(Step::of(step, place)?);
        }
        Some(Self {
            added: Added::of(tokenizer)?,
            normalizers: normalizers
                .into_iter()
                .map(Norm::of)
                .collect::<Option<_>>()?,
            steps,
            ignores_merges: tokenizer.get_model().settings.ignore_merges,
            size,
            judged: Mutex::default(),
            before: Mutex::default(),
        })
    }

    /// The last cut inside `text`, from byte `from` on.
    pub fn last(&self, model: &Bpe, text: &str, from: usize) -> Option<usize> {
        let mut after = None;
        for (at, x) in text.char_indices().rev() {
            let place = at + x.len_utf8();
            if place < from {
                return None;
            }
            if let Some(y) = after.replace(x)
                && self.between(model, x, y)
            {
                return Some(place);
            }
        }
        None
    }

    fn between(&self, model: &Bpe, x: char, y: char) -> bool {
        // most positions are inside a word
        if x.is_whitespace() || (y.is_alphanumeric() && x.is_numeric() == y.is_numeric()) {
            return false;
        }
        let mut judged = self.judged.lock().unwrap_or_else(PoisonError::into_inner);
        if judged.len() == KEPT {
            judged.clear();
        }
        *(judged.entry((x, y))).or_insert_with(|| self.judge(model, x, y).unwrap_or(false))
    }

    /// Whether there is a cut between `x` and `y`; `None` if unknown.
    fn judge(&self, model: &Bpe, raw_x: char, raw_y: char) -> Option<bool> {
        let (mut x, mut y) = (raw_x, raw_y);
        if self.added.may_meet(x, y) {
            return Some(false);
        }
        for step in &self.normalizers {
            x = step.map(x)?.chars().next_back()?;
            y = step.map(y)?.chars().next()?;
        }
        if self.added.may_meet(x, y) {
            return Some(false);
        }
        let mut split = false;
        for step in &self.steps {
            if step.looks_across(x, y) {
                return Some(false);
            }
            split |= step.splits(x, y);
            x = step.image(x, false);
            y = step.image(y, true);
        }
        if split {
            return Some(true);
        }
        let known = model.token_to_id(y.encode_utf8(&mut [0; 4])).is_some();
        let may_be_kept_whole = self.ignores_merges || raw_y.is_alphanumeric() || !known;
        Some(!may_be_kept_whole && !self.in_a_token(model, x, y))
    }

    fn in_a_token(&self, model: &Bpe, x: char, y: char) -> bool {
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let before = before.entry(y).or_insert_with(|| {
            let mut found = HashSet::new();
            for token in (0..self.size).filter_map(|id| model.id_to_token(id)) {
                let next = token.chars().skip(1);
                let pairs = token.chars().zip(next).filter(|pair| pair.1 == y);
                found.extend(pairs.map(|pair| pair.0));
            }
            found
        });
        before.contains(&x)
    }
}

impl Added {
    fn of(tokenizer: &Inner) -> Option<Self> {
        let mut added = Self::default();
        for token in tokenizer.get_added_tokens_decoder().values() {
            added.take(token, &token.content);
            if let Some(normalizer) = tokenizer.get_normalizer() {
                let mut text = NormalizedString::from(token.content.as_str());
                normalizer.normalize(&mut text).ok()?;
                added.take(token, text.get());
            }
        }
        Some(added)
    }

    fn take(&mut self, token: &AddedToken, content: &str) {
        self.pairs
            .extend(content.chars().zip(content.chars().skip(1)));
        self.last.extend(content.chars().next_back());
        if token.single_word {
            self.alone.extend(content.chars().next());
        }
    }

    /// Whether one may cross the position between `x` and `y`, or end there. White space consumed
    /// by a token ends at `x`, which is not white space.
    fn may_meet(&self, x: char, y: char) -> bool {
        self.last.contains(&x) || self.alone.contains(&y) || self.pairs.contains(&(x, y))
    }
}

impl Norm {
    fn of(step: &Value) -> Option<Self> {
        match kind_of(step) {
            "NFC" | "NFD" | "NFKC" | "NFKD" => {
                Some(Self::Unicode(serde_json::from_value(step.clone()).ok()?))
            }
            "Lowercase" => Some(Self::Lowercase),
            "Prepend" => Some(Self::Prepend),
            "Replace" => Some(Self::Replace {
                from: literal(step)?.to_owned(),
                to: step.get("content")?.as_str()?.to_owned(),
            }),
            _ => None,
        }
    }

    /// The image of a character in any context; `None` if it depends on its neighbours.
    fn map(&self, c: char) -> Option<String> {
        match self {
            Self::Prepend => Some(c.into()),
            Self::Lowercase => Some(c.to_lowercase().collect()),
            Self::Replace { from, to } if from.chars().eq([c]) => Some(to.clone()),
            Self::Replace { from, .. } => (!from.contains(c)).then(|| c.into()),
            Self::Unicode(_) if c.is_ascii() => Some(c.into()),
            Self::Unicode(form) => {
                let mut text = NormalizedString::from(c.to_string());
                form.normalize(&mut text).ok()?;
                (text.get().chars().eq([c]) && !combines(c)).then(|| c.into())
            }
        }
    }
}

/// Whether a character may combine with those before it.
fn combines(c: char) -> bool {
    static MARKS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\p{M}").ok());
    let mark = MARKS.as_ref().is_none_or(|marks| {
        let found = marks.is_match(c.encode_utf8(&mut [0; 4]));
        found.unwrap_or(true)
    });
    mark || ('\u{1100}'..='\u{11ff}').contains(&c)
}

impl Step {
    /// Analysis of a splitter step; none for a step without effect.
    fn of(step: &Value, place: usize) -> Option<Vec<Self>> {
        let text = |key: &str| step.get(key).and_then(Value::as_str);
        let flag = |key: &str, usual| step.get(key).map_or(Some(usual), Value::as_bool);
        Some(match kind_of(step) {
            "Split" => {
                let behaviour = (text("behavior")?, flag("invert", false)?);
                let isolates = matches!(behaviour, ("Isolated", _) | ("Removed", true));
                match literal(step) {
                    Some(text) => vec![Self::Literal(text.to_owned())],
                    None => vec![Self::split(
                        step.pointer("/pattern/Regex")?.as_str()?,
                        isolates,
                    )?],
                }
            }
            "ByteLevel" => {
                // inserts a space before every piece
                if place > 0 && flag("add_prefix_space", true)? {
                    return None;
                }
                let mut steps = Vec::new();
                if flag("use_regex", true)? {
                    steps.push(Self::split(GPT2, true)?);
                }
                steps.push(Self::Bytes);
                steps
            }
            "Metaspace" if place == 0 => vec![Self::Metaspace {
                replacement: text("replacement")?.chars().next()?,
                splits: flag("split", true)?,
            }],
            "Digits" => vec![Self::Digits {
                each: flag("individual_digits", false)?,
            }],
            "Punctuation" => vec![Self::Punctuation {
                isolates: text("behavior")? == "Isolated",
            }],
            "Whitespace" => vec![Self::split(WORDS, true)?],
            "WhitespaceSplit" => vec![Self::WhiteSpace],
            _ => return None,
        })
    }

    fn split(pattern: &str, isolates: bool) -> Option<Self> {
        Some(Self::Split {
            follow: Follow::of(pattern)?,
            regex: Regex::new(pattern).ok()?,
            isolates,
        })
    }

    /// Whether the step may look across the position between `x` and `y`.
    fn looks_across(&self, x: char, y: char) -> bool {
        match self {
            Self::Split { follow, .. } => follow.looks_across(x, y),
            Self::Literal(text) => text.contains(x) && text.contains(y),
            _ => false,
        }
    }

    /// Whether the step always puts a boundary between `x` and `y`, and does not look across it.
    fn splits(&self, x: char, y: char) -> bool {
        match self {
            // a match of only `x`, which can be lost only to another match
            Self::Split {
                regex, isolates, ..
            } => {
                let text = x.to_string();
                let found = regex.find(&text).ok().flatten();
                *isolates && found.is_some_and(|found| found.as_str() == text)
            }
            Self::Metaspace {
                replacement,
                splits,
            } => *splits && (y == ' ' || y == *replacement),
            Self::Digits { each } => {
                if *each {
                    x.is_numeric() || y.is_numeric()
                } else {
                    x.is_numeric() != y.is_numeric()
                }
            }
            Self::Punctuation { isolates } => {
                *isolates && (x.is_ascii_punctuation() || y.is_ascii_punctuation())
            }
            Self::WhiteSpace => x.is_whitespace() || y.is_whitespace(),
            Self::Literal(_) | Self::Bytes => false,
        }
    }

    /// The first or last character of the step's output for `c`.
    fn image(&self, c: char, first: bool) -> char {
        match self {
            Self::Bytes => {
                let mut buffer = [0; 4];
                let bytes = c.encode_utf8(&mut buffer).as_bytes();
                let byte = if first { bytes.first() } else { bytes.last() };
                byte.map_or(c, |&byte| byte_level_char(byte))
            }
            Self::Metaspace { replacement, .. } if c == ' ' => *replacement,
            _ => c,
        }
    }
}
