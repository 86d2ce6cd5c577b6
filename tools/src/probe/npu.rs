//! A child process, this program again, first opens an NPU and compares it with the CPU. It loads the library, compiles and
//! runs the graphs of all weight formats for short rows: if that crashes or hangs, the child ends, and this process reports an
//! error.
//!
//! Graphs for a model's rows are made by such a child too, once for each build of the library and driver. Work that hangs later
//! is an error (the engine's `HostDevice`); only a driver that crashes then ends this process.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use emberflow_engine::device::check::check;
use emberflow_engine::device::{
    Backend, DenseShape, DeviceError, NpuDevice, Provider, TokenScales, WantedGraphs, list_npu,
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

/// The same of one that makes a model's graphs: less than the engine waits for them.
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
    let wanted = json!(wanted).to_string();
    let args = [COMMAND, provider.name(), &wanted];
    answer_of(program, &args, [limit, FOR_A_MODEL])
        .map_err(|Unusable { what, .. }| format!("{what}; --device none does without it"))
}

/// The hidden command: opens an NPU, and compares it with the CPU or makes the graphs that are `wanted`; prints the result on
/// a separate line.
///
/// # Errors
/// Standard output is closed.
pub fn command(provider: Provider, wanted: Option<&str>) -> Result<(), Failure> {
    let answer = match wanted {
        Some(wanted) => json!(tried_out(provider, wanted)),
        None => compared_answer(provider),
    };
    // a driver may have begun a line
    std::io::stdout().write_all(b"\n")?;
    print_json(&answer)
}

/// Makes graphs and runs them.
fn tried_out(provider: Provider, wanted: &str) -> Answer<()> {
    let wanted = serde_json::from_str(wanted).map_err(|e| e.to_string());
    let made = wanted
        .and_then(|wanted| NpuDevice::try_out(provider, wanted, tell_progress).map_err(|e| e.what));
    match made {
        Ok(()) => Answer::Found(()),
        Err(what) => Answer::Unusable(Unusable::broken(what)),
    }
}

/// The answer of an NPU that is compared with the CPU.
fn compared_answer(provider: Provider) -> serde_json::Value {
    match list_npu(provider) {
        Ok(listed) => match compared(provider) {
            Ok((formats, same_bits)) => json!(Answer::Found(Found {
                library: listed.path,
                build: listed.build,
                formats: formats.iter().map(DType::to_string).collect(),
                same_bits,
            })),
            Err(e) => json!(Answer::<Found>::Unusable(Unusable {
                cause: match listed.providers.contains(&provider) {
                    true => Cause::Broken,
                    false => Cause::Missing,
                },
                what: e.what,
            })),
        },
        Err(e) => json!({"unusable": {"cause": e.cause.name(), "what": e.what}}),
    }
}

/// Opens an NPU and compares it with the CPU in each of [`FORMATS`] that it knows; returns these, and whether all bits are
/// equal.
fn compared(provider: Provider) -> Result<(Vec<DType>, bool), DeviceError> {
    let mut device = NpuDevice::open_telling(provider, tell_progress)?;
    let facts = device.facts().clone();
    let (mut known, mut same_bits, mut first) = (Vec::new(), true, None);
    for dtype in FORMATS.into_iter().filter(|&dtype| facts.multiplies(dtype)) {
        let (shape, scales) = (DenseShape { dtype, ..SHAPE }, TokenScales::of(dtype));
        let checked = check(&mut device, &shape, scales);
        tell_progress();
        match checked {
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
