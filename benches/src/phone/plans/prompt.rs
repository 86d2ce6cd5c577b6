//! A chunk of a prompt with a plan: layer by layer beside the device, or in parts.

use emberflow_engine::CLUSTER;
use emberflow_engine::planner::{Division, Firing};
use emberflow_engine::schedule::{InParts, Processors, Rule, Slot, by_rule, makespan};

use super::costs::{CPU, Costs, FLASH, Graph, NAMES, NPU, Read, Work};
use super::token::Regions;

/// A pass of a chunk.
pub struct Chunk<'a> {
    /// Times.
    pub costs: &'a Costs<'a>,
    /// Where neurons are.
    pub regions: &'a Regions,
    /// The division.
    pub division: &'a Division,
    /// How often neurons fire.
    pub firing: &'a Firing,
    /// Its rows.
    pub rows: usize,
    /// Positions before it.
    pub before: usize,
}

/// A layer's clusters that are computed together.
struct Piece {
    neurons: usize,
    /// Of these, those that fire for a row of the CPU.
    touched: f64,
    /// Its reads, and the neurons that they bring.
    read: Read,
    missed: f64,
    /// Whether the device holds it.
    held: bool,
}

impl Chunk<'_> {
    /// How it runs in parts, if it does.
    pub fn parts(&self) -> Option<&InParts> {
        let division = self.division;
        let parts = division.widths.parts(self.rows);
        parts.filter(|_| division.runs_in_parts(self.rows))
    }

    /// Its operations.
    pub fn graph(&self) -> Graph {
        let mut graph = match self.parts() {
            Some(parts) => self.in_parts(parts),
            None => self.by_layers(),
        };
        // The head computes the last row.
        let last: Vec<usize> = graph.operations.len().checked_sub(1).into_iter().collect();
        graph.push("output", CPU, self.costs.head(), &last);
        graph
    }

    /// When each operation runs. In parts, by the faster of the rules that decide while operations run.
    pub fn slots(&self, graph: &Graph, bandwidth: f64) -> Vec<Slot> {
        if self.parts().is_none() {
            return graph.slots(bandwidth);
        }
        let processors = Processors {
            names: NAMES,
            bandwidth,
        };
        let by = |rule| by_rule(&graph.operations, &processors, NPU, rule).slots;
        let [in_order, stalls] = [Rule::InOrder, Rule::Stalls].map(by);
        match makespan(&stalls) < makespan(&in_order) {
            true => stalls,
            false => in_order,
        }
    }

    /// The mixer of one part beside the FFN of another.
    fn in_parts(&self, parts: &InParts) -> Graph {
        let costs = self.costs;
        let each = parts.rows_of(self.rows).max(1);
        let count = self.rows.div_ceil(each);
        let mut graph = Graph::new(costs);
        let mut last: Vec<Option<usize>> = vec![None; count];
        for _ in 0..self.regions.first.len() {
            let mut mixer = None;
            for (part, last) in last.iter_mut().enumerate() {
                let rows = each.min(self.rows - part * each);
                let mut after: Vec<usize> = [*last, mixer].into_iter().flatten().collect();
                after.dedup();
                let own = costs.mixer(rows, self.before + part * each);
                mixer = Some(graph.push("attention", CPU, own, &after));
                let ffn = self.of_device(costs.shape.neurons, rows);
                *last = mixer.map(|mixer| graph.push("ffn", NPU, Work::apart(ffn), &[mixer]));
            }
        }
        let ends: Vec<usize> = last.into_iter().flatten().collect();
        graph.push("output", CPU, Work::apart(0.0), &ends);
        graph
    }

    fn of_device(&self, neurons: usize, rows: usize) -> f64 {
        let device = self.costs.device();
        device.map_or(0.0, |device| device.seconds(neurons, rows))
    }

    /// A layer's clusters in pieces of a device's buffer.
    fn pieces(&self, layer: usize, own: usize) -> Vec<Piece> {
        let (costs, regions) = (self.costs, self.regions);
        let neurons = costs.shape.neurons;
        let at_once = costs.device().map_or(8, |device| device.at_once.max(1)) * CLUSTER;
        let sparse = layer < regions.gate_layers;
        let cached = match sparse {
            true => regions.slots as usize / regions.gate_layers.max(1),
            false => 0,
        };
        let resident = regions.first[layer] + cached;
        let wanted = self.division.widths.clusters(layer, self.rows);
        let held = wanted.map_or(regions.held[layer], |wanted| {
            regions.held[layer].min(wanted as usize)
        });
        let fires = |from: usize, until: usize, rows: usize| {
            self.firing.fires(layer, from, rows) - self.firing.fires(layer, until, rows)
        };
        let of = |from: usize| {
            let until = (from + at_once).min(neurons);
            let (mut read, mut missed) = (Read::default(), 0.0);
            for first in (from.max(resident)..until).step_by(CLUSTER) {
                let last = (first + CLUSTER).min(until);
                let fired = fires(first, last, self.rows);
                missed += if sparse { fired } else { 0.0 };
                read = read.and(match sparse {
                    true => costs.picks(fired),
                    false => costs.streamed(),
                });
            }
            Piece {
                neurons: until - from,
                touched: fires(from, until, own.max(1)),
                read,
                missed,
                held: until <= held * CLUSTER,
            }
        };
        (0..neurons).step_by(at_once).map(of).collect()
    }

    /// The CPU and the device divide rows or clusters of each layer.
    fn by_layers(&self) -> Graph {
        let costs = self.costs;
        let streamed = self.division.widths.streamed(self.rows);
        let own = self.rows - streamed;
        let at_once = costs.device().map_or(8, |device| device.at_once.max(1));
        let ahead = (self.regions.buffers / at_once).max(1);
        let mut graph = Graph::new(costs);
        let (mut last, mut passed): (Vec<usize>, Vec<Vec<usize>>) = (Vec::new(), Vec::new());
        for layer in 0..self.regions.first.len() {
            let mixer = costs.mixer(self.rows, self.before);
            let mixed = graph.push("attention", CPU, mixer, &last);
            // Which neurons are read follows from the gates, if they are resident.
            let known = (layer < self.regions.gate_layers).then_some(mixed);
            last.clear();
            for piece in self.pieces(layer, own) {
                let mut after = vec![mixed];
                if piece.read.seconds > 0.0 {
                    let free = passed.len().checked_sub(ahead).map(|n| passed[n].clone());
                    let free: Vec<usize> = free.into_iter().flatten().chain(known).collect();
                    after.push(graph.push("read", FLASH, Work::apart(piece.read.seconds), &free));
                }
                let its = match () {
                    () if streamed > 0 => streamed,
                    () if piece.held => self.rows,
                    () => 0,
                };
                let mut ends = Vec::new();
                if its > 0 {
                    let seconds = self.of_device(piece.neurons, its);
                    ends.push(graph.push("ffn", NPU, Work::apart(seconds), &after));
                }
                let rows = self.rows - its;
                if rows > 0 {
                    let gates = costs.gates(piece.neurons as f64, rows);
                    let sums = costs.sums(piece.touched, rows).seconds;
                    let arriving = piece.read.checking + costs.admitting(piece.missed);
                    let work = gates.and(sums + arriving);
                    ends.push(graph.push("ffn", CPU, work, &after));
                }
                if piece.read.seconds > 0.0 {
                    passed.push(ends.clone());
                }
                last.extend(ends);
            }
        }
        // One operation after all.
        graph.push("output", CPU, Work::apart(0.0), &last);
        graph
    }
}
