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
    pub const FULL: Self = Self {
        keep: Keep::All,
        overlap: Overlap::Clusters,
        mapped: false,
        bundles: true,
        prefetches: true,
        reads_inline: true,
    };
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
    pub(crate) fn policy(self) -> Policy {
        let some = Policy {
            prefetches: false,
            reads_inline: false,
            ..Policy::FULL
        };
        let uncached = Policy {
            keep: Keep::Nothing,
            ..some
        };
        let sequential = Policy {
            overlap: Overlap::Nothing,
            ..uncached
        };
        match self {
            Self::Full => Policy::FULL,
            Self::NoPipeline => Policy {
                overlap: Overlap::Matrix,
                ..some
            },
            Self::NoCache => uncached,
            Self::NoBundle => Policy {
                bundles: false,
                ..some
            },
            Self::Baseline => Policy {
                bundles: false,
                ..sequential
            },
            Self::BundleOnly => sequential,
            Self::LlmFlash => Policy {
                keep: Keep::Window,
                ..sequential
            },
            Self::Mmap => Policy {
                mapped: true,
                ..some
            },
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

    /// Each name as the values that distinguish it from the full system.
    #[test]
    fn names_are_values() {
        let policies = Ablation::ALL.map(|name| {
            let policy = name.policy();
            let full = policy == Policy::FULL;
            assert_eq!([policy.prefetches, policy.reads_inline], [full; 2]);
            (policy.keep, policy.overlap, policy.bundles, policy.mapped)
        });
        let expected = [
            (Keep::All, Overlap::Clusters, true, false),
            (Keep::All, Overlap::Matrix, true, false),
            (Keep::Nothing, Overlap::Clusters, true, false),
            (Keep::All, Overlap::Clusters, false, false),
            (Keep::Nothing, Overlap::Nothing, false, false),
            (Keep::Nothing, Overlap::Nothing, true, false),
            (Keep::Window, Overlap::Nothing, true, false),
            (Keep::All, Overlap::Clusters, true, true),
        ];
        assert_eq!(policies, expected);
        let names = Ablation::ALL.map(|name| name.name().parse());
        assert_eq!(names, Ablation::ALL.map(Ok));
    }
}
