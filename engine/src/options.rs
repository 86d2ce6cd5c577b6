//! Options of [`crate::Engine::open`].

use std::path::PathBuf;

use emberflow_kernels::DType;

use crate::ablation::Ablation;
use crate::device::Device;

/// Sparsity mode (DESIGN §6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sparsity {
    /// `predicted` where the container has predictors that pay, else `exact` where it equals dense,
    /// else `dense`.
    #[default]
    Auto,
    /// Every neuron.
    Dense,
    /// Gate first, then Up and Down only of neurons that fire.
    Exact,
    /// A predictor selects the neurons whose Gate is computed; then as `exact`. False negatives are
    /// missing from the result.
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

/// Memory budget.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// As much as is safe on this machine.
    Auto,
    /// Resident memory of the whole process, in bytes.
    Bytes(u64),
    /// Enough to keep this share (0 to 1) of the FFN's bytes resident, but at least the smallest
    /// feasible budget.
    FfnShare(f64),
}

/// How neurons without a resident gate are read (PowerInfer-2 §4.4). Affects speed, not results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phases {
    /// Whichever costs less on the device for the container's format.
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
    /// Compute threads, the caller included; 0 = one per core, or fewer where the planner expects
    /// more speed.
    pub threads: usize,
    /// Sparsity mode.
    pub sparsity: Sparsity,
    /// Lock the regions in memory, where permitted.
    pub lock: bool,
    /// Context length in positions: prompt plus generated tokens.
    pub context: usize,
    /// Length of the longest prompt, if known, to limit the chunk and its memory. 0 = up to
    /// `context`.
    pub prompt: usize,
    /// Most concurrent sequences; the plan reserves keys and values for them.
    pub batch: usize,
    /// Storage format of keys and values: f16 or f32.
    pub kv: DType,
    /// Reserve memory for the activations of a preempted pass, so that it resumes without
    /// recomputation (see [`crate::Stepper::preempt`]).
    pub preemption: bool,
    /// Bytes that the caller will allocate itself, within the budget.
    pub reserve: u64,
    /// A device that holds and computes the hottest neurons, and how many bytes of them; `None` for as
    /// many as the plan chooses. Changes no bit on a device that has the CPU's.
    pub device: Option<Device>,
    /// See `device`.
    pub device_memory: Option<u64>,
    /// What only measurements set.
    pub lab: Lab,
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
            lock: false,
            context: 1024,
            prompt: 0,
            batch: 1,
            kv: DType::F16,
            preemption: false,
            reserve: 0,
            device: None,
            device_memory: None,
            lab: Lab::default(),
        }
    }
}

/// What measurements set and users leave at its default: mechanisms that are switched off, choices
/// that are the planner's, observers. None changes a result.
#[derive(Debug, Clone, PartialEq)]
pub struct Lab {
    /// Enabled mechanisms.
    pub ablation: Ablation,
    /// Read strategy where Gate rows are not resident.
    pub phases: Phases,
    /// Whether a mixture's experts are read before the layer that visits them is reached, by a guess of its router.
    pub read_ahead: bool,
    /// Whether Gate rows stay resident where that is possible, also if whole clusters are expected to be faster.
    pub gates_stay: bool,
    /// I/O engine.
    pub io: emberflow_storage::io::IoChoice,
    /// Core to pin the I/O thread to; `None` = the planner's choice.
    pub io_core: Option<usize>,
    /// Prompt tokens per pass; 0 = as many as the budget affords.
    pub chunk: usize,
    /// Trace spans per lane; 0 = no trace. See [`crate::Engine::trace`].
    pub trace: usize,
    /// Keep gates and hidden values of a chunk for observers, within the budget.
    pub observe: bool,
    /// Count how often each neuron of experts fires, for [`crate::Engine::take_fired`], within the
    /// budget.
    pub count_fired: bool,
    /// Whether plans follow what was measured and saved of this machine; else it is taken for an ordinary one.
    pub profiles: bool,
    /// Root of the system's energy sensors: `/sys`.
    pub sysfs: PathBuf,
}

impl Default for Lab {
    fn default() -> Self {
        Self {
            ablation: Ablation::Full,
            phases: Phases::Auto,
            read_ahead: true,
            gates_stay: false,
            io: Default::default(),
            io_core: None,
            chunk: 0,
            trace: 0,
            observe: false,
            count_fired: false,
            profiles: true,
            sysfs: PathBuf::from("/sys"),
        }
    }
}
