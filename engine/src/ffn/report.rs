//! Passes predictor margins to the cold region at the end of prefill.

use std::time::Instant;

use emberflow_kernels::Compute;

use super::pairs::Inputs;
use super::recent::RECENT;
use super::state::Ffn;
use crate::cluster::CLUSTER;
use crate::counters::nanoseconds;

impl Ffn {
    /// Scores the last two tokens of a single-sequence pass again (a pass of many tokens stores no
    /// margins) and reports their margins to the cold region. Two, because the change between
    /// tokens gives the correlation of margins. Not for experts, which other tokens visit.
    pub(super) fn report_recent(&mut self, on: &Compute, inputs: Inputs<'_>) {
        let (Some(predictors), [end]) = (&mut self.predictors, self.recent.ends()) else {
            return;
        };
        if end.len() < RECENT || !self.store.evicts() || self.pairs.margins.is_empty() {
            return;
        }
        let [unit] = self.units[..] else {
            return;
        };
        let start = Instant::now();
        let whole = inputs.of(0);
        let features = whole.input.features(whole.residual);
        for (row, consecutive) in [(end.end - 2, false), (end.end - 1, true)] {
            let Some(row) = self.recent.own(row) else {
                return;
            };
            let features = features.alone(row);
            if !predictors.prepare(on, unit.bank, features) {
                return;
            }
            let predictors = &*predictors;
            let margins = &mut self.pairs.margins[..unit.neurons];
            on.workers
                .for_each_part_mut(margins, CLUSTER, &|_, c, margins| {
                    predictors.margins(on.cpu, unit.bank, features, c * CLUSTER, margins);
                });
            (self.store).set_margins(on.cpu, unit.bank, 0, margins, consecutive);
        }
        self.counts.predict_ns += nanoseconds(start.elapsed());
    }
}
