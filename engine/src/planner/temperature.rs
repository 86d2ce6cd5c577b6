//! Hot clusters, from the container's activation statistics.

use emberflow_models::config::ModelConfig;
use emberflow_predictor::stats::routing::ExpertMisses;
use emberflow_predictor::stats::{ActivationStats, BATCHES, Misses, StatsError};

use crate::cluster::hot_prefix;
use crate::error::Error;
use crate::store::Layout;

/// Activation statistics of a model.
pub(crate) struct Temperature {
    /// Hot clusters of each bank, for batches of 1, 2, … sequences.
    pub hot_clusters: Vec<Vec<u32>>,
    /// By bank: each neuron's activation frequency; empty without statistics.
    pub frequencies: Vec<Vec<f32>>,
    /// Probability that a firing neuron also fires for the next token, if measured.
    pub persistence: Option<f64>,
    /// Measured miss curve, if any.
    pub misses: Option<Misses>,
    /// Routing statistics, with experts.
    pub popularity: Popularity,
    /// By layer: activation frequency of the neurons of visited experts; empty if not counted.
    pub visited: Vec<Vec<f32>>,
}

/// How often experts are visited, from the container's routing statistics.
#[derive(Debug, Clone, Default)]
pub(crate) struct Popularity {
    /// By bank: share of the tokens that visit it; empty without statistics.
    pub visits: Vec<f32>,
    /// Measured miss rates of a cache of experts.
    pub misses: Option<ExpertMisses>,
}

/// Counts at the largest measured batch size up to `batch`: (passes in which each neuron fired,
/// passes, batch size).
fn measured<'a>(
    stats: &'a ActivationStats,
    counts: &'a [u64],
    bank: usize,
    batch: usize,
) -> (&'a [u64], u64, usize) {
    let larger = stats.profile.iter().flat_map(|profile| {
        let sizes = BATCHES.iter().zip(profile.steps).enumerate();
        sizes.filter_map(move |(i, (&size, steps))| {
            let known = size <= batch && steps > 0;
            let counts = profile.union(counts, bank, i).filter(|_| known)?;
            Some((counts, steps, size))
        })
    });
    larger.last().unwrap_or((counts, stats.tokens, 1))
}

/// Share of firing neurons that fire again for the next token.
fn persistence(stats: &ActivationStats) -> Option<f64> {
    let profile = stats.profile.as_ref()?;
    let sum = |counts: &[u64]| counts.iter().map(|&c| c as f64).sum::<f64>();
    let experts = stats.layers.iter().flat_map(|l| &l.experts);
    let fired: f64 = experts.map(|e| sum(&e.counts)).sum();
    let stayed: f64 = profile.banks.iter().map(|b| sum(&b.stayed)).sum();
    // Only firings followed by another token count.
    let followed = fired * profile.pairs as f64 / stats.tokens.max(1) as f64;
    (followed > 0.0).then(|| stayed / followed)
}

impl Temperature {
    /// Reads the statistics section, for up to `batch` sequences. Without it, no cluster is hot.
    pub fn read(layout: &Layout, c: &ModelConfig, batch: usize) -> Result<Self, Error> {
        let banks = layout.banks();
        let none = || Self {
            hot_clusters: vec![vec![0; banks]; batch],
            frequencies: Vec::new(),
            persistence: None,
            misses: None,
            popularity: Popularity::default(),
            visited: Vec::new(),
        };
        let bytes = layout.container.read_stats()?;
        if bytes.is_empty() {
            return Ok(none());
        }
        let bad = |e: StatsError| Error::Bundles {
            path: layout.container.path().to_path_buf(),
            reason: e.to_string(),
        };
        if c.mixture.is_some() {
            let (layers, experts) = (layout.layers(), c.experts as usize);
            let stats = ActivationStats::parse_routing(&bytes, layers, experts).map_err(bad)?;
            return Ok(Self {
                popularity: Popularity::of(&stats, layout),
                frequencies: of_experts(&stats, layout),
                visited: visited(&stats, layout),
                ..none()
            });
        }
        let neurons: Vec<usize> = (0..banks as u32).map(|b| layout.neurons(b)).collect();
        let stats = ActivationStats::parse(&bytes, &neurons, 1).map_err(bad)?;
        let hot = |bank: usize, batch: usize| {
            let counts = stats.counts(bank as u32, 0).unwrap_or_default();
            let (counts, passes, tokens) = measured(&stats, counts, bank, batch);
            hot_prefix(counts, passes, batch as f64 / tokens as f64)
        };
        let often = |count: &u64| (*count as f64 / stats.tokens.max(1) as f64) as f32;
        let frequencies = |bank: usize| {
            let counts = stats.counts(bank as u32, 0).unwrap_or_default();
            counts.iter().map(often).collect()
        };
        let of_batch = |batch| (0..banks).map(|bank| hot(bank, batch)).collect();
        Ok(Self {
            hot_clusters: (1..=batch).map(of_batch).collect(),
            frequencies: (0..banks).map(frequencies).collect(),
            persistence: persistence(&stats),
            misses: (stats.profile.as_ref().map(|p| p.misses)).filter(|m| !m.is_empty()),
            popularity: Popularity::default(),
            visited: Vec::new(),
        })
    }
}

/// By bank: activation frequency of each neuron of an expert. Empty without counts, and for other
/// banks.
fn of_experts(stats: &ActivationStats, layout: &Layout) -> Vec<Vec<f32>> {
    let Some(routing) = stats.routing().filter(|r| r.counts_neurons()) else {
        return Vec::new();
    };
    let mut all = vec![Vec::new(); layout.banks()];
    let often = |count: &u64| (*count as f64 / stats.tokens.max(1) as f64) as f32;
    for (number, layer) in routing.layers.iter().enumerate() {
        for (bank, expert) in layout.banks_of(number).zip(&layer.neurons) {
            all[bank as usize] = expert.counts.iter().map(often).collect();
        }
    }
    all
}

/// By layer: activation frequency of the neurons that a token visits, expert by expert, each at the
/// mean of its layer; other banks at the overall mean. Empty without counts.
fn visited(stats: &ActivationStats, layout: &Layout) -> Vec<Vec<f32>> {
    let Some(routing) = stats.routing().filter(|r| r.counts_neurons()) else {
        return Vec::new();
    };
    let layers: Vec<Option<Vec<f32>>> = routing.layers.iter().map(|l| l.firing()).collect();
    let counted = || layers.iter().flatten().flatten();
    let mean = counted().sum::<f32>() / (counted().count() as f32).max(1.0);
    let neurons = layout.neurons_visited();
    let of_layer = |firing: &Option<Vec<f32>>| {
        let mut all = firing
            .as_deref()
            .unwrap_or(&[])
            .repeat(routing.chosen as usize);
        all.resize(neurons, mean);
        all
    };
    layers.iter().map(of_layer).collect()
}

impl Popularity {
    /// From the statistics of a model with the banks of `layout`. Every token visits banks without
    /// routes: dense layers and shared experts.
    fn of(stats: &ActivationStats, layout: &Layout) -> Self {
        let profile = stats.profile.as_deref();
        let Some(routing) = profile.and_then(|p| p.routing.as_ref()) else {
            return Self::default();
        };
        let mut visits = vec![1.0; layout.banks()];
        for (number, layer) in routing.layers.iter().enumerate() {
            let banks = layout.banks_of(number).map(|bank| bank as usize);
            for (bank, often) in banks.zip(layer.popularity(stats.tokens)) {
                visits[bank] = often as f32;
            }
        }
        Self {
            visits,
            misses: Some(routing.misses).filter(|m| m.needed > 0),
        }
    }
}
