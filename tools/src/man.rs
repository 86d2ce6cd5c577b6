//! `emberflow man`: manual pages generated from the help texts.

use std::io::Write;

use clap::CommandFactory;

use crate::Failure;
use crate::atomic;
use crate::cli::{Cli, ManArgs};

/// Runs the command.
pub fn command(args: &ManArgs) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let Some(folder) = &args.out else {
        return Ok(clap_mangen::Man::new(Cli::command()).render(&mut out)?);
    };
    // The first page stands for all of them.
    atomic::may_write_below(&folder.join("emberflow.1"), args.force, &[])?;
    std::fs::create_dir_all(folder).map_err(Failure::file(folder))?;
    clap_mangen::generate_to(Cli::command(), folder).map_err(Failure::file(folder))?;
    Ok(writeln!(
        out,
        "wrote the manual pages of all commands to {}",
        folder.display()
    )?)
}
