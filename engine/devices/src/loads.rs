//! Experts that a device computes in groups: how often each is visited, and which a device holds.

use std::fmt;
use std::sync::Arc;

use emberflow_engine::lane::{LaneModel, Layout};
use emberflow_models::config::Mixture;

use crate::backend::Facts;
use crate::experts::MOST_EXPERTS;
use crate::in_use::Devices;
use crate::lane::{ExpertSetup, GroupTimes, HeldBanks};
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

/// The experts of a model whose device computes them in groups.
#[derive(Clone)]
pub(crate) struct ExpertModel {
    layout: Arc<Layout>,
    /// Experts of a layer, and those that a token visits.
    experts: usize,
    pub chosen: usize,
    /// Share of Gate and Up in an expert's matrices.
    share: f64,
    grouping: Grouping,
}

impl fmt::Debug for ExpertModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ExpertModel").field(&self.experts).finish()
    }
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
            && !model.options.lab.count_fired
            && asked
            && device.verdict.same_bits
            && knows(device.facts());
        let matrices = if c.ffn_kind.ungated { 2.0 } else { 3.0 };
        fits.then(|| Self {
            layout: Arc::clone(model.layout),
            experts: c.experts as usize,
            chosen: mixture.chosen as usize,
            share: (matrices - 1.0) / matrices,
            grouping,
        })
    }

    /// Neurons of an expert: of the first one.
    pub fn neurons(&self) -> usize {
        let mut layers = (0..self.layout.layers()).map(|layer| self.layout.banks_of(layer));
        let first = layers.find(|banks| banks.len() > 1);
        first.map_or(0, |banks| self.layout.neurons(banks.start))
    }

    /// How a device with such times computes them, where the CPU takes `layer` seconds for `rows` rows of a layer. `visits`: how
    /// often each bank is visited.
    pub fn setup(&self, visits: &[f32], device: &Samples, layer: f64, rows: usize) -> ExpertSetup {
        let often = |bank: u32| visits.get(bank as usize).copied().map_or(1.0, f64::from);
        let of_layer = |layer: usize| match self.layout.banks_of(layer) {
            banks if banks.len() >= self.experts => banks.take(self.experts).map(often).collect(),
            _ => Vec::new(),
        };
        let visits: Vec<Vec<f64>> = (0..self.layout.layers()).map(of_layer).collect();
        ExpertSetup {
            banks: banks(&self.layout, &visits, self.neurons(), often),
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
fn banks(
    layout: &Layout,
    experts: &[Vec<f64>],
    neurons: usize,
    often: impl Fn(u32) -> f64,
) -> HeldBanks {
    let layers = 0..layout.layers();
    let first: Vec<u32> = layers.map(|layer| layout.banks_of(layer).start).collect();
    let chosen_from = |bank: u32| {
        let layer = layout.layer_of(bank);
        let experts = experts.get(layer).map_or(0, Vec::len);
        (experts, (bank - first[layer]) as usize)
    };
    let rank = |bank: u32| match chosen_from(bank) {
        (experts, place) if experts > 0 && place >= experts => -1.0,
        _ => often(bank),
    };
    let in_groups = |bank: u32| {
        let (experts, place) = chosen_from(bank);
        place < experts && layout.neurons(bank) == neurons
    };
    let all = 0..layout.banks() as u32;
    let mut order: Vec<u32> = all.clone().collect();
    order.sort_by(|&a, &b| rank(b).total_cmp(&rank(a)));
    HeldBanks {
        clusters: layout.clusters_of_each(),
        in_groups: all.map(in_groups).collect(),
        order,
        first,
    }
}
