//! Runs untrusted work (chat templates, grammars) in a child process: this program again, with kernel limits on
//! memory and CPU time.

use std::io::{Read, Write};
use std::process::{Command, ExitStatus, Stdio};

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::Failure;

/// Resource limits of a child.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of memory.
    pub memory: u64,
    /// Seconds of processor time.
    pub seconds: u64,
}

/// How a child ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit status.
    pub status: ExitStatus,
    /// Its standard output.
    pub output: Vec<u8>,
}

/// Starts a hidden command of this program, sends it `input` and reads at most `most` bytes of its output.
///
/// # Errors
/// The child cannot be started, or a pipe fails.
pub fn ask(command: &str, input: &[u8], most: u64) -> std::io::Result<Ended> {
    // Works even if the executable was replaced on disk.
    let mut child = Command::new("/proc/self/exe")
        .arg(command)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let sent = child.stdin.take().map(|mut to| to.write_all(input));
    let mut output = Vec::new();
    if let Some(from) = &mut child.stdout {
        from.take(most).read_to_end(&mut output)?;
    }
    let status = child.wait()?;
    // A write to a child that has already ended fails; its status says why.
    match sent {
        Some(Err(e)) if status.success() => Err(e),
        _ => Ok(Ended { status, output }),
    }
}

/// Called in the child: reads standard input, then sets the limits computed from its length.
///
/// # Errors
/// Standard input cannot be read, or the limits cannot be set.
pub fn begin(limits: impl FnOnce(u64) -> Limits) -> Result<Vec<u8>, Failure> {
    let mut input = Vec::new();
    std::io::stdin().read_to_end(&mut input).map_err(failure)?;
    let Limits { memory, seconds } = limits(input.len() as u64);
    for (resource, most) in [
        (Resource::Data, memory),
        (Resource::Cpu, seconds),
        (Resource::Core, 0),
    ] {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(resource, limit).map_err(|e| failure(e.into()))?;
    }
    Ok(input)
}

/// A usage error for malformed standard input.
pub fn failure(e: std::io::Error) -> Failure {
    Failure::usage(format!("standard input: {e}"))
}
