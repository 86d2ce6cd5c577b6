//! Arguments and values in Python's notation, or with keys without quotes, as JSON text, piece by piece.

use serde_json::Value;

use super::escape::{self, Escape};

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
}

impl Literal {
    /// A reader of Python's arguments, which begin with `(`.
    pub fn python_call() -> Self {
        Self::new(PYTHON.map(str::to_owned).to_vec(), true)
    }

    /// A reader of arguments in braces whose strings have these quotes, or JSON's.
    pub fn bare(quote: &str) -> Self {
        Self::new(vec![quote.to_owned(), "\"".to_owned()], true)
    }

    fn new(quotes: Vec<String>, lenient: bool) -> Self {
        Self {
            quotes,
            lenient,
            levels: Vec::new(),
            filled: false,
            next: Next::Value,
        }
    }

    /// Reads from the start of `text`, removes what was read, and appends it to `out` as JSON text. `ended`: no text
    /// follows.
    pub fn take(&mut self, text: &mut String, ended: bool, out: &mut String) -> Progress {
        let mut at = 0;
        let progress = loop {
            let rest = &text[at..];
            let (used, progress) = match self.next {
                Next::Text(quote) => self.text(rest, quote, ended, out),
                _ => {
                    let start = rest.trim_start();
                    let (used, progress) = self.step(start, ended, out);
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
    fn step(&mut self, text: &str, ended: bool, out: &mut String) -> (usize, Option<Progress>) {
        let Some(first) = text.chars().next() else {
            return (0, Some(Progress::More));
        };
        match (self.next, first) {
            (Next::Key | Next::Value | Next::After, ')' | ']' | '}') => self.close(out),
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
            (Next::Key, _) => self.key(text, ended, out),
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
            _ => Level::List,
        };
        out.push(if level == Level::List { '[' } else { '{' });
        self.levels.push(level);
        self.filled = false;
        self.next = self.member();
        (1, None)
    }

    fn close(&mut self, out: &mut String) -> (usize, Option<Progress>) {
        match self.levels.pop() {
            None => return (0, Some(Progress::Wrong)),
            Some(Level::List) => out.push(']'),
            Some(Level::Call | Level::Map) => out.push('}'),
        }
        self.filled = true;
        self.next = Next::After;
        (1, self.levels.is_empty().then_some(Progress::Done))
    }

    /// Separates an item of a list from the one before.
    fn begin_item(&mut self, out: &mut String) {
        if self.levels.last() == Some(&Level::List) {
            if self.filled {
                out.push_str(", ");
            }
            self.filled = true;
        }
    }

    fn key(&mut self, text: &str, ended: bool, out: &mut String) -> (usize, Option<Progress>) {
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
        if self.filled {
            out.push_str(", ");
        }
        self.filled = true;
        out.push_str(&Value::from(key).to_string());
        self.next = Next::Separator;
        (used, None)
    }

    /// A string's quote, or a word.
    fn value(&mut self, text: &str, ended: bool, out: &mut String) -> (usize, Option<Progress>) {
        let longer = |quote: &String| quote.len() > text.len() && quote.starts_with(text);
        if !ended && self.quotes.iter().any(longer) {
            return (0, Some(Progress::More));
        }
        let quote = self
            .quotes
            .iter()
            .position(|quote| text.starts_with(&quote[..]));
        if let Some(quote) = quote {
            self.begin_item(out);
            out.push('"');
            self.next = Next::Text(quote);
            return (self.quotes[quote].len(), None);
        }
        let Some(end) = text
            .find([',', ')', ']', '}'])
            .or(ended.then_some(text.len()))
        else {
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

    /// A word as JSON.
    fn word(&self, word: &str) -> Option<String> {
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
        let raw = mark.len() > 3;
        let mut at = 0;
        loop {
            let rest = &text[at..];
            let Some(c) = rest.chars().next() else {
                return (at, Some(Progress::More));
            };
            if rest.starts_with(&mark[..]) {
                match self.closes(&rest[mark.len()..], ended) {
                    _ if raw => {}
                    Some(true) => {}
                    None => return (at, Some(Progress::More)),
                    Some(false) => {
                        escape::append(c, out);
                        at += c.len_utf8();
                        continue;
                    }
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
                let word = |c: char| c.is_alphanumeric() || c == '_';
                let key = behind.trim_start_matches(word);
                match key.trim_start().chars().next() {
                    None => unclear,
                    Some('=') => Some(key.len() < behind.len()),
                    Some(')') => Some(key.len() == behind.len()),
                    Some(_) => Some(false),
                }
            }
            (Some(Level::Call), ')') => match behind.chars().next() {
                None => unclear,
                Some(next) => Some("],;<".contains(next)),
            },
            (Some(Level::Call), _) => Some(false),
            (Some(Level::Map), sign) => Some(",}:".contains(sign)),
            (Some(Level::List), sign) => Some(",])".contains(sign)),
        }
    }
}

/// A Python literal as JSON text; `None` if it is none.
pub fn python(text: &str) -> Option<String> {
    let mut literal = Literal::new(PYTHON.map(str::to_owned).to_vec(), false);
    let mut rest = text.to_owned();
    let mut json = String::new();
    let done = literal.take(&mut rest, true, &mut json) == Progress::Done;
    (done && rest.trim().is_empty()).then_some(json)
}
