//! The laboratory: measurements, charts, simulations and reproductions of papers. Run it with
//! `cargo run --release -p emberflow-benches -- …`. The program for users is `emberflow`.
//!
//! [`mod@bench`] measures whole runs. `cargo bench -p emberflow-benches` measures one part per
//! file, and `cargo test --release -p emberflow-benches --benches` runs each of these once.
//! [`synth`] writes random models, [`trace`] records and replays which neurons a text needs,
//! [`judge`] evaluates predictors on a text, [`phone`] simulates papers about phones.
//!
//! [`report`] generates `benches/README.md` and the measured part of `README.md` from the CSV files
//! in `benches/results/`.
#![forbid(unsafe_code)]
// The print macros panic when the reader of a pipe has gone.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod bench;
pub mod cli;
pub mod judge;
pub mod phone;
pub mod report;
pub mod synth;
pub mod trace;

use clap::Parser;
use emberflow::Failure;

/// Runs one command.
///
/// # Errors
/// Any error of the command.
pub fn dispatch(command: cli::Command) -> Result<(), Failure> {
    use cli::Command::*;
    match command {
        Run(args) => emberflow::run::run(&args.into_run()),
        Synth(args) => synth::command(&args),
        Trace(command) => trace::command(&command),
        Kernels(args) => bench::kernels::command(&args),
        Cache(args) => bench::cache::command(&args),
        Predictor(args) => bench::predictor::command(&args),
        Judge(args) => judge::command(&args.into_text()),
        Decode(args) => emberflow::bench::decode::command(&args.into_decode()),
        Timeline(args) => bench::timeline::command(&args),
        Ablation(args) => bench::ablation::command(&args),
        Latency(args) => bench::latency::command(&args),
        Prefill(args) => bench::prefill::command(&args),
        Batch(args) => bench::batch::command(&args),
        Serve(args) => bench::serve::command(&args),
        Split(args) => bench::split::command(&args),
        Phone(args) => phone::command(&args),
        MeasureMachine(args) => emberflow::machine::command(&args),
        CheckNpu { provider, only } => emberflow::probe::npu::command(provider, only.as_deref()),
        CheckOpencl { number } => emberflow::probe::opencl::command(number),
        Program(command) => emberflow::dispatch(*command),
    }
}

/// Runs a command in this process, given its arguments without the program's name.
///
/// # Errors
/// An invalid command line, or an error of the command.
pub fn call<S: AsRef<str>>(words: &[S]) -> Result<(), Failure> {
    let line = std::iter::once("emberflow-lab").chain(words.iter().map(AsRef::as_ref));
    let cli = cli::Cli::try_parse_from(line).map_err(Failure::usage)?;
    dispatch(cli.command)
}
