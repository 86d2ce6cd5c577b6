//! A child process, this program again, first loads OpenCL and opens the device that is wanted. Where nothing is known of its
//! driver yet, the child also compiles and runs the kernels of all weight formats.
//!
//! Everything later happens in this process: a crash there ends it.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use emberflow_devices::check::check;
use emberflow_devices::{Backend, DenseShape, OpenCl, TokenScales, Verdicts, list};
use emberflow_kernels::DType;
use emberflow_models::config::{Activation, FfnKind};
use serde_json::json;

use super::answer::{Answer, Unusable, answer_of};
use crate::child::{tell_progress, this_program};
use crate::{Failure, print_json};

/// Name of the hidden command.
const COMMAND: &str = "check-opencl";

/// Longest time in which a child process loads the library, or compiles and runs a kernel.
const LIMIT: Duration = Duration::from_secs(30);

/// Maximum duration of a child process.
const TOTAL: Duration = Duration::from_secs(600);

/// Formats of weights that have kernels of their own.
const FORMATS: [DType; 6] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8,
    DType::Q4,
    DType::Q4k,
];

/// The FFN that is computed in each of [`FORMATS`].
const SHAPE: DenseShape = DenseShape {
    dtype: FORMATS[0],
    d: 64,
    kind: FfnKind {
        activation: Activation::Silu,
        relu_on_up: false,
        ungated: false,
    },
};

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
    answer_of(program, &args, [limit, TOTAL])
}

/// The hidden command: opens a device, or else the first graphics processor, and answers on a separate line.
///
/// # Errors
/// Standard output is closed.
pub fn command(number: Option<usize>) -> Result<(), Failure> {
    let gpu = || list().iter().position(|found| found.gpu);
    let number = number.or_else(gpu);
    if let Some(number) = number
        && let Ok(mut device) = OpenCl::open(number, false)
    {
        try_kernels(&mut device);
    }
    // a driver may have begun a line
    std::io::stdout().write_all(b"\n")?;
    print_json(&json!(Answer::Found(number.is_some())))
}

/// Compiles and runs kernels, unless there are verdicts on the driver, which has survived that then. What does not open or
/// computes wrong sums is an error to whoever wants it.
fn try_kernels(device: &mut OpenCl) {
    let facts = device.facts().clone();
    let known = Verdicts::here().map_or_else(Vec::new, |verdicts| verdicts.all());
    if (known.iter()).any(|of| of.device == facts.name && of.driver == facts.driver) {
        return;
    }
    for dtype in FORMATS.into_iter().filter(|&of| facts.multiplies(of)) {
        let _ = check(
            device,
            &DenseShape { dtype, ..SHAPE },
            TokenScales::of(dtype),
        );
        tell_progress();
    }
}
