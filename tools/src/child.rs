//! Work that may cost anything, in a process of its own: this program, started again within limits that
//! the kernel keeps.

use std::io::{Read, Write};
use std::process::{Command, ExitStatus, Stdio};

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::Failure;

/// What a child may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of memory.
    pub memory: u64,
    /// Seconds of processor time.
    pub seconds: u64,
}

/// What came of a child.
#[derive(Debug)]
pub struct Ended {
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote.
    pub output: Vec<u8>,
}

/// Starts a command of this program, sends the input, then takes at most `most` bytes of output.
///
/// # Errors
/// A child that cannot be started, or spoken to.
pub fn ask(command: &str, input: &[u8], most: u64) -> std::io::Result<Ended> {
    // Also after the file was replaced by a newer version.
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
    // A child that ended early says why.
    match sent {
        Some(Err(e)) if status.success() => Err(e),
        _ => Ok(Ended { status, output }),
    }
}

/// In the child: reads the input, then keeps to the limits for it.
///
/// # Errors
/// Standard input that fails, limits that cannot be set.
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

/// Standard input that says something else than expected.
pub fn failure(e: std::io::Error) -> Failure {
    Failure::usage(format!("standard input: {e}"))
}
