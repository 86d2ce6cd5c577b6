//! A token with a plan: which neurons fire is drawn, and the cold region is the engine's cache.

use emberflow::Failure;
use emberflow::cold::Cold;
use emberflow_engine::planner::{Division, Firing, Planner};
use emberflow_engine::{CLUSTER, GATE_PIECES};
use emberflow_storage::cache::Key;

use super::costs::{CPU, Costs, FLASH, Graph, NPU, Read, Work};

/// Neurons that fire, by layer, ascending.
pub type Fired = Vec<Vec<u32>>;

/// Draws `count` consecutive tokens: a neuron's firing depends on whether it fired for the token before.
pub fn draw(firing: &Firing, count: usize, seed: u64) -> Vec<Fired> {
    let mut random = fastrand::Rng::with_seed(seed);
    let banks = firing.banks.len();
    let mut out = vec![vec![Vec::new(); banks]; count];
    for bank in 0..banks {
        for (neuron, often) in (0u32..).zip(firing.each(bank)) {
            // By the forecast's chain: firing anew, and again.
            let silent = 1.0 - often;
            let begins = match silent > 0.0 {
                true => 1.0 - (1.0 - firing.touched(often, 2)) / silent,
                false => 1.0,
            };
            let again = 1.0 - silent * (begins / often.max(1e-12)).min(1.0);
            let mut fires = random.f64() < often;
            for token in &mut out {
                if fires {
                    token[bank].push(neuron);
                }
                fires = random.f64() < if fires { again } else { begins };
            }
        }
    }
    out
}

/// A plan's regions, by layer.
pub struct Regions {
    /// Layers whose Gate rows are resident.
    pub gate_layers: usize,
    /// The first neuron outside the hot region and the device, by layer.
    pub first: Vec<usize>,
    /// Clusters on the device, by layer.
    pub held: Vec<usize>,
    /// Slots of the cold region.
    pub slots: u64,
    /// Stream buffers.
    pub buffers: usize,
}

impl Regions {
    /// Of a division.
    pub fn of(planner: &Planner, division: &Division) -> Self {
        let all = vec![planner.shape.neurons.div_ceil(CLUSTER) as u32; planner.shape.layers];
        let held = emberflow_engine::cluster::prefixes(division.needs.lane_clusters, &all, &all);
        Self {
            gate_layers: division.memory.gate_banks as usize,
            first: planner.first_cold(division),
            held: held.into_iter().map(|n| n as usize).collect(),
            slots: division.memory.slots,
            buffers: division.memory.stream_buffers as usize,
        }
    }

    /// The cold region, filled with the neurons that fire most often.
    pub fn cold(&self, firing: &Firing, neurons: usize) -> Result<Cold, Failure> {
        let banks = vec![neurons as u32; self.first.len()];
        let mut cold = Cold::new(self.slots, &banks)?;
        let mut all: Vec<(f64, Key)> = Vec::new();
        for bank in 0..self.gate_layers.min(self.first.len()) {
            let cold_ones = (0u32..).zip(firing.each(bank)).skip(self.first[bank]);
            all.extend(cold_ones.map(|(n, often)| (often, Key::new(bank as u32, n))));
        }
        all.iter()
            .for_each(|&(often, key)| cold.set_prior(key, often));
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        let most = usize::try_from(self.slots).unwrap_or(usize::MAX);
        all.iter().take(most).for_each(|&(_, key)| cold.fill(key));
        Ok(cold)
    }
}

/// A pass of one token.
pub struct Token<'a> {
    /// Times.
    pub costs: &'a Costs<'a>,
    /// Where neurons are.
    pub regions: &'a Regions,
    /// The division's clusters of the device.
    pub division: &'a Division,
    /// Positions before it.
    pub before: usize,
}

impl Token<'_> {
    /// Its operations, and what it leaves in the cold region.
    pub fn graph(&self, fired: &Fired, cold: &mut Cold) -> Graph {
        let mut graph = Graph::new(self.costs);
        let mut last: Vec<usize> = Vec::new();
        let mut streamed: Vec<usize> = Vec::new();
        for (layer, fired) in fired.iter().enumerate() {
            let mixer = self.costs.mixer(1, self.before);
            let mixed = graph.push("attention", CPU, mixer, &last);
            last = match layer < self.regions.gate_layers {
                true => self.sparse(&mut graph, layer, fired, cold, mixed),
                false => self.whole(&mut graph, layer, fired, &mut streamed, mixed),
            };
        }
        graph.push("output", CPU, self.costs.head(), &last);
        graph
    }

    /// Neurons of a layer that the device computes.
    fn of_device(&self, layer: usize) -> usize {
        let held = self.regions.held[layer];
        let wanted = self.division.widths.clusters(layer, 1);
        let clusters = wanted.map_or(held, |wanted| held.min(wanted as usize));
        (clusters * CLUSTER).min(self.costs.shape.neurons)
    }

    fn on_device(&self, graph: &mut Graph, neurons: usize, after: usize) -> Option<usize> {
        let device = self.costs.device().filter(|_| neurons > 0)?;
        let work = Work {
            seconds: device.seconds(neurons, 1),
            by_memory: true,
        };
        Some(graph.push("ffn", NPU, work, &[after]))
    }

    /// A layer with Gate rows: gates in pieces, reads of each piece's misses, sums of hits, sums of misses.
    fn sparse(
        &self,
        graph: &mut Graph,
        layer: usize,
        fired: &[u32],
        cold: &mut Cold,
        mixed: usize,
    ) -> Vec<usize> {
        let (costs, neurons) = (self.costs, self.costs.shape.neurons);
        let (its, first) = (self.of_device(layer), self.regions.first[layer]);
        cold.begin_layer(layer as u32);
        // What is in memory needs no pieces.
        let pieces = if first < neurons { GATE_PIECES } else { 1 };
        let piece = (neurons - its).div_ceil(pieces).next_multiple_of(CLUSTER);
        let (mut gates, mut reads, mut found) = (mixed, Vec::new(), 0);
        for from in (its..neurons).step_by(piece.max(1)) {
            let until = (from + piece).min(neurons);
            gates = graph.push("ffn", CPU, costs.gates((until - from) as f64, 1), &[gates]);
            let range = fired.partition_point(|&n| (n as usize) < from)
                ..fired.partition_point(|&n| (n as usize) < until);
            let (mut read, mut missed) = (Read::default(), 0);
            for cluster in
                fired[range.clone()].chunk_by(|a, b| *a as usize / CLUSTER == *b as usize / CLUSTER)
            {
                let absent =
                    |&&n: &&u32| n as usize >= first && !cold.find(Key::new(layer as u32, n));
                let absent = cluster.iter().filter(absent).count();
                read = read.and(costs.picks(absent as f64));
                missed += absent;
            }
            found += range.len() - missed;
            if missed > 0 {
                let number = graph.push("read", FLASH, Work::apart(read.seconds), &[gates]);
                reads.push((number, missed, read.checking));
            }
        }
        cold.end_layer();
        let device = self.on_device(graph, its, gates);
        let missed: usize = reads.iter().map(|read| read.1).sum();
        let own = costs.sums(found as f64, 1);
        let own = own.and(costs.bookkeeping(found, missed));
        let mut sums = graph.push("ffn", CPU, own, &[gates]);
        for (read, missed, checking) in reads {
            let work = costs.sums(missed as f64, 1).and(checking);
            sums = graph.push("ffn", CPU, work, &[sums, read]);
        }
        device.into_iter().chain([sums]).collect()
    }

    /// A layer that streams: clusters that are not held are read ahead, as far as there are buffers.
    fn whole(
        &self,
        graph: &mut Graph,
        layer: usize,
        fired: &[u32],
        streamed: &mut Vec<usize>,
        mixed: usize,
    ) -> Vec<usize> {
        let (costs, neurons) = (self.costs, self.costs.shape.neurons);
        let (its, first) = (self.of_device(layer), self.regions.first[layer]);
        let fires = |from: usize, until: usize| {
            let at = |n: usize| fired.partition_point(|&fired| (fired as usize) < n);
            (at(until) - at(from)) as f64
        };
        let both = |from: usize, until: usize| {
            let gates = costs.gates((until - from) as f64, 1);
            gates.and(costs.sums(fires(from, until), 1).seconds)
        };
        let device = self.on_device(graph, its, mixed);
        let own = both(its, first.max(its)).and(costs.bookkeeping(0, 0));
        let mut last = graph.push("ffn", CPU, own, &[mixed]);
        for from in (first.max(its)..neurons).step_by(CLUSTER) {
            let free = streamed.len().checked_sub(self.regions.buffers);
            let free: Vec<usize> = free.map(|n| streamed[n]).into_iter().collect();
            let whole = costs.streamed();
            let read = graph.push("read", FLASH, Work::apart(whole.seconds), &free);
            let work = both(from, (from + CLUSTER).min(neurons)).and(whole.checking);
            last = graph.push("ffn", CPU, work, &[last, read]);
            streamed.push(last);
        }
        device.into_iter().chain([last]).collect()
    }
}
