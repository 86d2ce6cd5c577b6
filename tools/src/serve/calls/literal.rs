//! Arguments and values in Python's notation, or with keys without quotes, as JSON text, piece by piece.

use serde_json::Value;

use super::escape::{self, Escape};
use super::types::{Kinds, ParameterKinds};

/// Maximum nesting.
const MAX_DEPTH: usize = 64;

/// Quotes of Python's strings; the longer ones come first.
const PYTHON: [&str; 4] = ["'''", "\"\"\"", "'", "\""];

/// How far a piece was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// More text is needed.
    More,
    /// The arguments are complete.
    Done,
    /// This is something else.
    Wrong,
}

/// Brackets that are open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    /// Arguments of a call.
    Call,
    Map,
    List,
    Tuple,
}

impl Level {
    /// The bracket that closes it.
    fn close(self) -> char {
        match self {
            Self::Call | Self::Tuple => ')',
            Self::Map => '}',
            Self::List => ']',
        }
    }
}

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Key,
    Separator,
    Value,
    /// In a string with this quote (an index).
    Text(usize),
    After,
}

/// Reader of one value.
#[derive(Debug, Clone)]
pub struct Literal {
    quotes: Vec<String>,
    /// Whether a word that is no literal is a string.
    lenient: bool,
    levels: Vec<Level>,
    /// Whether the innermost brackets have members.
    filled: bool,
    next: Next,
    /// Kinds of the argument's value.
    kinds: Kinds,
    /// Number of arguments of the call so far, and whether the last one has no key.
    arguments: usize,
    positional: bool,
    /// Whether the string has no escapes.
    raw: bool,
    /// Names of the arguments so far.
    names: Vec<String>,
}

impl Literal {
    /// A reader of Python's arguments, which begin with `(`.
    pub fn python_call() -> Self {
        Self::new(PYTHON.map(str::to_owned).to_vec(), true)
    }

    /// A reader of arguments in braces whose strings have these quotes, or JSON's, or Python's.
    pub fn bare(quote: &str) -> Self {
        Self::new([quote, "\"", "'"].map(str::to_owned).to_vec(), true)
    }

    fn new(quotes: Vec<String>, lenient: bool) -> Self {
        Self {
            quotes,
            lenient,
            levels: Vec::new(),
            filled: false,
            next: Next::Value,
            kinds: Kinds::ANY,
            arguments: 0,
            positional: false,
            raw: false,
            names: Vec::new(),
        }
    }

    /// Reads from the start of `text`, removes what was read, and appends it to `out` as JSON text. `parameters` are
    /// those of the called tool; `ended`: no text follows.
    pub fn take(
        &mut self,
        parameters: &ParameterKinds,
        text: &mut String,
        ended: bool,
        out: &mut String,
    ) -> Progress {
        let mut at = 0;
        let progress = loop {
            let rest = &text[at..];
            let (used, progress) = match self.next {
                Next::Text(quote) => self.text(rest, quote, ended, out),
                _ => {
                    let start = rest.trim_start();
                    let (used, progress) = self.step(parameters, start, ended, out);
                    (rest.len() - start.len() + used, progress)
                }
            };
            at += used;
            match progress {
                None => {}
                Some(progress) => break progress,
            }
        };
        text.drain(..at);
        progress
    }

    /// Reads one sign or word: its length, and how far the value is unless to go on.
    fn step(
        &mut self,
        parameters: &ParameterKinds,
        text: &str,
        ended: bool,
        out: &mut String,
    ) -> (usize, Option<Progress>) {
        let Some(first) = text.chars().next() else {
            return (0, Some(Progress::More));
        };
        match (self.next, first) {
            (Next::Key | Next::Value | Next::After, ')' | ']' | '}') => self.close(first, out),
            (Next::After, ',') => {
                self.next = self.member();
                (1, None)
            }
            (Next::Separator, ':' | '=') => {
                out.push_str(": ");
                self.next = Next::Value;
                (1, None)
            }
            (Next::After | Next::Separator, _) => (0, Some(Progress::Wrong)),
            (Next::Key, _) => self.key(parameters, text, ended, out),
            (Next::Value, '{' | '[' | '(') => self.open(first, out),
            (Next::Value, _) => self.value(text, ended, out),
            (Next::Text(_), _) => (0, None),
        }
    }

    /// What follows a comma.
    fn member(&self) -> Next {
        match self.levels.last() {
            Some(Level::Call | Level::Map) => Next::Key,
            _ => Next::Value,
        }
    }

    fn open(&mut self, bracket: char, out: &mut String) -> (usize, Option<Progress>) {
        if self.levels.len() == MAX_DEPTH {
            return (0, Some(Progress::Wrong));
        }
        self.begin_item(out);
        let level = match bracket {
            '{' => Level::Map,
            '(' if self.levels.is_empty() && self.lenient => Level::Call,
            '(' => Level::Tuple,
            _ => Level::List,
        };
        let list = matches!(level, Level::List | Level::Tuple);
        out.push(if list { '[' } else { '{' });
        self.levels.push(level);
        self.filled = false;
        self.next = self.member();
        (1, None)
    }

    /// Closes the innermost brackets, unless they are others or a value is due.
    fn close(&mut self, bracket: char, out: &mut String) -> (usize, Option<Progress>) {
        let Some(&level) = self.levels.last() else {
            return (0, Some(Progress::Wrong));
        };
        let list = matches!(level, Level::List | Level::Tuple);
        if level.close() != bracket || (self.next == Next::Value && !list) {
            return (0, Some(Progress::Wrong));
        }
        self.levels.pop();
        out.push(if list { ']' } else { '}' });
        self.filled = true;
        self.next = Next::After;
        (1, self.levels.is_empty().then_some(Progress::Done))
    }

    /// Separates an item of a list from the one before.
    fn begin_item(&mut self, out: &mut String) {
        if matches!(self.levels.last(), Some(Level::List | Level::Tuple)) {
            if self.filled {
                out.push_str(", ");
            }
            self.filled = true;
        }
    }

    fn key(
        &mut self,
        parameters: &ParameterKinds,
        text: &str,
        ended: bool,
        out: &mut String,
    ) -> (usize, Option<Progress>) {
        if self.levels.last() == Some(&Level::Call) {
            return self.argument(parameters, text, ended, out);
        }
        let quote = self
            .quotes
            .iter()
            .find(|quote| text.starts_with(&quote[..]));
        let (key, used) = match quote {
            Some(quote) => match text[quote.len()..].find(&quote[..]) {
                None => return (0, Some(Progress::More)),
                Some(end) => (&text[quote.len()..][..end], end + 2 * quote.len()),
            },
            None => match text.find([':', '=', ',', ')', '}']) {
                None if ended => return (0, Some(Progress::Wrong)),
                None => return (0, Some(Progress::More)),
                Some(end) => (text[..end].trim_end(), end),
            },
        };
        let new = self.put_key(parameters, key, out);
        self.next = Next::Separator;
        (used, (!new).then_some(Progress::Wrong))
    }

    /// The key of an argument of a call; of one without a key, the parameter in its place.
    fn argument(
        &mut self,
        parameters: &ParameterKinds,
        text: &str,
        ended: bool,
        out: &mut String,
    ) -> (usize, Option<Progress>) {
        let after = text.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
        let key = &text[..text.len() - after.len()];
        let mut behind = after.trim_start().chars();
        let keyed = match (behind.next(), behind.next()) {
            (None, _) | (Some('='), None) if !ended => return (0, Some(Progress::More)),
            (Some('='), next) => !key.is_empty() && next != Some('='),
            _ => false,
        };
        self.positional = !keyed;
        self.arguments += 1;
        if keyed {
            let new = self.put_key(parameters, key, out);
            self.next = Next::Separator;
            return (key.len(), (!new).then_some(Progress::Wrong));
        }
        let Some((key, _)) = parameters.get(self.arguments - 1) else {
            return (0, Some(Progress::Wrong));
        };
        let new = self.put_key(parameters, key, out);
        out.push_str(": ");
        self.next = Next::Value;
        (0, (!new).then_some(Progress::Wrong))
    }

    /// Writes a key. `false`: the call has this argument already.
    fn put_key(&mut self, parameters: &ParameterKinds, key: &str, out: &mut String) -> bool {
        if self.levels.len() == 1 && self.lenient {
            if self.names.iter().any(|name| name == key) {
                return false;
            }
            self.names.push(key.to_owned());
        }
        if self.filled {
            out.push_str(", ");
        }
        self.filled = true;
        out.push_str(&Value::from(key).to_string());
        if self.levels.len() == 1 {
            let known = parameters.iter().find(|(name, _)| name == key);
            self.kinds = known.map_or(Kinds::ANY, |(_, kinds)| *kinds);
        }
        true
    }

    /// A string's quote, or a word.
    fn value(&mut self, text: &str, ended: bool, out: &mut String) -> (usize, Option<Progress>) {
        let prefix = self.prefix(text);
        let start = &text[prefix..];
        match self.quote(start, ended) {
            Err(progress) => return (0, Some(progress)),
            Ok(Some(quote)) => {
                self.begin_item(out);
                out.push('"');
                self.begin_text(quote, &text[..prefix]);
                return (prefix + self.quotes[quote].len(), None);
            }
            Ok(None) => {}
        }
        let ends = |c: char| c == ',' || self.levels.iter().any(|level| level.close() == c);
        let Some(end) = text.find(ends).or(ended.then_some(text.len())) else {
            return (0, Some(Progress::More));
        };
        let Some(word) = self.word(text[..end].trim_end()) else {
            return (0, Some(Progress::Wrong));
        };
        self.begin_item(out);
        out.push_str(&word);
        self.next = Next::After;
        (end, self.levels.is_empty().then_some(Progress::Done))
    }

    /// Length of the letters before the quote of a string in Python, as in `r'…'`.
    fn prefix(&self, text: &str) -> usize {
        let letters = text.len() - text.trim_start_matches(|c| "rRbBuU".contains(c)).len();
        let python = self.quotes.len() == PYTHON.len();
        match python && letters <= 2 && text[letters..].starts_with(['\'', '"']) {
            true => letters,
            false => 0,
        }
    }

    /// The quote with which a text begins.
    fn quote(&self, text: &str, ended: bool) -> Result<Option<usize>, Progress> {
        let longer = |quote: &String| quote.len() > text.len() && quote.starts_with(text);
        if !ended && self.quotes.iter().any(longer) {
            return Err(Progress::More);
        }
        let all = self.quotes.iter();
        Ok(all.clone().position(|quote| text.starts_with(&quote[..])))
    }

    fn begin_text(&mut self, quote: usize, prefix: &str) {
        self.next = Next::Text(quote);
        self.raw = self.quotes[quote].len() > 3 || prefix.contains(['r', 'R']);
    }

    /// A word as JSON.
    fn word(&self, word: &str) -> Option<String> {
        // Nested values have no known kinds.
        let kinds = match self.levels.len() {
            1 => self.kinds,
            _ => Kinds::ANY,
        };
        if self.lenient && kinds.only_text() && !word.is_empty() {
            return Some(Value::from(word).to_string());
        }
        // In Python's brackets a word is no string; one that begins with zeros is no number either.
        let python = self.quotes.len() == PYTHON.len() && !self.levels.is_empty();
        let digits = word.trim_start_matches(['+', '-']);
        let zeros = digits.len() > 1 && digits.starts_with('0') && !digits.starts_with("0.");
        let number = match python && !zeros && !kinds.only_text() {
            true => Kinds::NUMBER,
            false => kinds,
        };
        if let Some(number) = number.number(word) {
            return Some(number);
        }
        let json = match word {
            "True" | "true" => "true",
            "False" | "false" => "false",
            "None" | "null" => "null",
            "" => return None,
            number if serde_json::from_str::<serde_json::Number>(number).is_ok() => number,
            other => return self.lenient.then(|| Value::from(other).to_string()),
        };
        Some(json.to_owned())
    }

    /// More of a string.
    fn text(
        &mut self,
        text: &str,
        quote: usize,
        ended: bool,
        out: &mut String,
    ) -> (usize, Option<Progress>) {
        let mark = &self.quotes[quote];
        let raw = self.raw;
        let mut at = 0;
        loop {
            let rest = &text[at..];
            let Some(c) = rest.chars().next() else {
                return (at, Some(Progress::More));
            };
            if rest.starts_with(&mark[..]) {
                match self.closes(&rest[mark.len()..], ended) {
                    _ if mark.len() > 3 => {}
                    Some(true) => {}
                    None => return (at, Some(Progress::More)),
                    Some(false) => {
                        escape::append(c, out);
                        at += c.len_utf8();
                        continue;
                    }
                }
                let after = &rest[mark.len()..];
                let next = after.trim_start();
                if self.joins(after) {
                    let prefix = self.prefix(next);
                    return match self.quote(&next[prefix..], ended) {
                        Err(progress) => (at, Some(progress)),
                        Ok(None) => (at, Some(Progress::Wrong)),
                        Ok(Some(joined)) => {
                            let used = rest.len() - next.len() + prefix;
                            let used = at + used + self.quotes[joined].len();
                            let prefix = next[..prefix].to_owned();
                            self.begin_text(joined, &prefix);
                            (used, None)
                        }
                    };
                }
                out.push('"');
                self.next = Next::After;
                return (
                    at + mark.len(),
                    self.levels.is_empty().then_some(Progress::Done),
                );
            }
            if !ended && mark.starts_with(rest) {
                return (at, Some(Progress::More));
            }
            match escape::read(rest) {
                Escape::Of(text, length) if !raw => {
                    text.chars().for_each(|c| escape::append(c, out));
                    at += length;
                }
                Escape::Unclear if !raw && !ended => return (at, Some(Progress::More)),
                _ => {
                    escape::append(c, out);
                    at += c.len_utf8();
                }
            }
        }
    }

    /// Whether another string follows after white space, which Python joins.
    fn joins(&self, after: &str) -> bool {
        let next = after.trim_start();
        let python = self.quotes.len() == PYTHON.len();
        let begins = next[self.prefix(next)..].starts_with(['\'', '"']);
        python && next.len() < after.len() && begins
    }

    /// Whether a quote ends its string, by what follows it: a model may write quotes inside of a string without
    /// escapes, as its template does. `None`: more text is needed.
    fn closes(&self, after: &str, ended: bool) -> Option<bool> {
        let rest = after.trim_start();
        let unclear = if ended { Some(true) } else { None };
        let Some(first) = rest.chars().next() else {
            return unclear;
        };
        let behind = rest[first.len_utf8()..].trim_start();
        match (self.levels.last(), first) {
            (None, _) => Some(false),
            (Some(Level::Call), ',') => {
                if self.positional && behind.starts_with(['\'', '"', '[', '{', '-']) {
                    return Some(true);
                }
                let word = |c: char| c.is_alphanumeric() || c == '_';
                let key = behind.trim_start_matches(word);
                match key.trim_start().chars().next() {
                    None => unclear,
                    Some('=') => Some(key.len() < behind.len()),
                    Some(',' | ')') if self.positional && key.len() < behind.len() => Some(true),
                    Some(')') => Some(key.len() == behind.len()),
                    Some(_) => Some(false),
                }
            }
            (Some(Level::Call), ')') => match behind.chars().next() {
                None => unclear,
                Some(next) => Some("],;<".contains(next)),
            },
            // In quotes that are not escaped, a word follows the first one.
            (Some(Level::Call), '\'' | '"') if self.joins(after) => match behind.chars().next() {
                None => unclear,
                Some(_) => Some(true),
            },
            (Some(Level::Call), _) => Some(false),
            (Some(Level::Map), sign) => Some(",}:".contains(sign)),
            (Some(Level::List | Level::Tuple), '\'' | '"') => Some(self.joins(after)),
            (Some(Level::List | Level::Tuple), sign) => Some(",])".contains(sign)),
        }
    }
}

/// A Python literal as JSON text; `None` if it is none.
pub fn python(text: &str) -> Option<String> {
    let mut literal = Literal::new(PYTHON.map(str::to_owned).to_vec(), false);
    let mut rest = text.to_owned();
    let mut json = String::new();
    let done = literal.take(&[], &mut rest, true, &mut json) == Progress::Done;
    (done && rest.trim().is_empty()).then_some(json)
}
