//! `emberflow bench`: speed of disk, CPU, memory and models.
//!
//! `io` and `decode` measure in this process. `sweep` runs every point in a child process, so that budget, peak
//! memory and page cache are separate, interleaves the variants, and fails if two variants differ in any bit of the
//! logits. The laboratory's benchmarks (`benches/src/bench/`) use the same modules.

pub mod bound;
pub mod cap;
pub mod child;
pub mod decode;
pub mod facts;
pub mod io;
pub mod output;
pub mod points;
pub mod rounds;
pub mod sweep;

use crate::Failure;
use crate::cli::BenchCommand;

/// Runs one of the commands.
pub fn command(command: &BenchCommand) -> Result<(), Failure> {
    match command {
        BenchCommand::Io(args) => io::command(args),
        BenchCommand::Decode(args) => decode::command(args),
        BenchCommand::Sweep(args) => sweep::command(args),
    }
}
