//! JSON output.

use crate::Failure;

/// Prints a value as one line of JSON.
pub fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, value).map_err(std::io::Error::from)?;
    writeln!(out)?;
    Ok(())
}
