//! Setup and error handling common to all programs of this crate.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use crate::tell::tell;
use crate::{Failure, suggest};

/// Runs `work` with a logger on standard error at level `verbose`, and prints its error prefixed by the program's
/// `name`.
pub fn run(name: &str, verbose: u8, work: impl FnOnce() -> Result<(), Failure>) -> ExitCode {
    let level = match verbose {
        0 => "warn",
        1 => "info",
        _ => "debug",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("EMBERFLOW_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    // What these send and receive has tokens in it.
    let silent = ["ureq=warn", "ureq_proto=warn"].map(str::parse);
    let filter = silent
        .into_iter()
        .flatten()
        .fold(filter, |filter, quiet| filter.add_directive(quiet));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        // The default reports a full standard error with `eprintln`, which panics.
        .log_internal_errors(false)
        .init();
    let done = known_isa().and_then(|()| work());
    // Messages that drivers print at exit must not mix with this program's output.
    if std::io::stdout().flush().is_ok() {
        let _ = rustix::stdio::dup2_stdout(std::io::stderr());
    }
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has closed the pipe.
        Err(Failure::Output(e)) if e.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(failure @ Failure::Reported(_)) => failure.exit_code(),
        Err(failure) => {
            let hint = failure.missing_file().map(suggest::near_file);
            tell(format_args!(
                "{name}: {failure}{}",
                hint.unwrap_or_default()
            ));
            failure.exit_code()
        }
    }
}

/// Fails if EMBERFLOW_ISA names an instruction set that this machine does not have.
fn known_isa() -> Result<(), Failure> {
    let Some(wanted) = emberflow_kernels::Cpu::ignored_override() else {
        return Ok(());
    };
    let known: Vec<&str> = (emberflow_kernels::Cpu::all().iter())
        .map(|c| c.name())
        .collect();
    Err(Failure::usage(format!(
        "EMBERFLOW_ISA={wanted:?} is not available on this machine; unset it, or use one of: {}",
        known.join(", ")
    )))
}
