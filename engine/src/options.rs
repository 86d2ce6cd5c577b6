//! What the caller of [`crate::Engine::open`] chooses.

use std::path::PathBuf;

use emberflow_kernels::DType;

use crate::ablation::Ablation;

/// Which neurons are computed (DESIGN §6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sparsity {
    /// `predicted` where the container has predictors and they pay, else `exact` where
    /// the activation makes it equal to dense, else `dense`.
    #[default]
    Auto,
    /// Every neuron.
    Dense,
    /// Gate first, then Up and Down only of neurons that fire.
    Exact,
    /// A predictor names the neurons whose Gate is computed; then as `exact`. What it
    /// misses is missing from the result.
    Predicted,
}

impl Sparsity {
    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Dense => "dense",
            Self::Exact => "exact",
            Self::Predicted => "predicted",
        }
    }
}

/// How the FFN's weights get into memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// As much as the machine can safely give.
    Auto,
    /// At most this many bytes of resident memory for the whole process.
    Bytes(u64),
    /// What it takes to keep this share (0 to 1) of the FFN's bytes in memory;
    /// never below the smallest budget that works.
    FfnShare(f64),
}

/// How a neuron whose gate is not resident is read (PowerInfer-2 §4.4). Changes
/// speed, never results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phases {
    /// What costs less on the device for the container's format.
    #[default]
    Auto,
    /// Whole clusters, sequentially.
    One,
    /// The Gate part, then Up and Down if it fires.
    Two,
}

/// Options of [`crate::Engine::open`].
#[derive(Debug, Clone)]
pub struct Options {
    /// Memory for the whole process.
    pub budget: Budget,
    /// Compute threads, the caller's included; 0 = one per core, or fewer where the plan says that
    /// they are faster.
    pub threads: usize,
    /// Which neurons are computed.
    pub sparsity: Sparsity,
    /// How bundles are read where Gate rows are not resident.
    pub phases: Phases,
    /// Which mechanisms are at work.
    pub ablation: Ablation,
    /// I/O engine.
    pub io: emberflow_storage::io::IoChoice,
    /// Core the I/O thread is pinned to; `None` = what the plan says.
    pub io_core: Option<usize>,
    /// Keep the regions from being swapped out, as far as the system allows.
    pub lock: bool,
    /// Positions to make room for: prompt plus generated tokens.
    pub context: usize,
    /// Tokens of the longest prompt, where that is known: longer chunks only take memory. 0 = up to
    /// `context`.
    pub prompt: usize,
    /// Longest chunk of prompt tokens computed at once; 0 = the longest that the budget can well
    /// afford.
    pub chunk: usize,
    /// Spans that each lane of a trace keeps; 0 = no trace. See [`crate::Engine::trace`].
    pub trace: usize,
    /// Most sequences at once: the plan has room for the keys and values of so many.
    pub batch: usize,
    /// Storage format of keys and values: f16 or f32.
    pub kv: DType,
    /// Keep gates and hidden values of a chunk for observers; the budget pays for
    /// the room.
    pub observe: bool,
    /// Keep room for the activations of a pass that is set aside between two layers, so that nothing
    /// is computed again when it goes on (see [`crate::Stepper::preempt`]).
    pub preemption: bool,
    /// Bytes that the caller will come to hold besides; the budget pays for them.
    pub reserve: u64,
    /// Where the system shows its sensors of energy: `/sys`.
    pub sysfs: PathBuf,
}

impl Options {
    /// The defaults under `budget`.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            ..Self::default()
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            budget: Budget::Auto,
            threads: 0,
            sparsity: Sparsity::Auto,
            phases: Phases::Auto,
            ablation: Ablation::Full,
            io: Default::default(),
            io_core: None,
            lock: false,
            context: 1024,
            prompt: 0,
            chunk: 0,
            trace: 0,
            batch: 1,
            kv: DType::F16,
            observe: false,
            preemption: false,
            reserve: 0,
            sysfs: PathBuf::from("/sys"),
        }
    }
}
