//! Options of [`crate::Engine::open`].

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use emberflow_kernels::DType;

use crate::ablation::Ablation;
use crate::drafts::Speculation;
use crate::lane::OpenLane;

/// Time of a pass with prompts beside texts that decode: three tokens at the speed at which people read, which a reader
/// who has some text ahead does not notice. A model in memory computes tens of rows in that time, nearly as many per
/// second as in a longer chunk.
pub const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Bytes of a slot for a tile at most. Reads of this length are near the sequential rate of flash: a virtual disk gives
/// 1.40 GB/s, and 1.19 with half of it, where reads of 1 MiB reach 1.74. Two are an expert's matrix.
const LARGEST_TILE: usize = 512 << 10;

/// Sparsity mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sparsity {
    /// `predicted` if the container has predictors that pay off; else `exact` if it equals `dense`;
    /// else `dense`.
    #[default]
    Auto,
    /// Every neuron.
    Dense,
    /// Gates first, then Up and Down only of neurons that fire.
    Exact,
    /// A predictor selects neurons; then as `exact` among them. Neurons it misses do not
    /// contribute.
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
    /// As much as the model needs and is safe on this machine.
    Auto,
    /// Resident memory of the whole process, in bytes.
    Bytes(u64),
    /// Enough to keep this share (0 to 1) of the FFN weights resident, but at least the smallest
    /// feasible budget.
    FfnShare(f64),
}

/// How neurons without a resident Gate row are read (PowerInfer-2 §4.4). Affects speed only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phases {
    /// The cheaper of the two on the device and for the container's format.
    #[default]
    Auto,
    /// Whole clusters, sequentially.
    One,
    /// The Gate row first, then Up and Down if it fires.
    Two,
}

/// Options of [`crate::Engine::open`].
#[derive(Debug, Clone)]
pub struct Options {
    /// Memory for the whole process.
    pub budget: Budget,
    /// Compute threads including the caller's; 0 = one per core, or fewer if the planner expects
    /// higher speed.
    pub threads: usize,
    /// Sparsity mode.
    pub sparsity: Sparsity,
    /// Lock the regions in memory, if permitted.
    pub lock: bool,
    /// Context length in positions: prompt plus generated tokens.
    pub context: usize,
    /// Length of the longest prompt in tokens, if known; limits the chunk and its memory. 0 = up to
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
    /// Opens who computes beside the compute threads, such as a GPU; `None` for the CPU alone.
    pub lane: Option<Arc<dyn OpenLane>>,
    /// Drafts of next tokens, which are checked in one pass. Affects speed only.
    pub speculation: Speculation,
    /// A file with the model's head for multi-token prediction; `None` for the model's own, or that of a file beside it
    /// ([`emberflow_models::mtp_head_beside`]).
    pub head: Option<PathBuf>,
    /// Settings for measurements only.
    pub lab: Lab,
}

impl Options {
    /// Most rows of logits after a pass: one text has drafts if it was parked with them, the others do not.
    pub(crate) fn logit_rows(&self) -> usize {
        self.batch.saturating_sub(1) + self.speculation.logit_rows()
    }

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
            lane: None,
            speculation: Speculation::default(),
            head: None,
            lab: Lab::default(),
        }
    }
}

/// Settings for measurements: disabled mechanisms, overridden planner choices, observers. None
/// changes a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Lab {
    /// Enabled mechanisms.
    pub ablation: Ablation,
    /// Read strategy if Gate rows are not resident.
    pub phases: Phases,
    /// Prefetch experts of the next layer, guessed by its router.
    pub read_ahead: bool,
    /// Keep Gate rows resident if possible, even if whole clusters are expected to be faster.
    pub gates_stay: bool,
    /// I/O engine.
    pub io: emberflow_storage::io::IoChoice,
    /// Core to pin the I/O thread to; `None` = the planner's choice.
    pub io_core: Option<usize>,
    /// Prompt tokens per pass; 0 = as many as the budget allows.
    pub chunk: usize,
    /// Bytes of a slot for a tile at most, unless a row needs more.
    pub tile: usize,
    /// Read projections and the output head of an unpacked model for every pass even if they fit. A simulated disk serves them
    /// beside all other reads, as a second one.
    pub streams: bool,
    /// Time of a pass with prompts while texts decode; see [`LONGEST_PAUSE`].
    pub pause: Duration,
    /// Trace spans per lane; 0 = no trace. See [`crate::Engine::trace`].
    pub trace: usize,
    /// Keep gates and hidden values of a chunk for observers, within the budget.
    pub observe: bool,
    /// Count how often each neuron of experts fires, for [`crate::Engine::take_fired`], within the
    /// budget.
    pub count_fired: bool,
    /// Plan with the saved profiles of this machine; otherwise with assumed rates.
    pub profiles: bool,
    /// Root of the system's energy sensors, normally `/sys`.
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
            tile: LARGEST_TILE,
            streams: false,
            pause: LONGEST_PAUSE,
            trace: 0,
            observe: false,
            count_fired: false,
            profiles: true,
            sysfs: PathBuf::from("/sys"),
        }
    }
}
