//! Experts that a device computes in groups: which, by their popularity, the device's measured times and the CPU's forecast.

use super::budget::Division;
use super::cost::ResidentLayer;
use super::facts::{Planner, chunks};
use super::inputs::Opened;
use super::plan::{ExpertPlan, GroupPlan};
use crate::device::{DeviceError, Devices, Facts, GroupShape, Program};
use crate::lanes::{Banks, ExpertSetup, GroupTimes};
use crate::options::{Grouping, Options};
use crate::store::Layout;
use crate::tiers::{Group, capacities};

/// Experts of a model whose devices compute them in groups.
#[derive(Debug, Clone)]
pub(crate) struct ExpertLoads {
    /// By layer: how often each expert is visited; empty in layers without a router.
    visits: Vec<Vec<f64>>,
    banks: Banks,
    /// Experts that a token visits.
    chosen: usize,
    /// Neurons of an expert.
    neurons: usize,
    /// Share of Gate and Up in an expert's matrices.
    share: f64,
    grouping: Grouping,
}

/// Whether devices compute experts in groups: one alone, with the machine's memory and the CPU's bits, that holds what was
/// asked for.
pub(super) fn in_groups(devices: &Devices, layout: &Layout, options: &Options) -> bool {
    let [device] = &devices[..] else {
        return false;
    };
    let knows = |facts: &Facts| facts.groups && facts.unified;
    layout.has_experts()
        && options.device_memory.is_some()
        && device.verdict.same_bits
        && knows(device.facts())
}

/// Has a device make what groups of experts need in passes of any length, if it computes them.
///
/// # Errors
/// The driver's.
pub(crate) fn prepare_groups(
    devices: &Devices,
    layout: &Layout,
    options: &Options,
) -> Result<(), DeviceError> {
    if !in_groups(devices, layout, options) {
        return Ok(());
    }
    let prompt = match options.prompt {
        0 => options.context,
        tokens => tokens.min(options.context),
    };
    let longest = chunks(options.lab.chunk, prompt).last().copied();
    let rows = longest.unwrap_or(1).max(options.batch);
    let capacities: Vec<usize> = match options.lab.grouping {
        Grouping::All {
            capacity: capacity @ 1..,
            ..
        } => vec![capacity],
        _ => capacities(rows).collect(),
    };
    let neurons = expert_neurons(layout);
    for device in devices {
        for &capacity in &capacities {
            let shape = GroupShape { neurons, capacity };
            device.backend().prepare(&Program::Groups(shape))?;
        }
    }
    Ok(())
}

impl ExpertLoads {
    /// Of a model whose banks are visited so often; `None` if no device computes experts in groups.
    pub fn of(of: &Opened<'_>, visits: &[f32]) -> Option<Self> {
        let in_groups = in_groups(of.devices, of.layout, of.options);
        let mixture = of.config.mixture.as_ref().filter(|_| in_groups)?;
        let experts = of.config.experts as usize;
        let often = |bank: u32| visits.get(bank as usize).copied().map_or(1.0, f64::from);
        let of_layer = |layer: usize| match of.layout.banks_of(layer) {
            banks if banks.len() >= experts => banks.take(experts).map(often).collect(),
            _ => Vec::new(),
        };
        let visits: Vec<Vec<f64>> = (0..of.layout.layers()).map(of_layer).collect();
        let neurons = expert_neurons(of.layout);
        let matrices = if of.ffn.kind.ungated { 2.0 } else { 3.0 };
        Some(Self {
            banks: banks(of.layout, &visits, neurons, often),
            visits,
            chosen: mixture.chosen as usize,
            neurons,
            share: (matrices - 1.0) / matrices,
            grouping: of.options.lab.grouping,
        })
    }
}

/// The banks of a model that are visited so often, with the experts of each layer and their neurons.
fn banks(
    layout: &Layout,
    experts: &[Vec<f64>],
    neurons: usize,
    often: impl Fn(u32) -> f64,
) -> Banks {
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
    Banks {
        clusters: layout.clusters_of_each(),
        in_groups: all.map(in_groups).collect(),
        order,
        first,
    }
}

/// Neurons of an expert: of the first one.
fn expert_neurons(layout: &Layout) -> usize {
    let mut layers = (0..layout.layers()).map(|layer| layout.banks_of(layer));
    let first = layers.find(|banks| banks.len() > 1);
    first.map_or(0, |banks| layout.neurons(banks.start))
}

impl Planner {
    /// How a device computes experts in groups, if it does.
    pub(crate) fn experts(&self, division: &Division) -> Option<ExpertSetup> {
        let (loads, tier) = (self.experts.as_ref()?, self.tier.as_ref()?);
        let pass = self.pass(division, self.threads)?;
        let rows = division.chunk.max(1);
        let layer = self.shape.layers / 2;
        let of_layer = pass.in_memory(&division.memory, ResidentLayer { layer, rows })[1];
        Some(ExpertSetup {
            visits: loads.visits.clone(),
            banks: loads.banks.clone(),
            chosen: loads.chosen,
            times: GroupTimes {
                device: tier.times.first()?.clone(),
                cpu_token: of_layer / 1e9 / (rows * loads.chosen.max(1)) as f64,
                neurons: loads.neurons,
                share: loads.share,
            },
            grouping: loads.grouping,
        })
    }

    /// Capacities and groups of a layer in the middle, in passes of a prompt.
    pub(super) fn expert_plan(&self, division: &Division) -> Option<ExpertPlan> {
        let setup = self.experts(division)?;
        let layers: Vec<usize> = (0..setup.visits.len())
            .filter(|&layer| setup.experts(layer) > 0)
            .collect();
        let &layer = layers.get(layers.len() / 2)?;
        let held = setup.banks.held(division.needs.device_clusters);
        let rows = division.chunk.max(1);
        let placed = setup.place(layer, rows, &held);
        let of = |group: &Group| GroupPlan {
            experts: group.experts.len(),
            capacity: group.capacity,
        };
        Some(ExpertPlan {
            rows,
            groups: placed.groups.iter().map(of).collect(),
            on_cpu: placed.on_cpu.len(),
        })
    }
}
