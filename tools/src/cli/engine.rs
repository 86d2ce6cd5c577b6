//! How a model is run: options that many commands share.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, ValueEnum};
use emberflow_engine::device::DeviceChoice;
use emberflow_engine::{Budget, Lab, Sparsity};
use emberflow_models::demo::Demo;

use super::{parse_budget, parse_share};
use crate::size;

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
    /// Instead of --memory: keep this share of the FFN weights in memory, 0 to 1; the others are read
    /// from flash when a token needs them.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub ffn_resident: Option<f64>,
    /// CPU threads; default: one per core, or fewer where that is faster.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Which neurons of the FFN to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub sparsity: SparsityArg,
    /// A device that holds the hottest neurons and computes them beside the CPU: none, opencl or
    /// opencl:N (see doctor), cpu (the CPU once more, to try it out), auto (a GPU, where there is
    /// one). =SIZE bounds the bytes of neurons that it holds, as in opencl=2GiB; without it, as fits
    /// its speed. Memory that it shares with the CPU counts in --memory. Not for models with experts.
    #[arg(long, value_name = "DEVICE[=SIZE]", default_value = "none")]
    pub device: DeviceArg,
    /// Lock the weights in memory, so that none is swapped out (mlock), as far as the system allows
    /// (see doctor).
    #[arg(long)]
    pub lock: bool,
    /// Format of the KV cache (the keys and values of the context).
    #[arg(long, value_enum, default_value = "f16")]
    pub kv: KvArg,
    /// What only measurements set.
    #[arg(skip)]
    pub lab: Lab,
}

/// A device, and how many bytes of neurons it may hold; `None` for as many as fit its speed.
#[derive(Debug, Clone)]
pub struct DeviceArg {
    /// The device.
    pub choice: DeviceChoice,
    /// See [`DeviceArg`].
    pub memory: Option<u64>,
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, memory) = match text.split_once('=') {
            Some((name, size)) => (name, Some(size::parse(size)?)),
            None => (text, None),
        };
        let choice = name.parse()?;
        Ok(Self { choice, memory })
    }
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

/// Key/value formats.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum KvArg {
    /// 2 bytes per element.
    F16,
    /// 4 bytes per element.
    F32,
}
