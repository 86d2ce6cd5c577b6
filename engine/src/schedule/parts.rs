//! How a prompt's pass runs in parts, and what that gains.

use super::part_graph::PartGraph;
use super::part_order::PartOrder;

/// Layers of the graphs that are simulated; each other layer takes as long as one of the second half of them.
const SIMULATED: usize = 8;

/// Rows of a part are a multiple of these, as devices have graphs and kernels for them.
pub(crate) const PART_ROWS: usize = 32;

/// How the passes of some number of rows run in parts.
#[derive(Debug, Clone, PartialEq)]
pub struct InParts {
    /// Rows of a part, before they are rounded up to a multiple of 32.
    pub rows: usize,
    /// It was asked for, whatever is expected.
    pub(crate) asked: bool,
    /// Rows of a pass whose times are known.
    pub(crate) all: usize,
    /// Expected seconds of the steps of a layer then, by part.
    pub(crate) seconds: Vec<[f64; 3]>,
    /// Devices multiply the projections.
    pub(crate) projects: bool,
    /// Expected seconds of the pass layer by layer, divided by those in parts.
    pub(crate) gain: f64,
    /// The part of that quotient that is mixers.
    pub(crate) mixing: f64,
    /// The gain from which on it pays.
    pub(crate) least: f64,
}

/// Rows of each part of a pass of `all` rows in parts of up to `rows` rows, in multiples of [`PART_ROWS`]; the last part
/// may have fewer. 0 for fewer than two parts.
pub(crate) fn part_rows(rows: usize, all: usize) -> usize {
    let parts = all.div_ceil(rows.max(1)).max(2);
    let each = all.div_ceil(parts).next_multiple_of(PART_ROWS);
    if each < all { each } else { 0 }
}

impl InParts {
    /// Rows of each part of a pass of `rows` rows, the last of which may have fewer; 0 for fewer than two parts.
    pub fn rows_of(&self, rows: usize) -> usize {
        part_rows(self.rows, rows)
    }

    /// Whether it pays where devices multiply this share of the projections layer by layer, 0 to 1. In parts they multiply
    /// none or all, which one that multiplies none layer by layer would do slowly.
    pub(crate) fn pays(&self, products: f64) -> bool {
        let can = self.asked || !self.projects || products > 0.0;
        can && self.gain - products * self.mixing >= self.least
    }

    /// Expected seconds by part, for a pass of `rows` rows: in proportion to the rows of a part whose times are known.
    pub(crate) fn times(&self, rows: usize) -> Vec<[f64; 3]> {
        let [known, each] = [self.all, rows].map(|rows| self.rows_of(rows).max(1));
        let time = |first: usize| {
            let part = (first / each).min(self.seconds.len().saturating_sub(1));
            let its = each.min(rows - first) as f64;
            let of = known.min(self.all - part * known).max(1) as f64;
            let seconds = self.seconds.get(part).copied().unwrap_or_default();
            seconds.map(|seconds| seconds * (its / of))
        };
        (0..rows).step_by(each).map(time).collect()
    }

    /// Parts of up to `rows` rows of a pass of `all` rows, with these times in each of `layers` layers, of a pass that
    /// takes `[mixers, FFNs]` seconds layer by layer. Before [`InParts::searched`] by the rules that decide at run time.
    pub(crate) fn new(
        [rows, all]: [usize; 2],
        seconds: Vec<[f64; 3]>,
        layers: usize,
        [mixers, ffns]: [f64; 2],
    ) -> Self {
        let projects = seconds.iter().any(|[project, ..]| *project > 0.0);
        let time = |layers: usize| {
            let layers = std::iter::repeat_n([projects, true, true], layers);
            PartOrder::online(&PartGraph::new(0, layers, &seconds)).seconds
        };
        let (some, more) = (layers.min(SIMULATED), layers.saturating_sub(SIMULATED));
        let half = some / 2;
        let mut best = time(some);
        if more > 0 {
            best += more as f64 * (best - time(half)) / (some - half) as f64;
        }
        let best = best.max(f64::MIN_POSITIVE);
        Self {
            rows,
            asked: false,
            all,
            seconds,
            projects,
            gain: (mixers + ffns) / best,
            mixing: mixers / best,
            least: 0.0,
        }
    }

    /// With the gain of a searched order, by that of some layers of `layers`.
    pub(crate) fn searched(mut self, layers: usize) -> Self {
        let layers = std::iter::repeat_n([self.projects, true, true], layers.min(SIMULATED));
        let graph = PartGraph::new(0, layers, &self.seconds);
        let online = PartOrder::online(&graph);
        let seconds = online.seconds;
        let faster = seconds / online.or_searched(&graph).seconds.max(f64::MIN_POSITIVE);
        self.gain *= faster;
        self.mixing *= faster;
        self
    }
}
