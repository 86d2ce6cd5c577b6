//! The `emberflow` program.
#![forbid(unsafe_code)]
// these panic when whoever reads our output has gone
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use emberflow::tell::tell;
use emberflow::{Failure, cli::Cli, dispatch, suggest};

fn main() -> ExitCode {
    let cli =
        Cli::try_parse().unwrap_or_else(|error| suggest::enrich(error, &Cli::command()).exit());
    let level = match cli.verbose {
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
    match dispatch(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        // the reader of our output has gone away: nobody is left to tell
        Err(Failure::Output(e)) if e.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(failure) => {
            let hint = failure.missing_file().map(suggest::near_file);
            tell(format_args!(
                "emberflow: {failure}{}",
                hint.unwrap_or_default()
            ));
            failure.exit_code()
        }
    }
}
