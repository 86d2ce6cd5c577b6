//! A child process, this program again, first loads OpenCL and opens the device that is wanted. Kernels are compiled and compared
//! with the CPU in this process: there a crash ends it.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use emberflow_engine::device::{OpenCl, list};
use serde_json::json;

use super::answer::{Answer, Unusable, answer_of};
use crate::child::this_program;
use crate::{Failure, print_json};

/// Name of the hidden command.
const COMMAND: &str = "check-opencl";

/// Maximum duration of a child process.
const LIMIT: Duration = Duration::from_secs(30);

/// Loads OpenCL in a child process, and opens a device, or else the first graphics processor. Returns whether there is one.
///
/// # Errors
/// The library or a driver crashes or hangs.
pub fn probe(number: Option<usize>) -> Result<bool, Unusable> {
    probe_by(this_program(), number, LIMIT)
}

/// [`probe`] by this program, with a time limit.
///
/// # Errors
/// As [`probe`].
pub fn probe_by(
    program: Command,
    number: Option<usize>,
    limit: Duration,
) -> Result<bool, Unusable> {
    let number = number.map(|number| number.to_string());
    let args: Vec<&str> = [COMMAND].into_iter().chain(number.as_deref()).collect();
    answer_of(program, &args, limit)
}

/// The hidden command: opens a device, or else the first graphics processor, and answers on a separate line.
///
/// # Errors
/// Standard output is closed.
pub fn command(number: Option<usize>) -> Result<(), Failure> {
    let gpu = || list().iter().position(|found| found.gpu);
    let number = number.or_else(gpu);
    if let Some(number) = number {
        // One that does not open is an error to whoever wants it.
        let _ = OpenCl::open(number, false);
    }
    // a driver may have begun a line
    std::io::stdout().write_all(b"\n")?;
    print_json(&json!(Answer::Found(number.is_some())))
}
