//! Runs untrusted work in a child process of the same program: chat templates and grammars with kernel limits on memory
//! and CPU time, and drivers of devices that may crash or hang.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
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

/// Time limit of a child whose CPU time is limited.
pub const LONGEST: Duration = Duration::from_secs(60);

/// Maximum wait for a killed child to end. One that the kernel cannot end, as in a driver's call, is left behind. Also the
/// maximum time for reading the rest of a child's output.
const KILLED: Duration = Duration::from_secs(1);

/// Polling intervals: first and longest.
const STEPS: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(5)];

/// Bytes per read.
const CHUNK: usize = 16 << 10;

/// Limits on what a child costs its parent.
#[derive(Debug, Clone, Copy)]
pub struct ChildBounds {
    /// Number of last bytes kept of standard output, and of standard error.
    pub bytes: usize,
    /// Maximum time without [`PROGRESS`] before the child is killed.
    pub time: Duration,
    /// Maximum total time before the child is killed.
    pub total: Duration,
}

/// Written to standard output when a part of the work is done: a byte that no text contains.
pub const PROGRESS: u8 = 0x16;

/// Called in the child: reports that a part of the work is done.
pub fn tell_progress() {
    let mut out = std::io::stdout();
    // Ignored, because the parent may have ended.
    let _ = out.write_all(&[PROGRESS]).and_then(|()| out.flush());
}

/// How a child ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit status; `None` if the child was killed at its time limit.
    pub status: Option<ExitStatus>,
    /// Its standard output.
    pub output: Vec<u8>,
    /// Its standard error.
    pub errors: Vec<u8>,
}

impl Ended {
    /// Whether the child has succeeded.
    pub fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }
}

/// This program, even if the executable was replaced on disk.
pub fn this_program() -> Command {
    Command::new("/proc/self/exe")
}

/// Starts a program with hidden arguments of this one, sends it `input`, and reads its output until it ends. Does not wait
/// for grandchildren that hold the output open.
///
/// # Errors
/// The child cannot be started, its output cannot be read, or no thread is available for its input.
pub fn ask(
    mut program: Command,
    args: &[&str],
    input: Vec<u8>,
    bounds: ChildBounds,
) -> std::io::Result<Ended> {
    let program = program.args(args).stdin(Stdio::piped());
    let program = program.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = program.spawn()?;
    let written = followed(&mut child, input, bounds);
    let over = written.as_ref().is_ok_and(|ended| ended.status.is_some());
    if !over {
        // Ignored, because the child may have ended just now.
        let _ = child.kill();
        reap(&mut child);
    }
    written
}

/// Sends a child its input, and reads its output until it ends or reaches a time limit.
///
/// # Errors
/// As [`ask`].
fn followed(child: &mut Child, input: Vec<u8>, bounds: ChildBounds) -> std::io::Result<Ended> {
    let mut output = Pipe::new(child.stdout.take(), bounds.bytes)?;
    let mut errors = Pipe::new(child.stderr.take(), bounds.bytes)?;
    if let Some(mut to) = child.stdin.take() {
        // A write to a child that has already ended fails; its status says why.
        let thread = Builder::new().name("ember-pipe".into());
        thread.spawn(move || _ = to.write_all(&input))?;
    }
    let (start, [first, later]) = (Instant::now(), STEPS);
    let status = loop {
        let bytes = output.read() + errors.read();
        let in_time = output.progress.elapsed() < bounds.time && start.elapsed() < bounds.total;
        match child.try_wait() {
            Ok(None) if in_time => {}
            Ok(status) => break status,
            Err(_) => break None,
        }
        if bytes == 0 {
            std::thread::sleep(start.elapsed().clamp(first, later));
        }
    };
    // Output from before the end is still in the pipes.
    let end = Instant::now() + KILLED;
    while output.read() + errors.read() > 0 && Instant::now() < end {}
    Ok(Ended {
        status,
        output: output.last(),
        errors: errors.last(),
    })
}

/// A non-blocking pipe from a child.
struct Pipe<R> {
    from: Option<R>,
    /// The last bytes.
    held: Vec<u8>,
    most: usize,
    /// Time of the last [`PROGRESS`], or of opening.
    progress: Instant,
}

impl<R: Read + AsFd> Pipe<R> {
    /// Makes a pipe non-blocking. Keeps its last `most` bytes.
    ///
    /// # Errors
    /// The pipe cannot be made non-blocking.
    fn new(from: Option<R>, most: usize) -> std::io::Result<Self> {
        if let Some(from) = &from {
            fcntl_setfl(from, fcntl_getfl(from)? | OFlags::NONBLOCK)?;
        }
        Ok(Self {
            from,
            held: Vec::new(),
            most,
            progress: Instant::now(),
        })
    }

    /// Reads available bytes; returns their number, 0 if there are none now.
    fn read(&mut self) -> usize {
        let Some(from) = &mut self.from else { return 0 };
        let mut bytes = [0; CHUNK];
        let count = loop {
            match from.read(&mut bytes) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // Bytes read before an error count.
                found => break found.unwrap_or(0),
            }
        };
        if bytes[..count].contains(&PROGRESS) {
            self.progress = Instant::now();
        }
        self.held.extend_from_slice(&bytes[..count]);
        // Not after each read, because it moves all bytes.
        if self.held.len() >= self.most.max(CHUNK).saturating_mul(2) {
            self.held.drain(..self.held.len() - self.most);
        }
        count
    }

    /// The last bytes that were written.
    fn last(mut self) -> Vec<u8> {
        self.held.drain(..self.held.len().saturating_sub(self.most));
        self.held
    }
}

/// Waits for a killed child to end.
fn reap(child: &mut Child) {
    let start = Instant::now();
    while start.elapsed() < KILLED && matches!(child.try_wait(), Ok(None)) {
        std::thread::sleep(STEPS[1]);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of a shell script within a time limit.
    fn written(script: &str, bytes: usize, seconds: u64) -> Ended {
        let time = Duration::from_secs(seconds);
        let total = 5 * time;
        bounded(script, ChildBounds { bytes, time, total })
    }

    fn bounded(script: &str, bounds: ChildBounds) -> Ended {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        ask(shell, &[], b"a\nb".to_vec(), bounds).unwrap()
    }

    #[test]
    fn what_a_child_leaves_behind_is_not_waited_for() {
        let start = Instant::now();
        let ended = written("sleep 30 & echo said; echo told >&2", 1 << 10, 60);
        assert!(ended.succeeded());
        assert_eq!([&ended.output[..], &ended.errors], [b"said\n", b"told\n"]);
        // A child that keeps writing is killed too.
        let ended = written(
            "echo said; while echo; do :; done >&2 & exit 3",
            1 << 10,
            60,
        );
        assert_eq!(ended.status.and_then(|status| status.code()), Some(3));
        assert_eq!(ended.output, b"said\n");
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn the_last_bytes_of_a_long_output_are_held() {
        let script = "cat; i=0; while [ $i -lt 30000 ]; do echo $i; i=$((i+1)); done";
        let all = written(script, 1 << 20, 60);
        let text = String::from_utf8(all.output).unwrap();
        assert!(text.starts_with("a\nb0\n1\n") && text.ends_with("\n29999\n"));
        let last = written(script, 12, 60);
        assert_eq!(last.output, b"29998\n29999\n");
    }

    #[test]
    fn a_child_that_takes_too_long_is_killed() {
        let start = Instant::now();
        let ended = written("echo said; exec sleep 30", 100, 1);
        assert!(ended.status.is_none() && ended.output == b"said\n");
        let took = start.elapsed();
        assert!((1..10).contains(&took.as_secs()), "{took:?}");
    }
    #[test]
    fn progress_prolongs_the_time_up_to_a_total() {
        let script = |times| {
            format!(
                "i=0; while [ $i -lt {times} ]; do printf '\\026'; sleep 0.25; i=$((i+1)); done"
            )
        };
        let [time, total] = [2, 60].map(Duration::from_secs);
        let bounds = ChildBounds {
            bytes: 100,
            time,
            total,
        };
        let ended = bounded(&script(12), bounds);
        assert!(ended.succeeded() && ended.output == [PROGRESS; 12]);
        let start = Instant::now();
        let endless = bounded(
            &script(1000),
            ChildBounds {
                total: time,
                time: total,
                ..bounds
            },
        );
        assert!(endless.status.is_none() && start.elapsed() < Duration::from_secs(10));
        // Other output is no progress.
        let talks = bounded(&script(1000).replace("026", "040"), bounds);
        assert!(talks.status.is_none() && start.elapsed() < Duration::from_secs(20));
    }
}
