//! Ablations: the full system, or the system without some mechanisms, to measure what each one
//! gains. [`Ablation`] is a name on the command line, [`Policy`] the values that it stands for.
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
    /// As many neurons as fit, by recency and frequency.
    All,
    /// As many neurons of the last tokens as fit; the least recently used are evicted first.
    Window,
    /// Nothing.
    Nothing,
}

impl Keep {
    /// Eviction policy of the cold region.
    pub fn eviction(self) -> Eviction {
        match self {
            // The least recently used neurons were used only by the oldest token of the window.
            Self::Window => Eviction::Lru,
            Self::All | Self::Nothing => Eviction::Lrfu,
        }
    }
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

/// The mechanisms of a store as values: what stays in memory, where bytes come from and how they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Policy {
    pub keep: Keep,
    pub overlap: Overlap,
    /// The file is mapped and the page cache keeps what fits; nothing is read into slots.
    pub mapped: bool,
    /// One read covers all vectors of a neuron.
    pub bundles: bool,
    /// Guessed and chosen neurons of the next layer are prefetched.
    pub prefetches: bool,
    /// A compute thread makes the short reads of small models itself.
    pub reads_inline: bool,
}

impl Policy {
    /// All mechanisms.
    pub const FULL: Self = Ablation::Full.policy();
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

    /// The mechanisms that remain.
    pub(crate) const fn policy(self) -> Policy {
        let (keep, overlap, bundles) = match self {
            Self::Full | Self::Mmap => (Keep::All, Overlap::Clusters, true),
            Self::NoPipeline => (Keep::All, Overlap::Matrix, true),
            Self::NoCache => (Keep::Nothing, Overlap::Clusters, true),
            Self::NoBundle => (Keep::All, Overlap::Clusters, false),
            Self::Baseline => (Keep::Nothing, Overlap::Nothing, false),
            Self::BundleOnly => (Keep::Nothing, Overlap::Nothing, true),
            Self::LlmFlash => (Keep::Window, Overlap::Nothing, true),
        };
        Policy {
            keep,
            overlap,
            bundles,
            mapped: matches!(self, Self::Mmap),
            prefetches: matches!(self, Self::Full),
            reads_inline: matches!(self, Self::Full),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_another_policy() {
        let names = Ablation::ALL.map(|name| name.name().parse());
        assert_eq!(names, Ablation::ALL.map(Ok));
        let policies = Ablation::ALL.map(Ablation::policy);
        for (number, policy) in policies.iter().enumerate() {
            assert!(!policies[..number].contains(policy), "{policy:?}");
        }
    }

    #[test]
    fn baselines_lack_mechanisms() {
        let baseline = Ablation::Baseline.policy();
        assert_eq!(
            (baseline.keep, baseline.overlap),
            (Keep::Nothing, Overlap::Nothing)
        );
        assert!(!(baseline.bundles || baseline.prefetches || baseline.reads_inline));
        let window = Ablation::LlmFlash.policy();
        assert_eq!(
            (window.keep.eviction(), window.overlap),
            (Eviction::Lru, Overlap::Nothing)
        );
        assert!(window.bundles && !window.mapped && Ablation::Mmap.policy().mapped);
        assert_eq!(Policy::FULL.keep.eviction(), Eviction::Lrfu);
    }
}
