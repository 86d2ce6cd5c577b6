//! Experts that a device computes in groups: how often each is visited, and which a device holds.

use std::sync::Arc;

use emberflow_engine::lane::{Banks, LaneModel};
use emberflow_models::config::Mixture;

use crate::backend::Facts;
use crate::experts::MOST_EXPERTS;
use crate::in_use::Devices;
use crate::split::{Curve, Product};
use crate::tiers::{ExpertTimes, GroupLimits, Placement, expected};
use crate::times::Samples;

/// Which experts a device computes in groups, of those that it holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Grouping {
    /// Those for which its measured times say that it is faster.
    #[default]
    Measured,
    /// All.
    All {
        /// Most experts of a group.
        experts: usize,
        /// Most tokens of an expert; 0 to choose by load.
        capacity: usize,
    },
}

impl Grouping {
    /// Most experts of a group.
    pub(crate) fn most(self) -> usize {
        match self {
            Self::Measured => MOST_EXPERTS,
            Self::All { experts, .. } => experts.clamp(1, MOST_EXPERTS),
        }
    }
}

/// Inputs of the placement of experts.
#[derive(Debug, Clone)]
pub(crate) struct ExpertSetup {
    /// By layer: how often each expert is visited, all alike without statistics; empty without experts.
    pub visits: Vec<Vec<f64>>,
    /// The model's banks.
    pub banks: HeldBanks,
    /// Experts that a token visits.
    pub chosen: usize,
    /// Times of device and CPU.
    pub times: GroupTimes,
    /// Whether times decide.
    pub grouping: Grouping,
}

/// Banks of a model, whole ones of which a device holds.
#[derive(Debug, Clone)]
pub(crate) struct HeldBanks {
    /// Clusters of each.
    pub clusters: Vec<u32>,
    /// Whether each is an expert of the size that groups have.
    pub in_groups: Vec<bool>,
    /// Banks in order of preference: the most visited first, shared experts last.
    pub order: Vec<u32>,
    /// By layer: its first bank.
    pub first: Vec<u32>,
}

impl HeldBanks {
    /// By bank: clusters that a device with room for `clusters` holds. All banks but one are held whole or not at all.
    pub fn held(&self, clusters: u64) -> Vec<u32> {
        let (mut held, mut left) = (vec![0; self.clusters.len()], clusters);
        for &bank in &self.order {
            let bank = bank as usize;
            held[bank] = self.clusters[bank].min(u32::try_from(left).unwrap_or(u32::MAX));
            left -= u64::from(held[bank]);
        }
        held
    }

    /// Whether an expert of a layer is computed in groups, if a device holds `held[bank]` clusters of each bank.
    pub fn is_in_groups(&self, layer: usize, expert: usize, held: &[u32]) -> bool {
        let bank = self
            .first
            .get(layer)
            .map_or(usize::MAX, |&first| first as usize + expert);
        self.in_groups.get(bank) == Some(&true) && held.get(bank) == self.clusters.get(bank)
    }
}

/// Seconds of Gate and Up of experts.
#[derive(Debug, Clone)]
pub(crate) struct GroupTimes {
    /// The device's, by neurons and tokens, with Down.
    pub device: Samples,
    /// All compute threads' for a token of an expert, with Down.
    pub cpu_token: f64,
    /// Neurons of an expert.
    pub neurons: usize,
    /// Share of Gate and Up in an expert's matrices.
    pub share: f64,
}

impl ExpertTimes for GroupTimes {
    fn on_npu(&self, experts: usize, capacity: usize) -> f64 {
        let of = |rows| {
            let (cols, n) = (1, capacity);
            self.device.seconds(Product { rows, cols, n })
        };
        // The line through two numbers of neurons: launches, and what each neuron takes.
        let launch = (2.0 * of(self.neurons) - of(2 * self.neurons)).max(0.0);
        launch + experts as f64 * self.share * (of(self.neurons) - launch)
    }

    fn on_cpu(&self, tokens: f64) -> f64 {
        self.share * self.cpu_token * tokens
    }
}

impl ExpertSetup {
    /// Experts of a layer that its router chooses from; 0 without a router.
    pub fn experts(&self, layer: usize) -> usize {
        self.visits.get(layer).map_or(0, Vec::len)
    }

    /// Placement of the experts of a layer in passes of `rows` rows, if the device holds `held[bank]` clusters of each bank.
    pub fn place(&self, layer: usize, rows: usize, held: &[u32]) -> Placement {
        let held = |expert: usize| self.banks.is_in_groups(layer, expert, held);
        let visits = self.visits.get(layer).map_or(&[][..], Vec::as_slice);
        let loads = expected(visits, rows, self.chosen);
        let limits = GroupLimits {
            rows,
            expert_bytes: 1,
            graph_bytes: self.grouping.most() as u64,
            short: true,
        };
        let Grouping::All { capacity, .. } = self.grouping else {
            return limits.place(&loads, held, &self.times);
        };
        let mut groups = limits.groups(&loads, held);
        if capacity > 0 {
            (groups.iter_mut()).for_each(|group| group.capacity = capacity);
        }
        Placement {
            groups,
            on_cpu: (0..loads.len()).filter(|&expert| !held(expert)).collect(),
        }
    }
}

/// The experts of a model whose device computes them in groups.
#[derive(Debug, Clone)]
pub(crate) struct ExpertModel {
    banks: Arc<Banks>,
    /// Experts of a layer, and those that a token visits.
    experts: usize,
    pub chosen: usize,
    /// Share of Gate and Up in an expert's matrices.
    share: f64,
    grouping: Grouping,
}

impl ExpertModel {
    /// The experts of a model, if devices compute them in groups: one alone, with the machine's memory and the CPU's bits,
    /// that the user has given a size. Groups know neither predictors nor scaled inputs.
    pub fn of(
        model: &LaneModel<'_>,
        devices: &Devices,
        asked: bool,
        grouping: Grouping,
    ) -> Option<Self> {
        let [device] = &devices[..] else { return None };
        let knows = |facts: &Facts| facts.groups && facts.unified;
        let c = model.config;
        let mixture: &Mixture = c.mixture.as_ref()?;
        let fits = !mixture.scales_input
            && !model.predicted
            && !model.counted
            && asked
            && device.verdict.same_bits
            && knows(device.facts());
        let matrices = if c.ffn_kind.ungated { 2.0 } else { 3.0 };
        fits.then(|| Self {
            banks: Arc::clone(model.banks),
            experts: c.experts as usize,
            chosen: mixture.chosen as usize,
            share: (matrices - 1.0) / matrices,
            grouping,
        })
    }

    /// Neurons of an expert: of the first one.
    pub fn neurons(&self) -> usize {
        let mut layers = (0..self.banks.layers()).map(|layer| self.banks.banks_of(layer));
        let first = layers.find(|banks| banks.len() > 1);
        first.map_or(0, |banks| self.banks.neurons(banks.start))
    }

    /// How a device with such times computes them, where the CPU takes `layer` seconds for `rows` rows of a layer. `visits`: how
    /// often each bank is visited.
    pub fn setup(&self, visits: &[f32], device: &Samples, layer: f64, rows: usize) -> ExpertSetup {
        let often = |bank: u32| visits.get(bank as usize).copied().map_or(1.0, f64::from);
        let of_layer = |layer: usize| match self.banks.banks_of(layer) {
            banks if banks.len() >= self.experts => banks.take(self.experts).map(often).collect(),
            _ => Vec::new(),
        };
        let visits: Vec<Vec<f64>> = (0..self.banks.layers()).map(of_layer).collect();
        ExpertSetup {
            banks: held_order(&self.banks, &visits, self.neurons(), often),
            visits,
            chosen: self.chosen,
            times: GroupTimes {
                device: device.clone(),
                cpu_token: layer / (rows * self.chosen).max(1) as f64,
                neurons: self.neurons(),
                share: self.share,
            },
            grouping: self.grouping,
        }
    }
}

/// The banks of a model that are visited this often, with the experts of each layer and their neurons.
fn held_order(
    model: &Banks,
    experts: &[Vec<f64>],
    neurons: usize,
    often: impl Fn(u32) -> f64,
) -> HeldBanks {
    let layers = 0..model.layers();
    let first: Vec<u32> = layers.map(|layer| model.banks_of(layer).start).collect();
    let chosen_from = |bank: u32| {
        let layer = model.layer_of(bank);
        let experts = experts.get(layer).map_or(0, Vec::len);
        (experts, (bank - first[layer]) as usize)
    };
    let rank = |bank: u32| match chosen_from(bank) {
        (experts, place) if experts > 0 && place >= experts => -1.0,
        _ => often(bank),
    };
    let in_groups = |bank: u32| {
        let (experts, place) = chosen_from(bank);
        place < experts && model.neurons(bank) == neurons
    };
    let all = 0..model.banks() as u32;
    let mut order: Vec<u32> = all.clone().collect();
    order.sort_by(|&a, &b| rank(b).total_cmp(&rank(a)));
    HeldBanks {
        clusters: model.clusters_of_each(),
        in_groups: all.map(in_groups).collect(),
        order,
        first,
    }
}
