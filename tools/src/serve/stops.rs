//! Stop strings: text ends before the first one, wherever token borders lie.

/// Passes text on and ends it before a stop string.
#[derive(Debug)]
pub struct Stops {
    stops: Vec<String>,
    /// Text that could be the beginning of a stop string.
    held: String,
}

/// Text that may be sent, and whether a stop string follows it.
#[derive(Debug, PartialEq, Eq)]
pub struct Passed {
    /// The text.
    pub text: String,
    /// Whether the text ends here.
    pub stopped: bool,
}

impl Stops {
    /// For these strings; empty ones never match.
    pub fn new(mut stops: Vec<String>) -> Self {
        stops.retain(|stop| !stop.is_empty());
        Self {
            stops,
            held: String::new(),
        }
    }

    /// Takes the next piece of text; returns what cannot belong to a stop string any more.
    pub fn push(&mut self, piece: &str) -> Passed {
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop));
        if let Some(at) = found.min() {
            self.held.truncate(at);
            return Passed {
                text: std::mem::take(&mut self.held),
                stopped: true,
            };
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop));
        let rest = self
            .held
            .split_off(self.held.len() - keep.max().unwrap_or(0));
        Passed {
            text: std::mem::replace(&mut self.held, rest),
            stopped: false,
        }
    }

    /// The rest, at the end of the text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that `stop` begins with.
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
}
