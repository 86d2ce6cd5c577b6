//! Experts that a device computes in groups: the popularity of each, and which a device holds.

use emberflow_models::config::{Mixture, ModelConfig};

use crate::device::shared::Samples;
use crate::device::{Devices, Facts};
use crate::lanes::{ExpertSetup, GroupTimes, HeldBanks};
use crate::options::{Grouping, Options};
use crate::store::Layout;

/// Experts of a model whose devices compute them in groups.
#[derive(Debug, Clone)]
pub(crate) struct ExpertLoads {
    /// By layer: how often each expert is visited; empty in layers without a router.
    visits: Vec<Vec<f64>>,
    banks: HeldBanks,
    /// Experts that a token visits.
    chosen: usize,
    /// Neurons of an expert.
    neurons: usize,
    /// Share of Gate and Up in an expert's matrices.
    share: f64,
    grouping: Grouping,
}

/// Whether devices compute experts in groups: one alone, with the machine's memory and the CPU's bits, that holds what was
/// asked for. Groups know neither predictors nor scaled inputs.
pub(super) fn in_groups(
    devices: &Devices,
    c: &ModelConfig,
    options: &Options,
    predicted: bool,
) -> bool {
    let [device] = &devices[..] else {
        return false;
    };
    let knows = |facts: &Facts| facts.groups && facts.unified;
    let plain = |mixture: &Mixture| !mixture.scales_input;
    c.mixture.as_ref().is_some_and(plain)
        && !predicted
        && !options.lab.count_fired
        && options.device_memory.is_some()
        && device.verdict.same_bits
        && knows(device.facts())
}

impl ExpertLoads {
    /// Of a model whose banks are visited so often; `None` without experts.
    pub fn of(
        layout: &Layout,
        c: &ModelConfig,
        visits: &[f32],
        grouping: Grouping,
    ) -> Option<Self> {
        let mixture = c.mixture.as_ref()?;
        let experts = c.experts as usize;
        let often = |bank: u32| visits.get(bank as usize).copied().map_or(1.0, f64::from);
        let of_layer = |layer: usize| match layout.banks_of(layer) {
            banks if banks.len() >= experts => banks.take(experts).map(often).collect(),
            _ => Vec::new(),
        };
        let visits: Vec<Vec<f64>> = (0..layout.layers()).map(of_layer).collect();
        let neurons = expert_neurons(layout);
        let matrices = if c.ffn_kind.ungated { 2.0 } else { 3.0 };
        Some(Self {
            banks: banks(layout, &visits, neurons, often),
            visits,
            chosen: mixture.chosen as usize,
            neurons,
            share: (matrices - 1.0) / matrices,
            grouping,
        })
    }

    /// How a device with such times computes them, where the CPU takes `layer` seconds for `rows` rows of a layer.
    pub fn setup(&self, device: &Samples, layer: f64, rows: usize) -> ExpertSetup {
        ExpertSetup {
            visits: self.visits.clone(),
            banks: self.banks.clone(),
            chosen: self.chosen,
            times: GroupTimes {
                device: device.clone(),
                cpu_token: layer / (rows * self.chosen).max(1) as f64,
                neurons: self.neurons,
                share: self.share,
            },
            grouping: self.grouping,
        }
    }
}

/// The banks of a model that are visited so often, with the experts of each layer and their neurons.
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

/// Neurons of an expert: of the first one.
pub(super) fn expert_neurons(layout: &Layout) -> usize {
    let mut layers = (0..layout.layers()).map(|layer| layout.banks_of(layer));
    let first = layers.find(|banks| banks.len() > 1);
    first.map_or(0, |banks| layout.neurons(banks.start))
}
