//! Line-based end conditions: `n_indent` and `t_max_predict_ms` of llama.cpp's server.

use std::time::{Duration, Instant};

use serde::Deserialize;

/// Request fields.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub struct LineOptions {
    /// Minimum indentation, in spaces and tabs, of each line after the first; a line with less ends the text and is
    /// not part of it.
    n_indent: Option<usize>,
    /// End at the first new line this many milliseconds after the first token.
    t_max_predict_ms: Option<u64>,
}

/// Ends a text at a line with too little indentation, or at the first new line after a time.
#[derive(Debug)]
pub struct Lines {
    asked: LineOptions,
    /// Indentation of the current line so far.
    indent: Option<usize>,
    first: Option<Instant>,
    ended: bool,
}

impl Lines {
    /// For one text.
    pub fn new(asked: LineOptions) -> Self {
        Self {
            asked,
            indent: None,
            first: None,
            ended: false,
        }
    }

    /// Processes the next piece of text, received at `now`. Truncates it at the end of the text and returns whether
    /// the text ended.
    pub fn push(&mut self, text: &mut String, now: Instant) -> bool {
        let least = self.asked.n_indent.unwrap_or(0);
        let mut cut = None;
        for (at, byte) in text.bytes().enumerate() {
            match (byte, self.indent) {
                (b' ' | b'\t', Some(indent)) => self.indent = Some(indent + 1),
                (_, Some(indent)) if indent < least => {
                    cut = Some(at);
                    break;
                }
                (b'\n', _) => self.indent = Some(0),
                _ => self.indent = None,
            }
        }
        let time = self.asked.t_max_predict_ms.map(Duration::from_millis);
        let spent = now - *self.first.get_or_insert(now);
        self.ended = cut.is_some() || time.is_some_and(|time| spent > time && text.contains('\n'));
        text.truncate(cut.unwrap_or(text.len()));
        self.ended
    }

    /// Whether the text has ended.
    pub fn ended(&self) -> bool {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(n_indent: usize, t_max_predict_ms: Option<u64>) -> Lines {
        Lines::new(LineOptions {
            n_indent: Some(n_indent),
            t_max_predict_ms,
        })
    }

    /// As `process_token` in llama.cpp's server.
    #[test]
    fn a_line_that_is_indented_less_ends_the_text() {
        let cut = |least, pieces: &[&str]| {
            let mut lines = lines(least, None);
            let mut all = String::new();
            let ended = pieces.iter().any(|piece| {
                let mut piece = (*piece).to_owned();
                let ended = lines.push(&mut piece, Instant::now());
                all += &piece;
                ended
            });
            (all, ended)
        };
        let pieces = ["x();\n ", "\t y();", "\n z"];
        assert_eq!(cut(2, &pieces), ("x();\n \t y();\n ".into(), true));
        assert_eq!(cut(1, &pieces), (pieces.concat(), false));
        assert_eq!(cut(0, &["a\n", "\nb"]), ("a\n\nb".into(), false));
        assert_eq!(cut(1, &["a\n", "\nb"]), ("a\n".into(), true));
    }

    #[test]
    fn a_text_ends_at_the_first_new_line_after_its_time() {
        let mut lines = lines(0, Some(100));
        let start = Instant::now();
        let mut push = |text: &str, ms| {
            let mut text = text.to_owned();
            lines.push(&mut text, start + Duration::from_millis(ms))
        };
        assert!(!push("a\n", 0));
        assert!(!push("b\n", 100));
        assert!(!push("c", 101));
        assert!(push("d\n", 102));
    }
}
