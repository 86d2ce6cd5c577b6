//! `emberflow completions`: shell completion scripts.

use std::io::Write;

use clap::CommandFactory;

use crate::Failure;
use crate::cli::{Cli, CompletionsArgs};

/// Runs the command.
pub fn command(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "emberflow", &mut script);
    Ok(std::io::stdout().lock().write_all(&script)?)
}
