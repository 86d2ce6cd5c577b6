//! The line editor of terminals: history with search, several lines, and pasted text as one message.
//!
//! Enter ends a message and Alt-Enter begins a new line. In a message that begins with `"""`, Enter begins a new line until
//! `"""` is repeated.

use std::path::PathBuf;

use emberflow_storage::profile::DeviceProfile;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{
    Behavior, Cmd, Config, EventHandler, Helper, KeyCode, KeyEvent, Modifiers, Result as Edited,
};

use crate::Failure;

/// Maximum messages in the history, and bytes per message.
const HISTORY: usize = 200;
const LONGEST: usize = 16 << 10;

/// Encloses messages of several lines.
const FENCE: &str = "\"\"\"";

/// Input from the terminal.
#[derive(Debug, PartialEq, Eq)]
pub enum TerminalInput {
    /// A message.
    Message(String),
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D in an empty line.
    End,
}

/// Completes commands and detects the end of a message.
struct Guide {
    /// Completions of the first word of a message.
    words: &'static [&'static str],
}

impl Helper for Guide {}
impl Highlighter for Guide {}

impl Hinter for Guide {
    type Hint = String;
}

impl Validator for Guide {
    fn validate(&self, input: &mut ValidationContext<'_>) -> Edited<ValidationResult> {
        Ok(match is_open(input.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Completer for Guide {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        at: usize,
        _: &rustyline::Context<'_>,
    ) -> Edited<(usize, Vec<String>)> {
        Ok((0, completions(self.words, &line[..at])))
    }
}

/// The words with the prefix `begun`.
fn completions(words: &[&str], begun: &str) -> Vec<String> {
    let fit = words
        .iter()
        .filter(|word| !begun.is_empty() && word.starts_with(begun));
    fit.map(|&word| word.to_owned()).collect()
}

/// Whether a message begins with a fence that is not closed.
fn is_open(message: &str) -> bool {
    let rest = message.trim_start().strip_prefix(FENCE);
    rest.is_some_and(|rest| !rest.contains(FENCE))
}

/// A message without the fences that enclose it.
fn without_fences(message: &str) -> &str {
    let inner = message.trim().strip_prefix(FENCE);
    let inner = inner.and_then(|rest| rest.strip_suffix(FENCE));
    match inner {
        Some(inner) if !inner.contains(FENCE) => inner.trim_matches('\n'),
        _ => message,
    }
}

/// Reads messages from a terminal.
pub struct Editor {
    lines: rustyline::Editor<Guide, FileHistory>,
    history: Option<PathBuf>,
}

/// The file of the history in the cache folder; `None` without one.
fn history_file() -> Option<PathBuf> {
    Some(DeviceProfile::default_path()?.with_file_name("chat_history"))
}

fn failed(why: ReadlineError) -> Failure {
    Failure::Fault(format!("the terminal cannot be read: {why}"))
}

impl Editor {
    /// An editor with the history of former chats. It completes the first word of a message to `words`.
    ///
    /// # Errors
    /// A terminal that cannot be opened.
    pub fn open(words: &'static [&'static str]) -> Result<Self, Failure> {
        let config = Config::builder()
            // Standard output may be a file.
            .behavior(Behavior::PreferTerm)
            .history_ignore_space(true)
            .max_history_size(HISTORY)
            .map_err(failed)?
            .build();
        let history = FileHistory::with_config(&config);
        let mut lines = rustyline::Editor::with_history(config, history).map_err(failed)?;
        lines.set_helper(Some(Guide { words }));
        let new_line = KeyEvent(KeyCode::Enter, Modifiers::ALT);
        lines.bind_sequence(new_line, EventHandler::Simple(Cmd::Newline));
        let mut editor = Self {
            lines,
            history: history_file(),
        };
        editor.load_history();
        Ok(editor)
    }

    /// Loads the history. One that cannot be read is left alone.
    fn load_history(&mut self) {
        let Some(path) = &self.history else {
            return;
        };
        let most = (HISTORY * LONGEST) as u64;
        let fits = path
            .metadata()
            .is_ok_and(|m| m.is_file() && m.len() <= most);
        if fits && let Err(why) = self.lines.load_history(path) {
            let path = path.display();
            tracing::warn!(
                "{path}: {why}; the history is not used: delete this file to begin anew"
            );
            self.history = None;
        }
    }

    /// Reads the next message.
    ///
    /// # Errors
    /// A terminal that cannot be read.
    pub fn read(&mut self, prompt: &str) -> Result<TerminalInput, Failure> {
        loop {
            return match self.lines.readline(prompt) {
                Ok(message) => {
                    self.remember(&message);
                    Ok(TerminalInput::Message(without_fences(&message).to_owned()))
                }
                Err(ReadlineError::Interrupted) => Ok(TerminalInput::Interrupt),
                Err(ReadlineError::Eof) => Ok(TerminalInput::End),
                // The window's size has changed.
                Err(ReadlineError::Signal(_)) => continue,
                Err(why) => Err(failed(why)),
            };
        }
    }

    /// Adds a message to the history and its file, which only its owner can read.
    fn remember(&mut self, message: &str) {
        if message.trim().is_empty() || message.len() > LONGEST {
            return;
        }
        let added = self.lines.add_history_entry(message).unwrap_or(false);
        let Some(path) = self.history.as_ref().filter(|_| added) else {
            return;
        };
        if let Some(folder) = path.parent() {
            // If this fails, so does the next step.
            let _ = std::fs::create_dir_all(folder);
        }
        if let Err(why) = self.lines.append_history(path) {
            tracing::info!("{}: {why}; the history is not saved", path.display());
            self.history = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fences_enclose_several_lines() {
        for (message, open, meant) in [
            ("plain", false, "plain"),
            ("two\nlines", false, "two\nlines"),
            ("\"\"\"", true, "\"\"\""),
            ("\"\"\"first", true, "\"\"\"first"),
            ("\"\"\"first\nsecond\"\"\"", false, "first\nsecond"),
            ("\"\"\"\n  indented\n\"\"\"", false, "  indented"),
            // Text that only contains them is not changed.
            ("say \"\"\"", false, "say \"\"\""),
            (
                "\"\"\"doc\"\"\"\ndef f():",
                false,
                "\"\"\"doc\"\"\"\ndef f():",
            ),
            (
                "\"\"\"a\"\"\" and \"\"\"b\"\"\"",
                false,
                "\"\"\"a\"\"\" and \"\"\"b\"\"\"",
            ),
            ("a line \\", false, "a line \\"),
        ] {
            assert_eq!(is_open(message), open, "{message}");
            assert_eq!(without_fences(message), meant);
        }
    }

    #[test]
    fn only_begun_words_are_completed() {
        let words = ["/save ", "/set ", "/stats"];
        assert_eq!(completions(&words, "/s"), ["/save ", "/set ", "/stats"]);
        assert_eq!(completions(&words, "/st"), ["/stats"]);
        assert!(completions(&words, "").is_empty());
        assert!(completions(&words, "s").is_empty());
    }
}
