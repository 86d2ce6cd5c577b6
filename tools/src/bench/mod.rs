//! `emberflow bench`: one command per claim.
//!
//! The commands on parts (`io`, `device`, `kernels`, `cache`, `predictor`, `decode`, `timeline`, `serve`)
//! measure in this process. Those on
//! whole runs (`sweep`, `ablation`, `latency`, `prefill`, `batch`) start this program again for
//! every point, so that budget, peak memory and page cache are that point's own, let the variants
//! take turns, and end with a fault where two variants differ in a single bit of the logits.

pub mod ablation;
pub mod batch;
mod bound;
pub mod cache;
mod cap;
mod child;
pub mod decode;
pub mod device;
mod facts;
pub mod io;
pub mod kernels;
pub mod latency;
mod output;
mod paper;
mod points;
pub mod predictor;
pub mod prefill;
mod rounds;
pub mod serve;
mod split;
pub mod sweep;
pub mod timeline;

use crate::Failure;
use crate::cli::BenchCommand;

/// Runs one of the commands.
pub fn command(command: &BenchCommand) -> Result<(), Failure> {
    match command {
        BenchCommand::Io(args) => io::command(args),
        BenchCommand::Device(args) => device::command(args),
        BenchCommand::Kernels(args) => kernels::command(args),
        BenchCommand::Cache(args) => cache::command(args),
        BenchCommand::Predictor(args) => predictor::command(args),
        BenchCommand::Decode(args) => decode::command(args),
        BenchCommand::Timeline(args) => timeline::command(args),
        BenchCommand::Sweep(args) => sweep::command(args),
        BenchCommand::Ablation(args) => ablation::command(args),
        BenchCommand::Latency(args) => latency::command(args),
        BenchCommand::Prefill(args) => prefill::command(args),
        BenchCommand::Batch(args) => batch::command(args),
        BenchCommand::Serve(args) => serve::command(args),
        BenchCommand::Split(args) => split::command(args),
    }
}
