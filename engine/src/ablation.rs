//! Ablations: the full system, or fewer mechanisms, to measure the share of each.
//!
//! The baselines are this program with mechanisms disabled; kernels, I/O and file are the same
//! (PowerInfer-2 §7.1 and the ablation of its Fig. 14). No ablation changes a result. The command
//! line calls it `--policy`.

use emberflow_storage::cache::Eviction;

/// The set of enabled mechanisms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ablation {
    /// Everything.
    #[default]
    Full,
    /// No neuron-cluster pipeline: computation overlaps with I/O matrix by matrix. Resident
    /// clusters are computed while the others are read; then a barrier waits for the last read.
    NoPipeline,
    /// No cache: every needed neuron is read for every token.
    NoCache,
    /// No bundles: Up and Down of a neuron are read separately, as from separate matrices.
    NoBundle,
    /// No bundles, no cache, no overlap.
    Baseline,
    /// The baseline with bundles.
    BundleOnly,
    /// LLM in a flash, as PowerInfer-2 §7.1 describes its re-implementation: bundles, a sliding
    /// window of the neurons of as many last tokens as the memory holds, and no overlap of reads
    /// with computation.
    LlmFlash,
    /// The FFN section is memory-mapped and left to the page cache. A neuron is verified on its
    /// first use, but not after the kernel drops and rereads it.
    Mmap,
}

/// What stays resident between tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// As much as fits, by the eviction policy.
    All,
    /// The neurons of the last tokens: as much as fits, the least recently used out first.
    Window,
    /// Nothing.
    Nothing,
}

/// What computation overlaps with reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Overlap {
    /// Every cluster whose bytes have arrived.
    Clusters,
    /// Only what was resident before.
    Matrix,
    /// Nothing.
    Nothing,
}

impl Ablation {
    /// All of them.
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

    /// Its name on the command line.
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

    /// Who leaves the cold region first.
    pub(crate) fn eviction(self) -> Eviction {
        match self.keep() {
            // What was used least recently was used by the oldest token only.
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

    /// Whether speculative reads for the next layer are enabled.
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
