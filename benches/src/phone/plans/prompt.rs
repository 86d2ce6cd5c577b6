//! A chunk of a prompt with a plan: layer by layer beside the device, as the engine runs it; and in parts.

use emberflow_engine::CLUSTER;
use emberflow_engine::planner::{Division, Firing};

use super::super::schedule::{
    PartGraph, PartOrder, PartStep, Processors, followers, makespan, part_rows, simulate,
};
use super::costs::{CPU, Costs, FLASH, Graph, NAMES, NPU, Read, Work};
use super::token::Regions;

/// Numbers of parts that are compared.
const PARTS: std::ops::RangeInclusive<usize> = 2..=4;

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

/// A pass in parts (llm.npu, §3.4): the CPU mixes one part while the device computes the FFN of another.
pub struct PassInParts {
    /// Rows of a part.
    pub rows: usize,
    /// Its operations.
    pub graph: Graph,
    /// Which part comes next.
    pub order: PartOrder,
}

impl PassInParts {
    /// Seconds of all of it, with so many GB/s of all processors together.
    pub fn seconds(&self, bandwidth: f64) -> f64 {
        let operations = &self.graph.operations;
        let processors = Processors {
            names: NAMES,
            bandwidth,
        };
        let mut scheduler = self.order.scheduler(operations, NAMES.len());
        makespan(&simulate(operations, &processors, &mut *scheduler))
    }
}

impl Chunk<'_> {
    /// Its operations, layer by layer.
    pub fn graph(&self) -> Graph {
        let mut graph = self.by_layers();
        // The head computes the last row.
        let last: Vec<usize> = graph.operations.len().checked_sub(1).into_iter().collect();
        graph.push("output", CPU, self.costs.head(), &last);
        graph
    }

    /// The fastest way to run it in two to four parts. `None` without a device, with too few rows, or if something is read:
    /// each part would read it again.
    pub fn in_parts(&self, bandwidth: f64) -> Option<PassInParts> {
        self.costs
            .device()
            .filter(|_| self.division.is_resident())?;
        let rows = PARTS.map(|parts| part_rows(self.rows.div_ceil(parts), self.rows));
        let ways = rows
            .filter(|&rows| rows > 0)
            .map(|rows| self.parts_of(rows));
        ways.min_by(|a, b| a.seconds(bandwidth).total_cmp(&b.seconds(bandwidth)))
    }

    /// In parts of `each` rows.
    fn parts_of(&self, each: usize) -> PassInParts {
        let costs = self.costs;
        let part = |first: usize| {
            let rows = each.min(self.rows - first);
            let ffn = self.of_device(costs.shape.neurons, rows);
            [costs.mixer(rows, self.before + first), Work::apart(ffn)]
        };
        let parts: Vec<[Work; 2]> = (0..self.rows).step_by(each).map(part).collect();
        let seconds: Vec<[f64; 3]> = (parts.iter())
            .map(|[mix, feed]| [0.0, mix.seconds, feed.seconds])
            .collect();
        let layers = std::iter::repeat_n([false, true, true], self.regions.first.len());
        let planned = PartGraph::new(layers, &seconds);
        let mut graph = Graph::new(costs);
        for (operation, place) in planned.operations.iter().zip(&planned.places) {
            let [mix, feed] = parts[place.part];
            let (on, work) = match place.step {
                PartStep::Mix => (CPU, mix),
                PartStep::Project | PartStep::Feed => (NPU, feed),
            };
            graph.push(operation.kind, on, work, &operation.after);
        }
        let after = followers(&graph.operations);
        let ends: Vec<usize> = (0..after.len())
            .filter(|&at| after[at].is_empty())
            .collect();
        graph.push("output", CPU, costs.head(), &ends);
        PassInParts {
            rows: each,
            order: PartOrder::fastest(&planned),
            graph,
        }
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
