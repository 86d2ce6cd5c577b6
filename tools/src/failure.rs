//! Errors of commands and their exit codes.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// An error of a command.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// From the engine.
    #[error(transparent)]
    Engine(#[from] emberflow_engine::Error),
    /// From reading or writing a container.
    #[error(transparent)]
    Storage(#[from] emberflow_storage::Error),
    /// From reading a checkpoint.
    #[error(transparent)]
    Model(#[from] emberflow_models::Error),
    /// Invalid statistics.
    #[error("{}: {source}", path.display())]
    Stats {
        /// The file.
        path: PathBuf,
        /// The message.
        source: emberflow_predictor::stats::StatsError,
    },
    /// From a device profile.
    #[error(transparent)]
    Device(#[from] emberflow_storage::profile::ProfileError),
    /// I/O error on a file named on the command line.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// I/O error.
        source: std::io::Error,
    },
    /// I/O error on standard output.
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
    /// A check failed.
    #[error("{0}")]
    Fault(String),
    /// Invalid arguments.
    #[error("{0}")]
    Usage(String),
    /// A run started by a benchmark failed.
    #[error("{0}")]
    Child(String),
    /// A hub refuses, or has nothing that runs; or there is no room for what it has.
    #[error("{0}")]
    Network(String),
    /// A hub cannot be reached, or must not be asked.
    #[error("{0}")]
    Unreachable(String),
    /// A process that this one started has failed and said why; its exit code.
    #[error("a process that this one started has failed")]
    Reported(u8),
    /// Interrupted by Ctrl-C.
    #[error("stopped")]
    Interrupted,
}

impl Failure {
    /// A usage error with this message.
    pub fn usage(message: impl ToString) -> Self {
        Self::Usage(message.to_string())
    }

    /// Adds the file's path to an I/O error.
    pub fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::File { path, source }
    }

    /// Adds the file's path to a statistics error.
    pub fn stats(path: &Path) -> impl FnOnce(emberflow_predictor::stats::StatsError) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Stats { path, source }
    }

    /// The file that does not exist, if that is the error.
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

    /// Whether stored data do not match their checksum.
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

    /// The process's exit code, as listed in `emberflow --help`.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Usage(_) => ExitCode::from(2),
            Self::Fault(_) => ExitCode::from(3),
            _ if self.is_damage() => ExitCode::from(3),
            Self::Interrupted => ExitCode::from(130),
            Self::Reported(code) => ExitCode::from(*code),
            _ => ExitCode::from(1),
        }
    }
}
