//! `emberflow man`: the manual, made from the help texts.

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
    // the first of the pages stands for all
    atomic::may_write_below(&folder.join("emberflow.1"), args.force, &[])?;
    std::fs::create_dir_all(folder).map_err(Failure::file(folder))?;
    clap_mangen::generate_to(Cli::command(), folder).map_err(Failure::file(folder))?;
    Ok(writeln!(
        out,
        "wrote the pages of all commands to {}",
        folder.display()
    )?)
}
