//! Runs untrusted work in a child process, this program again: chat templates and grammars with kernel limits on memory and
//! CPU time, libraries and drivers of devices that may crash or hang.

use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

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

/// Longest time of a child whose processor time is limited.
pub const LONGEST: Duration = Duration::from_secs(60);

/// Longest wait for the end of a child that was killed: one that the kernel cannot end, as in a driver's call, is left behind.
const KILLED: Duration = Duration::from_secs(1);

/// How often the end of a child is looked for, at first and later.
const STEPS: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(5)];

/// Bytes that are read at once.
const CHUNK: u64 = 4 << 10;

/// What a child may cost its parent.
#[derive(Debug, Clone, Copy)]
pub struct ChildBounds {
    /// Bytes of its output, and of its errors, that are held: the last ones.
    pub bytes: usize,
    /// Time until its end; then it is killed.
    pub time: Duration,
}

/// How a child ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit status; `None` if it was killed because its time was over.
    pub status: Option<ExitStatus>,
    /// Its standard output.
    pub output: Vec<u8>,
    /// Its standard error.
    pub errors: Vec<u8>,
}

impl Ended {
    /// Whether it says that all went well.
    pub fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }
}

/// This program, even if the executable was replaced on disk.
pub fn this_program() -> Command {
    Command::new("/proc/self/exe")
}

/// Starts a program with hidden arguments of this one, sends it `input`, and reads what it writes.
///
/// # Errors
/// The child or a thread for its pipes cannot be started.
pub fn ask(
    mut program: Command,
    args: &[&str],
    input: Vec<u8>,
    bounds: ChildBounds,
) -> std::io::Result<Ended> {
    let program = program.args(args).stdin(Stdio::piped());
    let program = program.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = program.spawn()?;
    let piped = pipes(&mut child, input, bounds.bytes).inspect_err(|_| {
        // Nobody would see what it does.
        ended(&mut child, Duration::ZERO);
    });
    let [output, errors] = piped?;
    let status = ended(&mut child, bounds.time);
    // What the child has started may hold its pipes open.
    let wait = if status.is_some() {
        bounds.time
    } else {
        KILLED
    };
    let read = |from: Written| {
        from.and_then(|from| from.recv_timeout(wait).ok())
            .unwrap_or_default()
    };
    Ok(Ended {
        status,
        output: read(output),
        errors: read(errors),
    })
}

/// What will come from a pipe of a child.
type Written = Option<Receiver<Vec<u8>>>;

/// Sends a child its input, and reads its output and its errors, in threads.
///
/// # Errors
/// A thread cannot be started.
fn pipes(child: &mut Child, input: Vec<u8>, most: usize) -> std::io::Result<[Written; 2]> {
    let output = (child.stdout.take()).map(|from| reader(from, most));
    let errors = (child.stderr.take()).map(|from| reader(from, most));
    let both = [output.transpose()?, errors.transpose()?];
    if let Some(mut to) = child.stdin.take() {
        // A write to a child that has already ended fails; its status says why.
        thread(move || _ = to.write_all(&input))?;
    }
    Ok(both)
}

/// Does some work in a thread.
fn thread(work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let thread = Builder::new().name("ember-pipe".into());
    thread.spawn(work).map(|_| ())
}

/// Reads what a child writes to its end, and holds the last `most` bytes, in a thread.
fn reader(mut from: impl Read + Send + 'static, most: usize) -> std::io::Result<Receiver<Vec<u8>>> {
    let (send, receive) = channel();
    thread(move || {
        let mut bytes = Vec::new();
        // What was read until an error counts.
        while let Ok(1..) = from.by_ref().take(CHUNK).read_to_end(&mut bytes) {
            bytes.drain(..bytes.len().saturating_sub(most));
        }
        // The receiver may be gone.
        let _ = send.send(bytes);
    })?;
    Ok(receive)
}

/// How a child ended; `None` if it was killed because its time was over.
fn ended(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let status = ends(child, limit);
    if status.is_none() {
        // It may have ended just now.
        let _ = child.kill();
        ends(child, KILLED);
    }
    status
}

/// How a child ends within a time.
fn ends(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let start = Instant::now();
    let [first, later] = STEPS;
    while start.elapsed() < limit {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(start.elapsed().clamp(first, later)),
            Ok(status) => return status,
            Err(_) => break,
        }
    }
    None
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
