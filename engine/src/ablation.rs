//! Ablations: the full system, or the system without some mechanisms, to measure what each one
//! gains.
//!
//! A baseline is this program with mechanisms disabled; kernels, I/O and file are the same
//! (PowerInfer-2 §7.1 and the ablation of its Fig. 14). No ablation changes a text. The command
//! line option is `--policy`.

use emberflow_storage::cache::Eviction;

/// The set of enabled mechanisms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ablation {
    /// All mechanisms.
    #[default]
    Full,
    /// No neuron-cluster pipeline: computation and I/O overlap matrix by matrix. Resident clusters
    /// are computed while others are read, then a barrier waits for the last read.
    NoPipeline,
    /// No cache: every needed neuron is read for every token.
    NoCache,
    /// No bundles: Up and Down of a neuron are read separately, as from separate matrices.
    NoBundle,
    /// No bundles, no cache, no overlap.
    Baseline,
    /// The baseline with bundles.
    BundleOnly,
    /// LLM in a flash, as re-implemented in PowerInfer-2 §7.1: bundles, a sliding window of the
    /// neurons of as many last tokens as fit in memory, and no overlap of reads and computation.
    LlmFlash,
    /// The FFN section is memory-mapped and left to the page cache. A neuron is verified on first
    /// use only, not after the kernel drops and rereads its pages.
    Mmap,
}

/// What stays resident between tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// As many neurons as fit, by the eviction policy.
    All,
    /// As many neurons of the last tokens as fit; the least recently used are evicted first.
    Window,
    /// Nothing.
    Nothing,
}

/// What computation overlaps with reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Overlap {
    /// Every cluster whose bytes have arrived.
    Clusters,
    /// Only clusters that were resident before.
    Matrix,
    /// Nothing.
    Nothing,
}

impl Ablation {
    /// All ablations.
    pub const ALL: [Self; 8] = [
        Self::Full,
        Self::NoPipeline,
        Self::NoCache,
        Self::NoBundle,
        Self::Baseline,
        Self::BundleOnly,
        Self::LlmFlash,
        Self::Mmap,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::NoPipeline => "no-pipeline",
            Self::NoCache => "no-cache",
            Self::NoBundle => "no-bundle",
            Self::Baseline => "baseline",
            Self::BundleOnly => "bundle-only",
            Self::LlmFlash => "llmflash",
            Self::Mmap => "mmap",
        }
    }

    pub(crate) fn keep(self) -> Keep {
        match self {
            Self::Full | Self::NoPipeline | Self::NoBundle | Self::Mmap => Keep::All,
            Self::LlmFlash => Keep::Window,
            Self::NoCache | Self::Baseline | Self::BundleOnly => Keep::Nothing,
        }
    }

    /// Eviction policy of the cold region.
    pub(crate) fn eviction(self) -> Eviction {
        match self.keep() {
            // The least recently used neurons were used only by the oldest token of the window.
            Keep::Window => Eviction::Lru,
            Keep::All | Keep::Nothing => Eviction::Lrfu,
        }
    }

    pub(crate) fn overlap(self) -> Overlap {
        match self {
            Self::Full | Self::NoCache | Self::NoBundle | Self::Mmap => Overlap::Clusters,
            Self::NoPipeline => Overlap::Matrix,
            Self::Baseline | Self::BundleOnly | Self::LlmFlash => Overlap::Nothing,
        }
    }

    /// Whether prefetches for the next layer are enabled.
    pub(crate) fn looks_ahead(self) -> bool {
        self == Self::Full
    }

    /// Whether one read covers all vectors of a neuron.
    pub(crate) fn bundles(self) -> bool {
        !matches!(self, Self::NoBundle | Self::Baseline)
    }
}

impl std::str::FromStr for Ablation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|p| p.name() == name);
        known.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("no policy {name:?}; there are {names}")
        })
    }
}
