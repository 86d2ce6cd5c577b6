//! How a model is run: options that many commands share.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use emberflow_engine::device::DeviceChoice;
use emberflow_engine::{Ablation, Budget, Sparsity};
use emberflow_models::demo::Demo;

use super::{io_names, parse_budget, parse_share, policy_names};

/// Which container.
#[derive(Debug, Clone, Args)]
pub struct ModelArg {
    /// A packed model (.ember), or a bundled one: demo (the default), demo-moe (with experts).
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
}

/// What a [`ModelArg`] names.
#[derive(Debug, Clone, Copy)]
pub enum Named<'a> {
    /// A model inside the program.
    Bundled(Demo),
    /// A file.
    File(&'a Path),
}

impl ModelArg {
    /// The model that is meant: a file of a bundled model's name goes before it.
    pub fn named(&self) -> Named<'_> {
        let Some(path) = &self.model else {
            return Named::Bundled(Demo::Dense);
        };
        let named = |demo: &Demo| path.as_os_str() == demo.name();
        match Demo::ALL.into_iter().find(named) {
            Some(demo) if !path.is_file() => Named::Bundled(demo),
            _ => Named::File(path),
        }
    }

    /// The file that is meant; `None` for a bundled model.
    pub fn file(&self) -> Option<&Path> {
        match self.named() {
            Named::Bundled(_) => None,
            Named::File(path) => Some(path),
        }
    }
}

/// How to run it.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Memory for the whole process, such as 600MiB, or `auto`. More than the machine or the control
    /// group concedes is refused, unless --force is given.
    #[arg(long, value_name = "SIZE|auto", default_value = "auto", value_parser = parse_budget,
          conflicts_with = "ffn_resident")]
    pub memory: Budget,
    /// Instead of --memory: the budget that keeps this share of the FFN in memory, 0 to 1.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub ffn_resident: Option<f64>,
    /// Compute threads; default: one per core, or fewer where that is faster.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Which neurons to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub sparsity: SparsityArg,
    /// Which mechanisms are at work: full, or a baseline with the same answers to compare with. `mmap`
    /// checks a neuron when it is first used, and not what the system drops and reads again.
    #[arg(long, value_name = "POLICY", default_value = "full", value_parser = policy_names())]
    pub policy: Ablation,
    /// Whether the experts of the next layer are read before its router has chosen them, by a guess,
    /// behind what this layer needs.
    #[arg(long, value_enum, default_value = "on")]
    pub read_ahead: ReadAheadArg,
    /// A device that holds the hottest neurons and computes them beside the processor: none, opencl or
    /// opencl:N (see doctor), cpu (the
    /// processor once more, to try it out), auto (a graphics processor, where there is one). Models without experts.
    #[arg(long, value_name = "DEVICE", default_value = "none")]
    pub device: DeviceChoice,
    /// How many bytes of neurons the device is to hold; default: as fits its speed. Memory that it
    /// shares with the processor counts in --memory.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    pub device_memory: Option<u64>,
    /// How to read from flash; sim plays a device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io_names())]
    pub io: String,
    /// Core to pin the I/O thread to; default: a strong one where cores differ, else none.
    #[arg(long, value_name = "CORE")]
    pub io_core: Option<usize>,
    /// Keep neurons from being swapped out, as far as the system allows (see doctor).
    #[arg(long)]
    pub lock: bool,
    /// Prompt tokens computed at once; default: the longest chunk that the budget can well afford.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub chunk: Option<u16>,
    /// Format of the key/value cache.
    #[arg(long, value_enum, default_value = "f16")]
    pub kv: KvArg,
    /// Where the system shows its sensors of energy; another folder is for tests.
    #[arg(long, value_name = "DIR", default_value = "/sys", hide = true)]
    pub sysfs: PathBuf,
}

/// Sparsity modes.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum SparsityArg {
    /// `predicted` where the model has predictors and they pay, else `exact` where it equals
    /// dense, else `dense`.
    Auto,
    /// Every neuron.
    Dense,
    /// Gate first, then only neurons that fire; equals dense bit for bit.
    Exact,
    /// Only neurons that a predictor names (see train-predictor); an approximation.
    Predicted,
}

impl From<SparsityArg> for Sparsity {
    fn from(arg: SparsityArg) -> Self {
        match arg {
            SparsityArg::Auto => Self::Auto,
            SparsityArg::Dense => Self::Dense,
            SparsityArg::Exact => Self::Exact,
            SparsityArg::Predicted => Self::Predicted,
        }
    }
}

/// Whether experts are read ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReadAheadArg {
    /// While most guesses are right.
    #[value(alias = "auto")]
    On,
    /// Never.
    Off,
}

/// Key/value formats.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum KvArg {
    /// 2 bytes per element.
    F16,
    /// 4 bytes per element.
    F32,
}
