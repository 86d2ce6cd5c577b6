//! A lane in a plan: what it would hold and compute, by its times and the CPU's forecast. The planner
//! sees it as [`LaneFacts`]; `held.rs` searches for the clusters that it holds.

use super::budget::Division;
use super::cost::ResidentLayer;
use super::facts::Planner;
use super::pass::CostModel;
use crate::ffn::RECENT;
use crate::lane::{CpuTimes, LaneFacts, LaneOutlook, LanePart, LanePlan, Widths};
use crate::memory::{MemoryPlan, Needs};

impl LaneFacts {
    /// Byte sizes if the lane holds this many clusters.
    pub(super) fn holding(&self, needs: &Needs, clusters: u64) -> Needs {
        Needs {
            lane_clusters: clusters,
            lane: match self.unified {
                true => clusters * self.cluster_len,
                false => 0,
            },
            ..*needs
        }
    }
}

/// The CPU's forecast for a division.
struct LayerTimes<'a> {
    pass: CostModel<'a>,
    memory: &'a MemoryPlan,
    cluster_len: u64,
}

impl CpuTimes for LayerTimes<'_> {
    fn layers(&self) -> usize {
        self.pass.shape.layers
    }

    fn neurons(&self) -> usize {
        self.pass.shape.neurons
    }

    fn last_rows(&self) -> usize {
        RECENT
    }

    fn cluster_len(&self) -> u64 {
        self.cluster_len
    }

    fn layer_ns(&self, layer: usize, rows: usize, part: LanePart) -> [f64; 2] {
        let pass = CostModel {
            beside: part,
            ..self.pass
        };
        pass.in_memory(self.memory, ResidentLayer { layer, rows })
    }
}

impl Planner {
    /// The lane, and the CPU's forecast beside it.
    fn beside<'a>(
        &'a self,
        division: &'a Division,
        threads: usize,
    ) -> Option<(&'a LaneFacts, LayerTimes<'a>)> {
        let lane = self.lane.as_ref()?;
        let times = LayerTimes {
            pass: self.pass(division, threads)?,
            memory: &division.memory,
            cluster_len: lane.cluster_len,
        };
        Some((lane, times))
    }

    /// Clusters per layer and rows that the lane computes beside `threads` compute threads. Of a mixture it computes all that it
    /// holds, as the experts of a pass are not known.
    pub(crate) fn widths(&self, division: &Division, threads: usize) -> Widths {
        match self.beside(division, threads) {
            Some((lane, cpu)) if self.shape.visited == 1.0 => {
                lane.times.widths(&cpu, division.needs.lane_clusters)
            }
            _ => Widths::default(),
        }
    }

    /// The lane's mean part of a layer in a pass of `rows` rows.
    pub(super) fn part_beside(&self, division: &Division, rows: usize) -> LanePart {
        match self.beside(division, self.threads) {
            Some((lane, cpu)) if self.shape.visited == 1.0 => {
                let held = division.needs.lane_clusters;
                lane.times.part(&cpu, &division.widths, held, rows)
            }
            _ => LanePart::default(),
        }
    }

    /// Seconds of a layer of a prompt's pass on the CPU.
    pub(crate) fn layer_seconds(&self, division: &Division) -> f64 {
        self.beside(division, self.threads).map_or(0.0, |(_, cpu)| {
            let (layer, rows) = (self.shape.layers / 2, division.chunk.max(1));
            cpu.layer_ns(layer, rows, LanePart::default())[1] / 1e9
        })
    }

    /// What the lane says of a plan.
    pub(super) fn explain_beside(&self, division: &Division, threads: usize) -> Vec<LanePlan> {
        let Some((lane, cpu)) = self.beside(division, threads) else {
            return Vec::new();
        };
        let chunk = division.chunk.max(1);
        let mut rows = vec![1, division.batch.max(1), chunk];
        rows.sort_unstable();
        rows.dedup();
        lane.times.explain(&LaneOutlook {
            cpu: &cpu,
            widths: &division.widths,
            held: division.needs.lane_clusters,
            visits: &self.visits,
            rows: &rows,
            chunk,
        })
    }
}
