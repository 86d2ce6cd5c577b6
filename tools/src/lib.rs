//! The `emberflow` program's commands as functions.
//!
//! Each command is one file: it takes its arguments from [`cli`], does its work
//! through the library crates and writes its result to standard output.
//! Progress and warnings go to standard error.
#![forbid(unsafe_code)]
// These macros panic when the reader of the output has gone.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod activity;
pub mod atomic;
pub mod bench;
pub mod budget;
pub mod chart;
pub mod chat;
pub mod child;
pub mod chrome;
pub mod cli;
pub mod cold;
pub mod completions;
pub mod doctor;
pub mod editor;
pub mod export;
mod failure;
pub mod generation;
pub mod hub;
pub mod inspect;
pub mod inspect_predictors;
pub mod interrupt;
mod json;
pub mod machine;
pub mod man;
pub mod measure;
pub mod model;
pub mod pack;
pub mod packed;
pub mod perplexity;
pub mod plan;
#[cfg(feature = "devices")]
pub mod probe;
pub mod profile;
pub mod program;
pub mod progress;
pub mod prompt;
pub mod prune_outliers;
pub mod q4_k;
pub mod rewrite;
pub mod run;
pub mod serve;
pub mod size;
pub mod small_model;
pub mod states;
pub mod stats;
pub mod suggest;
pub mod tell;
pub mod template;
pub mod terminal;
pub mod text;
pub mod train_predictor;
pub mod verify;
pub mod windows;

pub use failure::Failure;
pub use json::print_json;

/// Runs one command.
pub fn dispatch(mut command: cli::Command) -> Result<(), Failure> {
    hub::localize(&mut command)?;
    match command {
        cli::Command::Run(args) => run::run(&args),
        cli::Command::Serve(args) => serve::command(args),
        cli::Command::Pull(args) => hub::pull(&args),
        cli::Command::List(args) => hub::list(&args),
        cli::Command::Remove(args) => hub::remove(&args),
        cli::Command::Pack(args) => pack::command(&args),
        cli::Command::Inspect(args) => inspect::command(&args),
        cli::Command::Verify(args) => verify::command(&args),
        cli::Command::Perplexity(args) => perplexity::command(&args),
        cli::Command::Profile(args) => profile::command(&args),
        cli::Command::TrainPredictor(args) => train_predictor::command(&args),
        cli::Command::PruneOutliers(args) => prune_outliers::command(&args),
        cli::Command::Export(args) => export::command(&args),
        cli::Command::Plan(args) => plan::command(&args),
        cli::Command::Bench(command) => bench::command(&command),
        cli::Command::Doctor(args) => doctor::command(&args),
        cli::Command::Completions(args) => completions::command(&args),
        cli::Command::Man(args) => man::command(&args),
        cli::Command::RenderTemplate => template::command(),
        cli::Command::CheckGrammar => serve::check_grammar(),
        cli::Command::Point(args) => run::run(&args.into_run()),
        cli::Command::MeasureMachine(args) => machine::command(&args),
        #[cfg(feature = "devices")]
        cli::Command::CheckNpu { provider, only } => probe::npu::command(provider, only.as_deref()),
        #[cfg(feature = "devices")]
        cli::Command::CheckOpencl { number } => probe::opencl::command(number),
    }
}
