//! Whether a prompt's pass runs in parts, the mixer of one beside the FFN of another, and in which.

use super::budget::Division;
use super::facts::{DeviceTier, Planner};
use super::pass::CostModel;
use super::search::FORECAST_MARGIN;
use crate::device::LEAST_STREAMED;
use crate::options::PassOrder;
use crate::schedule::{InParts, Rule};

/// Numbers of parts that are compared.
const PARTS: std::ops::RangeInclusive<usize> = 2..=4;

/// Share of the FFN from which on nothing is read: in memory, but for rounding.
const ALL: f64 = 0.9999;

/// A pass of some number of rows.
#[derive(Clone, Copy)]
pub(super) struct PassOfParts<'a> {
    pub planner: &'a Planner,
    pub pass: &'a CostModel<'a>,
    pub division: &'a Division,
    pub rows: usize,
    /// Nanoseconds of its FFNs layer by layer, whose rows or clusters the CPU and devices divide.
    pub ffn_ns: f64,
}

impl PassOfParts<'_> {
    /// The fastest way to run it in parts, if that is [`FORECAST_MARGIN`] times as fast as layer by layer, or was asked
    /// for. Each part needs all neurons of a layer, so nothing may have to be read.
    pub fn best(self) -> Option<InParts> {
        let tier = self.planner.tier.as_ref()?;
        if tier.at_once == 0 || self.rows < 2 * LEAST_STREAMED {
            return None;
        }
        let needs = &self.division.needs;
        let resident = self.division.memory.ffn_resident_share(needs) > ALL;
        match tier.order {
            PassOrder::Layers => None,
            PassOrder::Parts(rows) => Some(InParts {
                rule: Rule::Stalls,
                ..self.in_parts_of(tier, rows.max(1))
            }),
            PassOrder::Planned if !resident => None,
            PassOrder::Planned => {
                let all = PARTS.map(|parts| self.in_parts_of(tier, self.rows.div_ceil(parts)));
                let best = all.max_by(|a, b| a.gain.total_cmp(&b.gain));
                best.filter(|best| best.gain > FORECAST_MARGIN)
            }
        }
    }

    /// In parts of `rows` rows, in the faster order.
    fn in_parts_of(self, tier: &DeviceTier, rows: usize) -> InParts {
        let layers = self.planner.shape.layers.max(1);
        let longest = self.planner.longest_chunk();
        let before = longest.saturating_sub(self.rows) / 2;
        let part = |first: usize| {
            let rows = rows.min(self.rows - first);
            [
                self.pass.mixer_ns(rows, before + first) / 1e9,
                self.ffn_ns(tier, rows) / 1e9,
            ]
        };
        let seconds: Vec<[f64; 2]> = (0..self.rows).step_by(rows).map(part).collect();
        let in_order = layers as f64 * self.pass.mixer_ns(self.rows, before) + self.ffn_ns;
        InParts::fastest(rows, seconds, layers, in_order / 1e9)
    }

    /// Nanoseconds of a layer's FFN for `rows` rows on devices, with what a thread copies for them.
    fn ffn_ns(self, tier: &DeviceTier, rows: usize) -> f64 {
        let layers = self.planner.shape.layers.max(1);
        let held = self.division.needs.device_clusters as usize / layers;
        let part = self.planner.streaming(tier, held, [rows, rows]);
        part.ns.max(part.copying) + self.pass.rates.layer_ns
    }
}
