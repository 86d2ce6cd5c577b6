//! A child process, this program again, first loads OpenCL and opens all of its devices. Kernels are compiled and compared with the
//! CPU in this process: there a crash ends it.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use emberflow_engine::device::{OpenCl, list};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::answer::{Answer, Unusable, answer_of};
use crate::child::this_program;
use crate::{Failure, print_json};

/// Name of the hidden command.
const COMMAND: &str = "check-opencl";

/// Maximum duration of a child process.
const LIMIT: Duration = Duration::from_secs(30);

/// Result of a child process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Devices {
    /// Names of the devices, by number.
    pub names: Vec<String>,
}

/// Loads OpenCL in a child process. Without a library or a driver there are no devices.
///
/// # Errors
/// The library or a driver crashes or hangs.
pub fn probe() -> Result<Devices, Unusable> {
    probe_by(this_program(), LIMIT)
}

/// [`probe`] by this program, with a time limit.
///
/// # Errors
/// As [`probe`].
pub fn probe_by(program: Command, limit: Duration) -> Result<Devices, Unusable> {
    answer_of(program, &[COMMAND], limit)
}

/// The hidden command: opens all devices, and prints their names on a separate line.
///
/// # Errors
/// Standard output is closed.
pub fn command() -> Result<(), Failure> {
    let names: Vec<String> = list().into_iter().map(|found| found.name).collect();
    for number in 0..names.len() {
        // One that does not open is an error to whoever wants it.
        let _ = OpenCl::open(number, false);
    }
    // a driver may have begun a line
    std::io::stdout().write_all(b"\n")?;
    print_json(&json!(Answer::Found(Devices { names })))
}
