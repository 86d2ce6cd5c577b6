//! Which mechanisms are at work: everything, or less, to measure what each one gives.
//!
//! The baselines are this program with mechanisms switched off, so that nothing else differs: same
//! kernels, same reads, same file (PowerInfer-2 §7.1 and the ablation of its Fig. 14). No choice
//! changes a result. On the command line it is `--policy`.

/// A set of mechanisms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ablation {
    /// Everything.
    #[default]
    Full,
    /// Without the neuron-cluster pipeline: computing overlaps with reading matrix by
    /// matrix. Resident clusters are computed while the others are read, then
    /// everything waits for the last one.
    NoPipeline,
    /// Without a cache: every needed neuron is read for every token.
    NoCache,
    /// Without bundles: Up and Down of a neuron are read separately, as from matrices
    /// that lie apart.
    NoBundle,
    /// Nothing: no bundles, no cache, one thing after the other.
    Baseline,
    /// The baseline with bundles.
    BundleOnly,
    /// LLM in a flash as PowerInfer-2 §7.1 describes its re-implementation: bundles,
    /// the neurons of the last tokens kept, reads waited for before anything is computed.
    LlmFlash,
    /// The FFN's part of the file mapped into memory; the system's page cache does it all. A neuron is
    /// checked when it is first used; what the system drops and reads again is not.
    Mmap,
}

/// What stays in memory between tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// As much as fits, the least recently used first out.
    All,
    /// What the last tokens used.
    Window,
    /// Nothing.
    Nothing,
}

/// What may be computed while reads are under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Overlap {
    /// Every cluster whose bytes are there.
    Clusters,
    /// What was there before.
    Matrix,
    /// Nothing.
    Nothing,
}

/// Tokens of the sliding window of LLM in a flash (its §3.1 uses 4 to 5).
pub(crate) const WINDOW: usize = 5;

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

    pub(crate) fn overlap(self) -> Overlap {
        match self {
            Self::Full | Self::NoCache | Self::NoBundle | Self::Mmap => Overlap::Clusters,
            Self::NoPipeline => Overlap::Matrix,
            Self::Baseline | Self::BundleOnly | Self::LlmFlash => Overlap::Nothing,
        }
    }

    /// Whether neurons are read for the next layer by a guess.
    pub(crate) fn looks_ahead(self) -> bool {
        self == Self::Full
    }

    /// Whether the vectors of a neuron come in one read.
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
