//! A child process, this program again, first opens an NPU and compares it with the CPU. It loads the library, compiles and
//! runs the graphs of all weight formats for short rows: if that crashes or hangs, the child ends, and this process reports an
//! error.
//!
//! Everything later happens in this process. Graphs for a model's rows that do not compile in time, and work that hangs, are
//! errors (the engine's `HostDevice`); only a driver that crashes then ends this process.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use emberflow_engine::device::check::check;
use emberflow_engine::device::{
    Backend, DenseShape, Device, DeviceChoice, DeviceError, NpuDevice, Provider, TokenScales,
    list_npu,
};
use emberflow_kernels::DType;
use emberflow_models::config::{Activation, FfnKind};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::child::{ChildBounds, ask, this_program};
use crate::{Failure, print_json};

/// Name of the hidden command.
const COMMAND: &str = "check-npu";

/// Maximum duration of a child process.
const LIMIT: Duration = Duration::from_secs(30);

/// Number of bytes of a child's output that are stored.
const BYTES: usize = 64 << 10;

/// Formats of weights that have graphs of their own.
const FORMATS: [DType; 5] = [DType::Q8, DType::Q8c, DType::Q4, DType::Q4c, DType::Q4k];

/// The FFN for the comparison, in each of [`FORMATS`]: every width of graphs, on short rows.
const SHAPE: DenseShape = DenseShape {
    dtype: FORMATS[0],
    d: 32,
    kind: FfnKind {
        activation: Activation::Relu,
        relu_on_up: false,
        ungated: false,
    },
};

/// Result of a child process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// Path of the library.
    pub library: String,
    /// Its build.
    pub build: String,
    /// Names of its providers.
    pub providers: Vec<String>,
    /// Formats of weights that the provider knows.
    pub formats: Vec<String>,
    /// Whether the provider's results have the CPU's bits.
    pub same_bits: bool,
}

/// Cause of an NPU failure: the engine's causes, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// No library was found.
    Missing,
    /// This program is statically linked and cannot load libraries.
    Static,
    /// A library, a provider or a driver is unusable, or fails.
    Broken,
}

/// An NPU that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unusable {
    /// Cause.
    pub cause: Cause,
    /// What failed, with a remedy.
    pub what: String,
}

impl Unusable {
    fn broken(what: impl Into<String>) -> Self {
        let (cause, what) = (Cause::Broken, what.into());
        Self { cause, what }
    }
}

/// The line of JSON printed by a child process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Found(Found),
    Unusable(Unusable),
}

/// Opens a device; an NPU first in a child process.
///
/// # Errors
/// No such device, or an error of the driver.
pub fn open(choice: DeviceChoice) -> Result<Option<Device>, DeviceError> {
    if let DeviceChoice::Npu(provider) = choice {
        probe(provider).map_err(|Unusable { what, .. }| DeviceError {
            device: format!("npu:{provider}"),
            what,
        })?;
    }
    choice.open()
}

/// Opens an NPU in a child process and compares it with the CPU.
///
/// # Errors
/// No working library or provider, with a remedy.
pub fn probe(provider: Provider) -> Result<Found, Unusable> {
    probe_by(this_program(), provider, LIMIT)
}

/// [`probe`] by this program, with a time limit.
///
/// # Errors
/// As [`probe`].
pub fn probe_by(program: Command, provider: Provider, limit: Duration) -> Result<Found, Unusable> {
    let bounds = ChildBounds {
        bytes: BYTES,
        time: limit,
    };
    let ended = ask(program, &[COMMAND, provider.name()], Vec::new(), bounds);
    let ended = ended.map_err(|e| Unusable::broken(format!("cannot start a process: {e}")))?;
    let [output, errors] =
        [&ended.output, &ended.errors].map(|bytes| String::from_utf8_lossy(bytes));
    match ended.status {
        None => Err(Unusable::broken(format!(
            "did not answer within {} seconds: its library or driver hangs; update it, or use --device none",
            limit.as_secs()
        ))),
        Some(status) if status.success() => match answer(&output) {
            Some(Answer::Found(found)) => Ok(found),
            Some(Answer::Unusable(unusable)) => Err(unusable),
            None => Err(Unusable::broken("ended without an answer")),
        },
        Some(status) if status.code().is_some() => Err(Unusable::broken(error(&errors))),
        Some(status) => Err(Unusable::broken(format!(
            "its library or driver crashed ({status}): update it, or use --device none"
        ))),
    }
}

/// The last line with a result: libraries and drivers also print lines, some only at the end.
fn answer(output: &str) -> Option<Answer> {
    let mut lines = output.lines().rev();
    lines.find_map(|line| serde_json::from_str(line).ok())
}

/// The message of a panic, or else the last line.
fn error(text: &str) -> String {
    let panic = text
        .lines()
        .skip_while(|line| !line.contains(" panicked at "));
    let message = panic
        .skip(1)
        .take_while(|line| !line.starts_with("note: ") && !line.starts_with("stack backtrace:"));
    let message: Vec<&str> = message.collect();
    if !message.is_empty() {
        return message.join(" ");
    }
    let last = text.lines().last().unwrap_or("no error message");
    last.trim_start_matches("emberflow: ").to_owned()
}

/// The hidden command: opens an NPU, compares it with the CPU, and prints the result on a separate line.
///
/// # Errors
/// Standard output is closed.
pub fn command(provider: Provider) -> Result<(), Failure> {
    let answer = match list_npu() {
        Ok(listed) => match compared(provider) {
            Ok((formats, same_bits)) => json!(Answer::Found(Found {
                library: listed.path,
                build: listed.build,
                providers: listed.providers.iter().map(Provider::to_string).collect(),
                formats: formats.iter().map(DType::to_string).collect(),
                same_bits,
            })),
            Err(e) => json!(Answer::Unusable(Unusable::broken(e.what))),
        },
        Err(e) => json!({"unusable": {"cause": e.cause.name(), "what": e.what}}),
    };
    // a driver may have begun a line
    std::io::stdout().write_all(b"\n")?;
    print_json(&answer)
}

/// Opens an NPU and compares it with the CPU in each of [`FORMATS`] that it knows; returns these, and whether all bits are
/// equal.
fn compared(provider: Provider) -> Result<(Vec<DType>, bool), DeviceError> {
    let mut device = NpuDevice::open(provider)?;
    let facts = device.facts().clone();
    let (mut known, mut same_bits, mut first) = (Vec::new(), true, None);
    for dtype in FORMATS.into_iter().filter(|&dtype| facts.multiplies(dtype)) {
        let (shape, scales) = (DenseShape { dtype, ..SHAPE }, TokenScales::of(dtype));
        match check(&mut device, &shape, scales) {
            Ok(verdict) => {
                known.push(dtype);
                same_bits &= verdict.same_bits;
            }
            // A format that it does not take; one is enough.
            Err(e) => first = first.or(Some(e)),
        }
    }
    match first.filter(|_| known.is_empty()) {
        Some(e) => Err(e),
        None => Ok((known, same_bits)),
    }
}
