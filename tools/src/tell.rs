//! Messages on standard error.

use std::fmt::Display;
use std::io::Write;

/// Writes a line to standard error. Where it cannot be written (a full disk, a reader that has gone)
/// nothing happens: a message that nobody gets is no reason to fail.
pub fn tell(line: impl Display) {
    tell_part(format_args!("{line}\n"));
}

/// As [`tell`], without an end of the line.
pub fn tell_part(text: impl Display) {
    // one write, so that lines of several threads stay whole
    let _ = std::io::stderr().write_all(text.to_string().as_bytes());
}
