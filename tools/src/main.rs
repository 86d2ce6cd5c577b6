//! The `emberflow` program.
#![forbid(unsafe_code)]
// These macros panic when the reader of the output has gone.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use emberflow::{cli::Cli, dispatch, program, suggest};

fn main() -> ExitCode {
    let cli =
        Cli::try_parse().unwrap_or_else(|error| suggest::enrich(error, &Cli::command()).exit());
    program::run("emberflow", cli.verbose, || dispatch(cli.command))
}
