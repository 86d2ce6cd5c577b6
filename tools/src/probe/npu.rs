//! A child process, this program again, first loads an NPU's library and opens it: if that crashes or hangs, the child ends,
//! and this process reports an error. Another one makes and runs the graphs for a model's rows, once for each build of the
//! library and driver. `doctor` has one compare small graphs of all weight formats with the CPU.
//!
//! Work that hangs later is an error (the engine's `HostDevice`); only a driver that crashes then ends this process.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use emberflow_devices::check::check;
use emberflow_devices::{
    Backend, DenseShape, DeviceError, NpuDevice, NpuLibrary, Provider, TokenScales, WantedGraphs,
    list_npu,
};
use emberflow_kernels::DType;
use emberflow_models::config::{Activation, FfnKind};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::answer::{Answer, Cause, Unusable, answer_of};
use crate::child::{tell_progress, this_program};
use crate::{Failure, print_json};

/// Name of the hidden command.
const COMMAND: &str = "check-npu";

/// Longest time in which a child process loads the library, or compiles, runs or compares a graph.
const LIMIT: Duration = Duration::from_secs(30);

/// Maximum duration of a child process that makes progress: a device may take two minutes for the graphs of each of five
/// formats.
const TOTAL: Duration = Duration::from_secs(600);

/// The same of one that makes a model's graphs: less than the engine waits for its answer.
const FOR_A_MODEL: Duration = Duration::from_secs(100);

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
    /// Formats of weights that the provider knows.
    pub formats: Vec<String>,
    /// Whether the provider's results have the CPU's bits.
    pub same_bits: bool,
}

/// What a child process does in place of a comparison.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Only {
    /// Opens the provider.
    Open,
    /// Makes and runs graphs.
    Graphs(WantedGraphs),
}

/// Opens an NPU in a child process.
///
/// # Errors
/// No working library or provider, with a remedy.
pub fn open(provider: Provider) -> Result<(), Unusable> {
    only(this_program(), provider, Only::Open, [LIMIT; 2])
}

/// Opens an NPU in a child process and compares it with the CPU.
///
/// # Errors
/// No working library or provider, with a remedy.
pub fn probe(provider: Provider) -> Result<Found, Unusable> {
    probe_by(this_program(), provider, LIMIT)
}

/// [`probe`] by this program, with a limit of the time without progress.
///
/// # Errors
/// As [`probe`].
pub fn probe_by(program: Command, provider: Provider, limit: Duration) -> Result<Found, Unusable> {
    answer_of(program, &[COMMAND, provider.name()], [limit, TOTAL])
}

/// Has a child process make and run graphs for a model's rows.
///
/// # Errors
/// The provider does not take them, crashes or hangs.
pub fn try_out(provider: Provider, wanted: WantedGraphs) -> Result<(), String> {
    try_out_by(this_program(), provider, wanted, LIMIT)
}

/// [`try_out`] by this program, with a limit of the time without progress.
///
/// # Errors
/// As [`try_out`].
pub fn try_out_by(
    program: Command,
    provider: Provider,
    wanted: WantedGraphs,
    limit: Duration,
) -> Result<(), String> {
    only(
        program,
        provider,
        Only::Graphs(wanted),
        [limit, FOR_A_MODEL],
    )
    .map_err(|Unusable { what, .. }| what)
}

/// Has a child process do this.
fn only(
    program: Command,
    provider: Provider,
    only: Only,
    limits: [Duration; 2],
) -> Result<(), Unusable> {
    let only = json!(only).to_string();
    answer_of(program, &[COMMAND, provider.name(), &only], limits)
}

/// The hidden command: compares an NPU with the CPU, or does `only` this, and prints the result on a separate line.
///
/// # Errors
/// Standard output is closed.
pub fn command(provider: Provider, only: Option<&str>) -> Result<(), Failure> {
    let only = only.map(serde_json::from_str).transpose();
    let answer = match only.map_err(|e| Failure::usage(e.to_string()))? {
        None => answer(provider, |library| compared(provider, library)),
        Some(Only::Open) => answer(provider, |_| NpuDevice::open(provider).map(|_| ())),
        Some(Only::Graphs(wanted)) => answer(provider, |_| {
            NpuDevice::try_out(provider, wanted, tell_progress)
        }),
    };
    // a driver may have begun a line
    std::io::stdout().write_all(b"\n")?;
    print_json(&answer)
}

/// The answer of a provider, if there is a library.
fn answer<T: Serialize>(
    provider: Provider,
    of: impl FnOnce(&NpuLibrary) -> Result<T, DeviceError>,
) -> serde_json::Value {
    match list_npu(provider) {
        Ok(library) => json!(match of(&library) {
            Ok(found) => Answer::Found(found),
            Err(e) => Answer::Unusable(Unusable {
                cause: match library.has_provider {
                    true => Cause::Broken,
                    false => Cause::Missing,
                },
                what: e.what,
            }),
        }),
        Err(e) => json!({"unusable": {"cause": e.cause.name(), "what": e.what}}),
    }
}

/// Opens an NPU and compares it with the CPU in each of [`FORMATS`] that it knows.
fn compared(provider: Provider, library: &NpuLibrary) -> Result<Found, DeviceError> {
    let mut device = NpuDevice::open_telling(provider, tell_progress)?;
    let facts = device.facts().clone();
    let (mut formats, mut same_bits, mut first) = (Vec::new(), true, None);
    for dtype in FORMATS.into_iter().filter(|&dtype| facts.multiplies(dtype)) {
        let (shape, scales) = (DenseShape { dtype, ..SHAPE }, TokenScales::of(dtype));
        let checked = check(&mut device, &shape, scales);
        tell_progress();
        match checked {
            Ok(verdict) => {
                formats.push(dtype.to_string());
                same_bits &= verdict.same_bits;
            }
            // A format that it does not take; one is enough.
            Err(e) => first = first.or(Some(e)),
        }
    }
    match first.filter(|_| formats.is_empty()) {
        Some(e) => Err(e),
        None => Ok(Found {
            library: library.path.clone(),
            build: library.build.clone(),
            formats,
            same_bits,
        }),
    }
}
