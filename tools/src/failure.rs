//! How a command can fail, and the exit code that tells it.

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
