//! The `emberflow` program's commands as functions.
//!
//! Each command is one file: it takes its arguments from [`cli`], does its work
//! through the library crates and writes its result to standard output.
//! Progress and warnings go to standard error.
#![forbid(unsafe_code)]
// these panic when whoever reads our output has gone
#![deny(clippy::print_stdout)]

pub mod atomic;
pub mod bench;
pub mod budget;
pub mod chart;
pub mod chrome;
pub mod cli;
mod cold;
pub mod completions;
pub mod doctor;
pub mod export;
pub mod inspect;
pub mod inspect_predictors;
pub mod interrupt;
pub mod man;
pub mod measure;
pub mod model;
pub mod pack;
pub mod packed;
pub mod perplexity;
pub mod plan;
pub mod profile;
pub mod progress;
pub mod prompt;
pub mod run;
pub mod size;
pub mod stats;
pub mod suggest;
pub mod synth;
pub mod trace;
pub mod train_predictor;
pub mod verify;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// How a command can fail.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The engine.
    #[error(transparent)]
    Engine(#[from] emberflow_engine::Error),
    /// A container.
    #[error(transparent)]
    Storage(#[from] emberflow_storage::Error),
    /// A checkpoint.
    #[error(transparent)]
    Model(#[from] emberflow_models::Error),
    /// Statistics, and the file that they are in.
    #[error("{}: {source}", path.display())]
    Stats {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: emberflow_predictor::stats::StatsError,
    },
    /// A device profile.
    #[error(transparent)]
    Device(#[from] emberflow_storage::profile::ProfileError),
    /// A file of the command line.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Standard output.
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
    /// A check found a fault.
    #[error("{0}")]
    Fault(String),
    /// Arguments that do not make sense together.
    #[error("{0}")]
    Usage(String),
    /// A run of this program that a benchmark started.
    #[error("{0}")]
    Child(String),
    /// Stopped by Ctrl-C.
    #[error("stopped")]
    Interrupted,
}

impl Failure {
    /// A usage error from any message.
    pub fn usage(message: impl ToString) -> Self {
        Self::Usage(message.to_string())
    }

    /// Wraps an I/O error with the file it belongs to.
    pub fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::File { path, source }
    }

    /// Wraps what is wrong with statistics with the file that they are in.
    pub fn stats(path: &Path) -> impl FnOnce(emberflow_predictor::stats::StatsError) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Stats { path, source }
    }

    /// The file that was not there, where that is the failure.
    pub fn missing_file(&self) -> Option<&Path> {
        use emberflow_engine::Error as Engine;
        use emberflow_models::Error as Model;
        use emberflow_storage::Error as Storage;
        use emberflow_storage::profile::ProfileError as Device;
        let (path, source) = match self {
            Self::File { path, source }
            | Self::Storage(Storage::File { path, source, .. })
            | Self::Engine(Engine::Storage(Storage::File { path, source, .. }))
            | Self::Model(Model::Io { path, source, .. })
            | Self::Engine(Engine::Model(Model::Io { path, source, .. }))
            | Self::Device(Device::File { path, source }) => (path, source),
            _ => return None,
        };
        (source.kind() == std::io::ErrorKind::NotFound).then_some(path)
    }

    /// Whether stored data are not what their checksum says.
    fn is_damage(&self) -> bool {
        use emberflow_engine::Error as Engine;
        use emberflow_storage::Error as Storage;
        let (Self::Storage(error) | Self::Engine(Engine::Storage(error))) = self else {
            return false;
        };
        matches!(
            error,
            Storage::SuperblockChecksum { .. }
                | Storage::SectionChecksum { .. }
                | Storage::TensorChecksum { .. }
                | Storage::BundleChecksum { .. }
                | Storage::ScalesChecksum { .. }
                | Storage::Truncated { .. }
        )
    }

    /// The process's exit code (listed in `emberflow --help`).
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Usage(_) => ExitCode::from(2),
            Self::Fault(_) => ExitCode::from(3),
            _ if self.is_damage() => ExitCode::from(3),
            Self::Interrupted => ExitCode::from(130),
            _ => ExitCode::from(1),
        }
    }
}

/// Runs one command.
pub fn dispatch(command: cli::Command) -> Result<(), Failure> {
    if let Some(wanted) = emberflow_kernels::Cpu::ignored_override() {
        let known: Vec<&str> = emberflow_kernels::Cpu::all()
            .iter()
            .map(|c| c.name())
            .collect();
        return Err(Failure::usage(format!(
            "EMBERFLOW_ISA asks for {wanted:?}, which this machine does not have; unset it, or take one of: {}",
            known.join(", ")
        )));
    }
    match command {
        cli::Command::Run(args) => run::run(&args),
        cli::Command::Pack(args) => pack::command(&args),
        cli::Command::Inspect(args) => inspect::command(&args),
        cli::Command::Verify(args) => verify::command(&args),
        cli::Command::Perplexity(args) => perplexity::command(&args),
        cli::Command::Profile(args) => profile::command(&args),
        cli::Command::Trace(command) => trace::command(&command),
        cli::Command::TrainPredictor(args) => train_predictor::command(&args),
        cli::Command::Export(args) => export::command(&args),
        cli::Command::Synth(args) => synth::command(&args),
        cli::Command::Plan(args) => plan::command(&args),
        cli::Command::Bench(command) => bench::command(&command),
        cli::Command::Doctor(args) => doctor::command(&args),
        cli::Command::Completions(args) => completions::command(&args),
        cli::Command::Man(args) => man::command(&args),
    }
}

/// Prints a value as one line of JSON.
pub fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, value).map_err(std::io::Error::from)?;
    writeln!(out)?;
    Ok(())
}
