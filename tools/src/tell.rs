//! Messages on standard error.

use std::fmt::Display;
use std::io::Write;

/// Writes a line to standard error. Write errors (full disk, closed pipe) are ignored.
pub fn tell(line: impl Display) {
    tell_part(format_args!("{line}\n"));
}

/// As [`tell`], without a line ending.
pub fn tell_part(text: impl Display) {
    // One write, so that lines of several threads do not mix.
    let _ = std::io::stderr().write_all(text.to_string().as_bytes());
}
