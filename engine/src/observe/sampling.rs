//! How tokens were chosen, and who said so.

use serde::Serialize;

use crate::meta::SamplingDefaults;
use crate::sampler::Sampling;

/// How tokens were chosen.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct SamplingReport {
    /// Its parameters.
    #[serde(flatten)]
    pub sampling: Sampling,
    /// Who says so: `chosen` (the caller, at least a part), `recommended` (the checkpoint) or
    /// `default` (neither).
    pub from: &'static str,
}

impl SamplingReport {
    /// `sampling` of a model that recommends `recommended`, where the caller chose `chosen`.
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

    /// In words, with who says so.
    pub fn summary(&self) -> String {
        let whose = match self.from {
            "recommended" => "as the checkpoint recommends",
            "chosen" => "as chosen",
            _ => "the checkpoint recommends nothing",
        };
        format!("{} ({whose})", self.sampling)
    }
}
