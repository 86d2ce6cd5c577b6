//! The laboratory: what measures, draws, simulates and reproduces papers. Its program is
//! `cargo run --release -p emberflow-benches -- …`; what users need is the program `emberflow`.
//!
//! [`mod@bench`] measures the whole; `cargo bench -p emberflow-benches` measures one layer per file, and
//! `cargo test --release -p emberflow-benches --benches` runs each of these once, to see that it works.
//! [`synth`] writes random models, [`trace`] records and replays which neurons a text needs, [`judge`]
//! holds predictors against a text.
//!
//! [`report`] makes `benches/README.md` and the numbers of `README.md` from the CSV files below
//! `benches/results/`.
#![forbid(unsafe_code)]
// these panic when whoever reads our output has gone
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod bench;
pub mod cli;
pub mod judge;
pub mod report;
pub mod synth;
pub mod trace;

use clap::Parser;
use emberflow::Failure;

/// Runs one command.
///
/// # Errors
/// What went wrong.
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
        MeasureMachine => emberflow::machine::command(),
        Program(command) => emberflow::dispatch(*command),
    }
}

/// Runs a command given as on the command line, without the program's name, in this process.
///
/// # Errors
/// A line that is wrong, or what went wrong.
pub fn call<S: AsRef<str>>(words: &[S]) -> Result<(), Failure> {
    let line = std::iter::once("emberflow-lab").chain(words.iter().map(AsRef::as_ref));
    let cli = cli::Cli::try_parse_from(line).map_err(Failure::usage)?;
    dispatch(cli.command)
}
