//! Sampling parameters and their origin.

use serde::Serialize;

use crate::meta::SamplingDefaults;
use crate::sampler::Sampling;

/// Sampling parameters of a run.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct SamplingReport {
    /// The parameters.
    #[serde(flatten)]
    pub sampling: Sampling,
    /// Origin: `chosen` (by the caller, at least in part), `recommended` (by the checkpoint) or
    /// `default`.
    pub from: &'static str,
}

impl SamplingReport {
    /// `sampling` of a model that recommends `recommended`; the caller chose `chosen`.
    pub fn new(
        sampling: Sampling,
        chosen: SamplingDefaults,
        recommended: SamplingDefaults,
    ) -> Self {
        let none = SamplingDefaults::default();
        let from = match (chosen == none, recommended == none) {
            (false, _) => "chosen",
            (true, false) => "recommended",
            (true, true) => "default",
        };
        Self { sampling, from }
    }

    /// One line for the summary, with the origin.
    pub fn summary(&self) -> String {
        let whose = match self.from {
            "recommended" => "as the checkpoint recommends",
            "chosen" => "as chosen",
            _ => "the checkpoint recommends nothing",
        };
        format!("{} ({whose})", self.sampling)
    }
}
