//! NPUs are opened and compared with the CPU by a child process first, this program again: a library or a driver that crashes
//! or hangs ends that process, and is an error here.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use emberflow_engine::device::check::check;
use emberflow_engine::device::{
    DenseShape, Device, DeviceChoice, DeviceError, NpuDevice, Provider, list_npu,
};
use emberflow_kernels::DType;
use emberflow_models::config::{Activation, FfnKind};
use serde::{Deserialize, Serialize};

use crate::{Failure, print_json};

/// Name of the hidden command.
const COMMAND: &str = "check-npu";

/// Longest time of a child process.
const LIMIT: Duration = Duration::from_secs(20);

/// How often its end is looked for.
const STEP: Duration = Duration::from_millis(5);

/// The FFN that is compared: every width of graphs, in a moment.
const SHAPE: DenseShape = DenseShape {
    dtype: DType::Q8,
    d: 32,
    kind: FfnKind {
        activation: Activation::Relu,
        relu_on_up: false,
        ungated: false,
    },
};

/// What a child process found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// Path of the library.
    pub library: String,
    /// Its build.
    pub build: String,
    /// Names of the providers that it has.
    pub providers: Vec<String>,
    /// Whether the provider has the CPU's bits.
    pub same_bits: bool,
}

/// Opens a device, an NPU in a child process first.
///
/// # Errors
/// No such device, or the driver's.
pub fn open(choice: DeviceChoice) -> Result<Option<Device>, DeviceError> {
    if let DeviceChoice::Npu(provider) = choice {
        probe(provider)?;
    }
    choice.open()
}

/// Has a child process open and compare an NPU.
///
/// # Errors
/// There is no library or provider that works: what to do.
pub fn probe(provider: Provider) -> Result<Found, DeviceError> {
    // Works even if the executable was replaced on disk.
    probe_by(Command::new("/proc/self/exe"), provider, LIMIT)
}

/// [`probe`] by this program, within a time.
///
/// # Errors
/// As [`probe`].
pub fn probe_by(
    mut program: Command,
    provider: Provider,
    limit: Duration,
) -> Result<Found, DeviceError> {
    let failed = |what: String| DeviceError {
        device: format!("npu:{provider}"),
        what,
    };
    let child = program.args([COMMAND, provider.name()]);
    let child = child.stdin(Stdio::null()).stdout(Stdio::piped());
    let child = child.stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|e| failed(format!("cannot start a process: {e}")))?;
    let [output, said] = [
        child.stdout.take().map(reader),
        child.stderr.take().map(reader),
    ];
    let text = |of: Option<std::sync::mpsc::Receiver<String>>| {
        of.and_then(|text| text.recv_timeout(limit).ok())
            .unwrap_or_default()
    };
    match ended(&mut child, limit) {
        None => Err(failed(format!(
            "did not answer within {} seconds: its library or driver hangs; update it, or use --device none",
            limit.as_secs()
        ))),
        Some(status) if status.success() => serde_json::from_str(&text(output))
            .map_err(|e| failed(format!("said nothing that can be read: {e}"))),
        Some(status) if status.code().is_some() => {
            let said = text(said);
            let last = said.lines().last().unwrap_or("no error message");
            Err(failed(last.trim_start_matches("emberflow: ").to_owned()))
        }
        Some(status) => Err(failed(format!(
            "its library or driver crashed ({status}): update it, or use --device none"
        ))),
    }
}

/// Reads all that a child says, in a thread: what it has started may keep the pipe open.
fn reader(mut from: impl Read + Send + 'static) -> std::sync::mpsc::Receiver<String> {
    let (send, receive) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read until then counts.
        let _ = from.read_to_end(&mut bytes);
        let _ = send.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receive
}

/// How a child ended; `None` if it had to be ended.
fn ended(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let start = Instant::now();
    while start.elapsed() < limit {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(STEP),
            Ok(status) => return status,
            Err(_) => break,
        }
    }
    // It may have ended just now.
    let _ = child.kill();
    let _ = child.wait();
    None
}

/// The hidden command: opens an NPU, compares it with the CPU, and prints what it found.
///
/// # Errors
/// As [`probe`], without the device's name.
pub fn command(provider: Provider) -> Result<(), Failure> {
    let fault = |e: DeviceError| Failure::Fault(e.what);
    let listed = list_npu().map_err(|e| Failure::Fault(e.to_string()))?;
    let mut device = NpuDevice::open(provider).map_err(fault)?;
    let verdict = check(&mut device, &SHAPE).map_err(fault)?;
    print_json(&Found {
        library: listed.path,
        build: listed.build,
        providers: listed.providers.iter().map(Provider::to_string).collect(),
        same_bits: verdict.same_bits,
    })
}
