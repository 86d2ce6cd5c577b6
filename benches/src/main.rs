//! The laboratory's program.
#![forbid(unsafe_code)]
// The print macros panic when the reader of a pipe has gone.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use emberflow::{program, suggest};
use emberflow_benches::{cli::Cli, dispatch};

fn main() -> ExitCode {
    let cli =
        Cli::try_parse().unwrap_or_else(|error| suggest::enrich(error, &Cli::command()).exit());
    program::run("emberflow-lab", cli.verbose, || dispatch(cli.command))
}
