//! Options that all commands share that run a model.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use emberflow_engine::{Budget, Lab, Sparsity, Speculation};
use emberflow_kernels::DType;
use emberflow_models::demo::Demo;

use super::{DeviceArg, parse_budget, parse_share, parse_speculation};

/// The model argument.
#[derive(Debug, Clone, Args)]
pub struct ModelArg {
    /// A packed model (.ember), a checkpoint (GGUF, .safetensors, a Hugging Face folder), a model's name (OWNER/NAME or
    /// OWNER/NAME:FILE, see pull), or a bundled model: demo (the default) or demo-moe (mixture of experts).
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
    /// The model. A file with the name of a bundled model takes precedence.
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

    /// The model's `config.json`, if that is what is named.
    pub fn description(&self) -> Option<&Path> {
        let is_json = |path: &&Path| path.extension().is_some_and(|ending| ending == "json");
        self.file().filter(is_json)
    }

    /// The model's file; `None` for a bundled model.
    pub fn file(&self) -> Option<&Path> {
        match self.named() {
            Named::Bundled(_) => None,
            Named::File(path) => Some(path),
        }
    }
}

/// How to run the model.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Memory budget of the whole process, such as 600MiB, or `auto`. A budget above what the machine or
    /// the control group has is an error without --force.
    #[arg(long, value_name = "SIZE|auto", default_value = "auto", value_parser = parse_budget,
          conflicts_with = "ffn_resident")]
    pub memory: Budget,
    /// Instead of --memory: share of the FFN weights to keep in memory, 0 to 1. The others are read from
    /// disk when a token needs them.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub ffn_resident: Option<f64>,
    /// CPU threads; default: one per core, or fewer if that is faster.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Which FFN neurons to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub sparsity: SparsityArg,
    /// Devices that hold and compute the hottest neurons: none, opencl or opencl:N (see doctor), npu or
    /// npu:PROVIDER (by ONNX Runtime: openvino, qnn, coreml, cpu), cpu (a second CPU backend, for tests), auto
    /// (a GPU if there is one); several with commas, as in opencl,npu. =SIZE limits their memory, as in opencl=2GiB; the
    /// default follows their speed. Memory shared with the CPU counts towards --memory.
    /// Experts are computed there only if SIZE is given.
    #[arg(long, value_name = "DEVICE[,DEVICE...][=SIZE]", default_value = "none")]
    pub device: DeviceArg,
    /// Lock the weights in memory (mlock), as far as the system allows (see doctor).
    #[arg(long)]
    pub lock: bool,
    /// Data type of the KV cache.
    #[arg(long, value_enum, default_value = "f16")]
    pub kv: KvArg,
    /// Options of the laboratory.
    #[arg(skip)]
    pub lab: Lab,
}

/// Guesses of next tokens.
#[derive(Debug, Clone, Args)]
pub struct DraftArgs {
    /// Guesses of the next tokens that the model checks in one pass (speculative decoding): auto (as many as pay), off,
    /// ngram (only from the text itself), memory (only of the model, computing what is in memory), heads (only of the model's
    /// head for multi-token prediction), model (only of --draft), or N in every pass. The text stays the same.
    #[arg(long, value_name = "auto|off|ngram|memory|heads|model|N", default_value = "auto", value_parser = parse_speculation)]
    pub speculate: Speculation,
    /// A small model with the same tokens, such as the smallest of the model's family, whose guesses are checked, or a file
    /// with the model's head for multi-token prediction (mtp-NAME.gguf). It is held in memory, within --memory.
    #[arg(long, value_name = "MODEL")]
    pub draft: Option<PathBuf>,
}

impl DraftArgs {
    /// No guesses.
    pub const OFF: Self = Self {
        speculate: Speculation::OFF,
        draft: None,
    };
}

/// Sparsity modes.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum SparsityArg {
    /// `predicted` if the model has predictors that make it faster, else `exact` if activations have
    /// exact zeros, else `dense`.
    Auto,
    /// All neurons.
    Dense,
    /// Gate first, then only active neurons; bit-identical to dense.
    Exact,
    /// Only neurons predicted to be active (see train-predictor); an approximation.
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

impl From<KvArg> for DType {
    fn from(arg: KvArg) -> Self {
        match arg {
            KvArg::F16 => Self::F16,
            KvArg::F32 => Self::F32,
        }
    }
}

/// Data types of the KV cache.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum KvArg {
    /// 2 bytes per element.
    F16,
    /// 4 bytes per element.
    F32,
}
