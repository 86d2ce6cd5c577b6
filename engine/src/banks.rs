//! The banks of a model: their layers, neurons and clusters. Numbers only.

use std::ops::Range;

use crate::bundle::NeuronFormat;
use crate::cluster::CLUSTER;

/// The banks of a model, layer by layer. A bank holds the neurons of one FFN: (layer, expert).
#[derive(Debug, Clone)]
pub struct Banks {
    /// Format of their neurons.
    pub format: NeuronFormat,
    /// Banks of each layer.
    layers: Vec<Range<u32>>,
    /// Neurons of each bank.
    neurons: Vec<u32>,
    /// Most clusters visited at once; most neurons visited by a row.
    at_once: usize,
    neurons_visited: usize,
}

impl Banks {
    /// Banks of these layers and sizes, all of which a row visits.
    pub(crate) fn new(format: NeuronFormat, layers: Vec<Range<u32>>, neurons: Vec<u32>) -> Self {
        let mut banks = Self {
            format,
            layers,
            neurons,
            at_once: 0,
            neurons_visited: 0,
        };
        banks.set_visited(usize::MAX, true);
        banks
    }

    /// Limits the clusters of a layer visited at once to those that one row visits: the `chosen`
    /// largest experts of a layer with several banks, plus its last bank if `shared`.
    pub(crate) fn set_visited(&mut self, chosen: usize, shared: bool) {
        let of_layer = |banks: &Range<u32>, of: &dyn Fn(u32) -> usize| {
            let experts = banks.len() - usize::from(shared && banks.len() > 1);
            let most = (banks.clone().take(experts).map(of).max()).unwrap_or(0);
            let rest: usize = banks.clone().skip(experts).map(of).sum();
            chosen.min(experts).saturating_mul(most) + rest
        };
        let clusters = |bank| self.clusters(bank);
        let most = self.layers.iter().map(|banks| of_layer(banks, &clusters));
        let neurons = |bank| self.neurons(bank);
        let all = self.layers.iter().map(|banks| of_layer(banks, &neurons));
        let mean = all.sum::<usize>().div_ceil(self.layers.len().max(1));
        self.at_once = most.max().unwrap_or(0);
        self.neurons_visited = mean.min(self.most_in_layer());
    }

    /// Whether any layer has several banks, of which a row visits only some.
    pub fn has_experts(&self) -> bool {
        self.neurons.len() > self.layers.len()
    }

    /// Most clusters that a row visits in a layer.
    pub fn clusters_at_once(&self) -> usize {
        self.at_once
    }

    /// Neurons in these clusters.
    pub fn neurons_at_once(&self) -> usize {
        (self.at_once * CLUSTER).min(self.most_in_layer())
    }

    /// Neurons that a row visits in a layer, on average.
    pub fn neurons_visited(&self) -> usize {
        self.neurons_visited
    }

    /// Number of banks.
    pub fn banks(&self) -> usize {
        self.neurons.len()
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The banks of a layer; empty beyond the last layer.
    pub fn banks_of(&self, layer: usize) -> Range<u32> {
        self.layers.get(layer).cloned().unwrap_or(0..0)
    }

    /// The layer of a bank.
    pub fn layer_of(&self, bank: u32) -> usize {
        self.layers.partition_point(|banks| banks.end <= bank)
    }

    /// Neurons of each bank.
    pub fn sizes(&self) -> &[u32] {
        &self.neurons
    }

    /// Neurons of a bank.
    pub fn neurons(&self, bank: u32) -> usize {
        self.neurons[bank as usize] as usize
    }

    /// Neurons of the largest bank.
    pub fn most_neurons(&self) -> usize {
        self.neurons.iter().max().map_or(0, |&n| n as usize)
    }

    /// Neurons of all banks of the largest layer.
    pub fn most_in_layer(&self) -> usize {
        let of_layer = |banks: &Range<u32>| banks.clone().map(|b| self.neurons(b)).sum();
        self.layers.iter().map(of_layer).max().unwrap_or(0)
    }

    /// Neurons of the whole model.
    pub fn total(&self) -> u64 {
        self.neurons.iter().map(|&n| u64::from(n)).sum()
    }

    /// Clusters of a bank.
    pub fn clusters(&self, bank: u32) -> usize {
        self.neurons(bank).div_ceil(CLUSTER)
    }

    /// Clusters of each bank.
    pub fn clusters_of_each(&self) -> Vec<u32> {
        let clusters = |&n: &u32| n.div_ceil(CLUSTER as u32);
        self.neurons.iter().map(clusters).collect()
    }

    /// Clusters of the whole model.
    pub fn total_clusters(&self) -> u64 {
        self.clusters_of_each().iter().map(|&n| u64::from(n)).sum()
    }

    /// Neurons of a cluster.
    pub fn cluster_neurons(&self, bank: u32, cluster: u32) -> Range<u32> {
        let first = cluster * CLUSTER as u32;
        first..(first + CLUSTER as u32).min(self.neurons[bank as usize])
    }
}
