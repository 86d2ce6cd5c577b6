//! What every program of this crate does around its commands.

use std::io::IsTerminal;
use std::process::ExitCode;

use crate::tell::tell;
use crate::{Failure, suggest};

/// Runs `work` with messages on standard error, more of them the higher `verbose`; an error is told
/// under the program's `name`.
pub fn run(name: &str, verbose: u8, work: impl FnOnce() -> Result<(), Failure>) -> ExitCode {
    let level = match verbose {
        0 => "warn",
        1 => "info",
        _ => "debug",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("EMBERFLOW_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        // it would tell of a full standard error by `eprintln`, which panics
        .log_internal_errors(false)
        .init();
    match known_isa().and_then(|()| work()) {
        Ok(()) => ExitCode::SUCCESS,
        // the reader of our output has gone away: nobody is left to tell
        Err(Failure::Output(e)) if e.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
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

/// Refuses an instruction set that is asked for and that this machine does not have.
fn known_isa() -> Result<(), Failure> {
    let Some(wanted) = emberflow_kernels::Cpu::ignored_override() else {
        return Ok(());
    };
    let known: Vec<&str> = (emberflow_kernels::Cpu::all().iter())
        .map(|c| c.name())
        .collect();
    Err(Failure::usage(format!(
        "EMBERFLOW_ISA asks for {wanted:?}, which this machine does not have; unset it, or take one of: {}",
        known.join(", ")
    )))
}
