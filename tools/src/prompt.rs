//! Where the text to continue comes from: `-p`, `-f`, standard input, or the default one.

use std::io::{IsTerminal, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use crate::Failure;
use crate::cli::RunArgs;
use crate::tell::tell;

/// What the bundled model is asked to continue when no prompt is given.
pub const DEFAULT: &str = "# Ownership\n\nOwnership is";

/// How long a pipe may be silent before it is taken for one that nobody writes to: programs that
/// start others often leave them one.
const PATIENCE: Duration = Duration::from_secs(2);

/// The text to continue.
///
/// `-p -` and `-f -` stand for standard input. Where neither is given, text that comes through a
/// pipe or from a file is the prompt; where nothing comes (a terminal, `/dev/null`, an empty or
/// silent pipe) a bundled model has a default.
///
/// # Errors
/// A file that cannot be read, or no prompt at all.
pub fn text(args: &RunArgs) -> Result<String, Failure> {
    let file = Path::new("-");
    match (args.prompt.as_deref(), args.file.as_deref()) {
        (Some("-"), _) => Ok(without_line_end(all_of_input()?)),
        (Some(text), _) => Ok(text.to_owned()),
        (None, Some(path)) if path == file => all_of_input(),
        (None, Some(path)) => std::fs::read_to_string(path).map_err(Failure::file(path)),
        (None, None) => {
            let default = args.model.file().is_none().then_some(DEFAULT);
            match without_line_end(what_is_piped(default)?) {
                text if !text.is_empty() => Ok(text),
                _ => default.map(str::to_owned).ok_or_else(|| {
                    Failure::usage(
                        "no prompt: give one with -p TEXT, -f FILE, --chat or through a pipe",
                    )
                }),
            }
        }
    }
}

/// A shell ends what it pipes with a line end, which nobody means.
fn without_line_end(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

fn failed(error: std::io::Error) -> Failure {
    Failure::file(Path::new("standard input"))(error)
}

fn decoded(bytes: Vec<u8>) -> Result<String, Failure> {
    String::from_utf8(bytes)
        .map_err(|e| failed(std::io::Error::new(std::io::ErrorKind::InvalidData, e)))
}

fn all_of_input() -> Result<String, Failure> {
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes).map_err(failed)?;
    decoded(bytes)
}

/// What standard input has to say unasked; nothing where it is a terminal.
fn what_is_piped(default: Option<&str>) -> Result<String, Failure> {
    if std::io::stdin().is_terminal() {
        return Ok(String::new());
    }
    // Only these can be silent for ever.
    let may_block = std::fs::metadata("/proc/self/fd/0").map_or(true, |m| {
        m.file_type().is_fifo() || m.file_type().is_socket()
    });
    if !may_block {
        return all_of_input();
    }
    let pieces = listen();
    let mut bytes = match (pieces.recv_timeout(PATIENCE), default) {
        (Ok(piece), _) => piece.map_err(failed)?,
        (Err(RecvTimeoutError::Disconnected), _) => return Ok(String::new()),
        (Err(RecvTimeoutError::Timeout), Some(_)) => {
            tell(
                "emberflow: nothing comes through standard input, so the default prompt is taken; \
                 -p - waits for a text",
            );
            return Ok(String::new());
        }
        (Err(RecvTimeoutError::Timeout), None) => {
            tell("emberflow: waiting for the prompt on standard input");
            Vec::new()
        }
    };
    for piece in pieces {
        bytes.extend(piece.map_err(failed)?);
    }
    decoded(bytes)
}

/// Reads standard input on a thread of its own, which a silent pipe may hold for ever.
fn listen() -> Receiver<std::io::Result<Vec<u8>>> {
    let (tell, pieces) = channel();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let piece = match std::io::stdin().read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => Ok(buffer[..n].to_vec()),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => Err(e),
            };
            let last = piece.is_err();
            if tell.send(piece).is_err() || last {
                return;
            }
        }
    });
    pieces
}

#[cfg(test)]
mod tests {
    use super::without_line_end;

    #[test]
    fn one_line_end_is_the_shells() {
        for (piped, meant) in [
            ("a\n", "a"),
            ("a\r\n", "a"),
            ("a\n\n", "a\n"),
            ("a", "a"),
            ("\n", ""),
            ("", ""),
        ] {
            assert_eq!(without_line_end(piped.into()), meant);
        }
    }
}
