//! Stop strings: the text ends before the first one, even if it spans several tokens.

use std::ops::Range;

use emberflow_models::tokenizer::StreamDecoder;

/// Forwards text until a stop string appears.
#[derive(Debug)]
pub struct Stops {
    stops: Vec<String>,
    /// Number of stop strings from the request; they come first.
    own: usize,
    /// Whether the text includes the stop string.
    keeps: bool,
    /// Text that may be the beginning of a stop string.
    held: String,
    /// Ranges of `held` that are names of control tokens: they can match, but are not part of the text.
    hidden: Vec<Range<usize>>,
    /// The stop string that ended the text.
    found: Option<String>,
}

/// Text that can be sent.
#[derive(Debug, PartialEq, Eq)]
pub struct Passed {
    /// The text.
    pub text: String,
    /// Whether the text ends after it.
    pub stopped: bool,
}

impl Stops {
    /// For these stop strings; empty ones never match.
    pub fn new(mut stops: Vec<String>) -> Self {
        stops.retain(|stop| !stop.is_empty());
        Self {
            own: stops.len(),
            stops,
            keeps: false,
            held: String::new(),
            hidden: Vec::new(),
            found: None,
        }
    }

    /// Adds stop strings that responses do not mention.
    #[must_use]
    pub fn and_quietly(mut self, more: &[String]) -> Self {
        let more = more.iter().filter(|stop| !stop.is_empty());
        self.stops.extend(more.cloned());
        self
    }

    /// Sets whether the text includes the stop string that ends it.
    #[must_use]
    pub fn keeping(self, keeps: bool) -> Self {
        Self { keeps, ..self }
    }

    /// Decodes the next token of `stream`. A control token may match a stop string, but is not part of the text.
    pub fn push_token(&mut self, stream: &mut StreamDecoder<'_>, token: u32) -> Passed {
        match (stream.push(token), stream.hidden(token)) {
            (Some(piece), _) => self.push(&piece),
            (None, Some(name)) => self.push_hidden(&name),
            (None, None) => self.push(""),
        }
    }

    /// Adds a piece of text; returns the text that cannot be part of a stop string any more.
    fn push(&mut self, piece: &str) -> Passed {
        self.held.push_str(piece);
        self.pass()
    }

    /// Adds the name of a control token.
    fn push_hidden(&mut self, name: &str) -> Passed {
        let start = self.held.len();
        self.held.push_str(name);
        self.hidden.push(start..self.held.len());
        self.pass()
    }

    fn pass(&mut self) -> Passed {
        let at = |(index, stop): (usize, &String)| Some((self.held.find(stop)?, index));
        let found = self.stops.iter().enumerate().filter_map(at);
        if let Some((at, index)) = found.min_by_key(|&(at, _)| at) {
            let stop = &self.stops[index];
            let at = if self.keeps { at + stop.len() } else { at };
            self.found = (index < self.own).then(|| stop.clone());
            let text = self.take(at);
            // Drop everything after the end.
            self.held.clear();
            self.hidden.clear();
            return Passed {
                text,
                stopped: true,
            };
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop));
        Passed {
            text: self.take(self.held.len() - keep.max().unwrap_or(0)),
            stopped: false,
        }
    }

    /// The stop string of the request that ended the text.
    pub fn found(&mut self) -> Option<String> {
        self.found.take()
    }

    /// The remaining text, at the end.
    pub fn finish(&mut self) -> String {
        self.take(self.held.len())
    }

    /// Removes the first `len` bytes of the held text; returns them without control tokens.
    fn take(&mut self, len: usize) -> String {
        let rest = self.held.split_off(len);
        let taken = std::mem::replace(&mut self.held, rest);
        if self.hidden.is_empty() {
            return taken;
        }
        let mut text = String::with_capacity(taken.len());
        let mut from = 0;
        for part in &self.hidden {
            let (start, end) = (part.start.min(len), part.end.min(len));
            text.push_str(&taken[from..start]);
            from = end;
        }
        text.push_str(&taken[from..]);
        self.hidden.retain(|part| part.end > len);
        for part in &mut self.hidden {
            *part = part.start.saturating_sub(len)..part.end - len;
        }
        text
    }
}

/// Length of the longest suffix of `text` that is a prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let ends = stop.char_indices().map(|(at, _)| at).filter(|&at| at > 0);
    ends.filter(|&at| text.ends_with(&stop[..at]))
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut filter = Stops::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut out = String::new();
        for piece in pieces {
            let passed = filter.push(piece);
            out.push_str(&passed.text);
            if passed.stopped {
                return (out, true);
            }
        }
        out.push_str(&filter.finish());
        (out, false)
    }

    #[test]
    fn the_stop_string_can_be_a_part_of_the_text() {
        let mut filter = Stops::new(vec!["END".into()]).keeping(true);
        assert_eq!(filter.push("a EN").text, "a ");
        let passed = filter.push("D b");
        assert_eq!((passed.text.as_str(), passed.stopped), ("END", true));
    }

    #[test]
    fn a_stop_string_ends_the_text_across_pieces() {
        assert_eq!(run(&["END"], &["a E", "N", "D b"]), ("a ".into(), true));
        assert_eq!(
            run(&["END"], &["a E", "N", "d b"]),
            ("a ENd b".into(), false)
        );
        assert_eq!(run(&["END"], &["a E", "N"]), ("a EN".into(), false));
        assert_eq!(run(&["ababc"], &["abab", "abc"]), ("ab".into(), true));
    }

    #[test]
    fn the_first_of_several_counts_and_empty_ones_do_not() {
        assert_eq!(run(&["b", "a"], &["xab"]), ("x".into(), true));
        let mut filter = Stops::new(vec!["b".into(), "a".into()]);
        assert!(filter.push("xab").stopped);
        assert_eq!(filter.finish(), "", "nothing after the stop string");
        assert_eq!(filter.found().as_deref(), Some("a"));
        let mut filter = Stops::new(vec!["b".into()]).and_quietly(&["a".into()]);
        assert!(filter.push("xab").stopped);
        assert_eq!(filter.found(), None);
        assert_eq!(run(&[""], &["xab"]), ("xab".into(), false));
        assert_eq!(
            run(&["\u{20ac}\u{20ac}"], &["1\u{20ac}", "2"]),
            ("1\u{20ac}2".into(), false)
        );
    }

    #[test]
    fn nothing_is_held_back_longer_than_needed() {
        let mut filter = Stops::new(vec!["\n\n".into()]);
        assert_eq!(filter.push("line\n").text, "line");
        assert_eq!(filter.push("next").text, "\nnext");
    }

    #[test]
    fn control_tokens_stop_a_text_and_are_no_part_of_it() {
        let mut filter = Stops::new(vec!["<|im_end|>".into(), "\n<|im_start|>".into()]);
        assert_eq!(filter.push("one\n").text, "one");
        let passed = filter.push_hidden("<|tool|>");
        assert_eq!((passed.text.as_str(), passed.stopped), ("\n", false));
        assert_eq!(filter.push(" two\n").text, " two");
        assert!(filter.push_hidden("<|im_start|>").stopped);
        let mut filter = Stops::new(vec!["<|im_end|>".into()]);
        assert_eq!(filter.push("a <").text, "a ");
        let passed = filter.push_hidden("<|im_end|>");
        assert_eq!((passed.text.as_str(), passed.stopped), ("<", true));
        // Part of a control token's name is held back and then dropped.
        let mut filter = Stops::new(vec![">END".into()]);
        assert_eq!(filter.push_hidden("<a>").text, "");
        assert_eq!(filter.push("EN").text, "");
        assert_eq!(filter.push("d").text, "ENd");
        filter.push_hidden("<b>");
        assert_eq!(filter.finish(), "");
    }
}
