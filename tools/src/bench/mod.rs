//! `emberflow bench`: how fast the disk, the machine and a model on it are.
//!
//! `io` and `decode` measure in this process. `sweep` starts this program again for every point, so
//! that budget, peak memory and page cache are that point's own, lets the variants take turns, and
//! ends with a fault where two variants differ in a single bit of the logits. The laboratory's
//! benchmarks (`benches/src/bench/`) are built from the same parts.

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
