//! The prompt: from `-p`, `-f`, standard input, or a default.
//!
//! Text is tokenized while it is read, and reading stops once the context is full.

use std::fs::File;
use std::io::{BufRead, ErrorKind, IsTerminal, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::Builder;
use std::time::Duration;

use emberflow_engine::{Error, Text};
use emberflow_models::tokenizer::Encoder;

use crate::Failure;
use crate::cli::RunArgs;
use crate::editor::{Editor, TerminalInput};
use crate::tell::tell;
use crate::terminal;
use crate::text::{BLOCK, Utf8};

/// Default prompt of the bundled models.
pub const DEFAULT: &str = "# Ownership\n\nOwnership is";

/// How long to wait for a silent pipe before using the default prompt. Programs that start others often leave them a
/// pipe without a writer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Blocks of a pipe buffered ahead of the tokenizer.
const WAITING: usize = 2;

/// A prompt.
#[derive(Debug)]
pub struct Prompt {
    /// The text.
    pub text: String,
    /// Its tokens, including BOS and EOS if the model wants them.
    pub ids: Vec<u32>,
}

/// Reads prompts.
#[derive(Clone, Copy)]
pub struct PromptReader<'a> {
    /// Tokenizer and chat template.
    pub text: &'a Text,
    /// Maximum tokens of a prompt.
    pub context: usize,
}

impl PromptReader<'_> {
    /// Reads the prompt.
    ///
    /// `-p -` and `-f -` read standard input, a terminal by the line editor. If neither is given, a pipe or file on
    /// standard input is the prompt; if it is a terminal, `/dev/null`, or an empty or silent pipe, bundled models use a
    /// default prompt, and others ask for one on a terminal.
    ///
    /// # Errors
    /// A file that cannot be read, no prompt, or a prompt that exceeds the context.
    pub fn prompt(self, args: &RunArgs) -> Result<Prompt, Failure> {
        let stdin = Path::new("-");
        match (args.prompt.as_deref(), args.file.as_deref()) {
            (Some("-"), _) if terminal::edits_lines() => self.typed(),
            (Some("-"), _) => self.read(std::io::stdin(), input())?.finish(true),
            (Some(text), _) => self.given(text),
            (None, Some(path)) if path == stdin && terminal::edits_lines() => self.typed(),
            (None, Some(path)) if path == stdin => {
                self.read(std::io::stdin(), input())?.finish(false)
            }
            (None, Some(path)) => {
                let file = File::open(path).map_err(Failure::file(path))?;
                self.read(file, path)?.finish(false)
            }
            (None, None) => {
                let default = args.model.file().is_none().then_some(DEFAULT);
                if default.is_none() && !args.json && terminal::edits_lines() {
                    return self.typed();
                }
                let piped = self.piped(default)?.finish(true)?;
                match (piped.text.is_empty(), default) {
                    (false, _) => Ok(piped),
                    (true, Some(default)) => self.given(default),
                    (true, None) => Err(Failure::usage(
                        "no prompt: use -p TEXT, -f FILE, --chat or a pipe",
                    )),
                }
            }
        }
    }

    /// Reads the next line of a chat, without its line ending; `None` at the end.
    ///
    /// # Errors
    /// Input that cannot be read, or a line that exceeds the context.
    pub fn line(self, from: &mut impl BufRead) -> Result<Option<String>, Failure> {
        let mut taken = self.start(input());
        let mut any = false;
        loop {
            let block = match from.fill_buf() {
                Ok(block) => block,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(Failure::file(input())(e)),
            };
            let end = block.iter().position(|&byte| byte == b'\n');
            let used = end.map_or(block.len(), |end| end + 1);
            any |= used > 0;
            taken.take(&block[..used])?;
            from.consume(used);
            if used == 0 || end.is_some() {
                return if any {
                    Ok(Some(taken.finish(true)?.text))
                } else {
                    Ok(None)
                };
            }
        }
    }

    /// Checks that a message fits into the context.
    ///
    /// # Errors
    /// [`Error::PromptTooLong`] if it does not.
    pub fn check(self, message: &str) -> Result<(), Failure> {
        self.read(message.as_bytes(), input())?
            .finish(false)
            .map(drop)
    }

    /// Asks for a prompt on the terminal.
    fn typed(self) -> Result<Prompt, Failure> {
        match Editor::open(&[])?.read("prompt> ")? {
            TerminalInput::Message(text) => {
                self.check(&text)?;
                self.given(&text)
            }
            TerminalInput::Interrupt => Err(Failure::Interrupted),
            TerminalInput::End => Err(Failure::usage("no prompt: use -p TEXT, -f FILE or a pipe")),
        }
    }

    fn given(self, text: &str) -> Result<Prompt, Failure> {
        Ok(Prompt {
            text: text.to_owned(),
            ids: self.text.encode(text)?,
        })
    }

    fn start<'a>(self, path: &'a Path) -> Taken<'a>
    where
        Self: 'a,
    {
        Taken {
            reader: self,
            path,
            utf8: Utf8::default(),
            end: String::new(),
            said: String::new(),
            encoder: self.text.tokenizer().encoder(),
            ids: Vec::new(),
        }
    }

    fn read<'a>(self, mut from: impl Read, path: &'a Path) -> Result<Taken<'a>, Failure>
    where
        Self: 'a,
    {
        let mut taken = self.start(path);
        let mut block = vec![0; BLOCK];
        loop {
            match from.read(&mut block) {
                Ok(0) => return Ok(taken),
                Ok(n) => taken.take(&block[..n])?,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(Failure::file(path)(e)),
            }
        }
    }

    /// Text from standard input without `-p` or `-f`; `None` for a terminal.
    fn piped<'a>(self, default: Option<&str>) -> Result<Taken<'a>, Failure>
    where
        Self: 'a,
    {
        let mut taken = self.start(input());
        if std::io::stdin().is_terminal() {
            return Ok(taken);
        }
        // Only pipes, sockets and devices can block.
        let may_block = std::fs::metadata("/proc/self/fd/0").map_or(true, |m| {
            m.file_type().is_fifo() || m.file_type().is_socket()
        });
        if !may_block {
            return self.read(std::io::stdin(), input());
        }
        let failed = |e| Failure::file(input())(e);
        let pieces = listen().map_err(failed)?;
        match (pieces.recv_timeout(PATIENCE), default) {
            (Ok(piece), _) => taken.take(&piece.map_err(failed)?)?,
            (Err(RecvTimeoutError::Disconnected), _) => return Ok(taken),
            (Err(RecvTimeoutError::Timeout), Some(_)) => {
                tell(
                    "emberflow: no input on standard input; using the default prompt \
                     (use -p - to wait for input)",
                );
                return Ok(taken);
            }
            (Err(RecvTimeoutError::Timeout), None) => {
                tell("emberflow: waiting for a prompt on standard input");
            }
        }
        for piece in pieces {
            taken.take(&piece.map_err(failed)?)?;
        }
        Ok(taken)
    }
}

/// Name of standard input in error messages.
fn input() -> &'static Path {
    Path::new("standard input")
}

/// A prompt being read.
struct Taken<'a> {
    reader: PromptReader<'a>,
    path: &'a Path,
    utf8: Utf8,
    /// A trailing line ending, or the first half of one.
    end: String,
    said: String,
    encoder: Encoder<'a>,
    ids: Vec<u32>,
}

impl Taken<'_> {
    fn take(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let piece = self.utf8.push(bytes).map_err(Failure::file(self.path))?;
        let mut text = std::mem::take(&mut self.end) + &piece;
        self.end = text.split_off(text.len() - line_end(&text));
        self.say(&text)
    }

    fn say(&mut self, text: &str) -> Result<(), Failure> {
        let known = self.ids.len();
        self.encoder.push(text, &mut self.ids)?;
        self.reader.text.check(&self.ids[known..])?;
        self.said.push_str(text);
        let least = self.ids.len() + self.encoder.least();
        let capacity = self.reader.context;
        if least > capacity {
            return Err(Failure::Engine(Error::PromptTooLong {
                least,
                capacity,
                limit: self.reader.text.config().max_context as usize,
            }));
        }
        Ok(())
    }

    /// The whole text. For a pipe, the last line ending is dropped: shells add it.
    fn finish(mut self, piped: bool) -> Result<Prompt, Failure> {
        std::mem::take(&mut self.utf8)
            .finish()
            .map_err(Failure::file(self.path))?;
        let end = std::mem::take(&mut self.end);
        if !(piped && end.ends_with('\n')) {
            self.say(&end)?;
        }
        let known = self.ids.len();
        self.encoder.finish(&mut self.ids)?;
        self.reader.text.check(&self.ids[known..])?;
        Ok(Prompt {
            text: self.said,
            ids: self.reader.text.framed(self.ids),
        })
    }
}

/// Length in bytes of a trailing line ending, or of its first half.
fn line_end(text: &str) -> usize {
    let ends = ["\r\n", "\n", "\r"];
    ends.iter()
        .find(|end| text.ends_with(**end))
        .map_or(0, |end| end.len())
}

/// Reads standard input on a separate thread, which a silent pipe may block forever.
///
/// # Errors
/// The thread cannot be started.
fn listen() -> std::io::Result<Receiver<std::io::Result<Vec<u8>>>> {
    let (tell, pieces) = sync_channel(WAITING);
    Builder::new().name("ember-input".into()).spawn(move || {
        let mut buffer = vec![0; BLOCK];
        loop {
            let piece = match std::io::stdin().read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => Ok(buffer[..n].to_vec()),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => Err(e),
            };
            let last = piece.is_err();
            if tell.send(piece).is_err() || last {
                return;
            }
        }
    })?;
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use emberflow_engine::Model;

    use super::*;

    #[test]
    fn one_line_end_is_the_shells_however_the_text_comes() {
        let model = Model::demo().unwrap();
        let text = model.text();
        let reader = PromptReader { text, context: 8 };
        for (piped, meant) in [
            ("a\n", "a"),
            ("a\r\n", "a"),
            ("a\n\n", "a\n"),
            ("a\n\nb\r", "a\n\nb\r"),
            ("a", "a"),
            ("é\n", "é"),
            ("\n", ""),
            ("", ""),
        ] {
            for piece in [1, 2, 8] {
                let mut taken = reader.start(input());
                piped
                    .as_bytes()
                    .chunks(piece)
                    .for_each(|bytes| taken.take(bytes).unwrap());
                let prompt = taken.finish(true).unwrap();
                assert_eq!(prompt.text, meant);
                assert_eq!(prompt.ids, text.encode(meant).unwrap());
            }
            let whole = reader.read(piped.as_bytes(), input()).unwrap();
            assert_eq!(whole.finish(false).unwrap().text, piped);
        }
        let mut lines = "one\ntwo\r\n\nfour".as_bytes();
        let all: Vec<String> = std::iter::from_fn(|| reader.line(&mut lines).unwrap()).collect();
        assert_eq!(all, ["one", "two", "", "four"]);
    }

    #[test]
    fn text_without_an_end_is_refused_with_both_numbers() {
        let model = Model::demo().unwrap();
        let reader = PromptReader {
            text: model.text(),
            context: 100,
        };
        for forever in ["y\n", "word ", "a", "字"] {
            let mut read = 0;
            let endless = std::iter::repeat(forever.as_bytes())
                .flatten()
                .inspect(|_| read += 1);
            let refused = reader
                .read(Endless(endless), input())
                .map(|_| ())
                .unwrap_err();
            let Failure::Engine(Error::PromptTooLong {
                least, capacity, ..
            }) = refused
            else {
                panic!("{forever:?}: {refused}");
            };
            assert!(least > 100 && capacity == 100, "{forever:?}: {least}");
            assert!(read < 400 << 10, "{forever:?}: {read} bytes");
            let words = std::iter::repeat(forever.as_bytes()).flatten();
            let mut line = BufReader::new(Endless(words.filter(|&&byte| byte != b'\n')));
            let refused = reader.line(&mut line).unwrap_err();
            assert!(
                matches!(refused, Failure::Engine(Error::PromptTooLong { .. })),
                "{refused}"
            );
        }
    }

    /// An endless reader.
    struct Endless<I>(I);

    impl<I: Iterator<Item = &'static u8>> Read for Endless<I> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let bytes = buffer.iter_mut().zip(self.0.by_ref());
            Ok(bytes.map(|(place, &byte)| *place = byte).count())
        }
    }
}
