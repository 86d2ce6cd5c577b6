//! Experts that a device computes in groups: what it makes ready, what it is told, and what a plan says.

use emberflow_models::config::ModelConfig;

use super::budget::Division;
use super::cost::ResidentLayer;
use super::experts::{expert_neurons, in_groups};
use super::facts::{Planner, chunks};
use super::plan::{ExpertPlan, GroupPlan};
use crate::cluster::CLUSTER;
use crate::device::{DeviceError, Devices, GroupShape, Program};
use crate::lanes::ExpertSetup;
use crate::options::{Grouping, Options};
use crate::store::Layout;
use crate::tiers::{CapacityGroup, capacities};

/// Has a device make what groups of experts need in passes of any length, if it computes them. `predicted`: predictors select
/// neurons.
///
/// # Errors
/// The driver's.
pub(crate) fn prepare_groups(
    devices: &Devices,
    layout: &Layout,
    c: &ModelConfig,
    options: &Options,
    predicted: bool,
) -> Result<(), DeviceError> {
    if !in_groups(devices, c, options, predicted) {
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

/// How a device computes experts in groups, if it does.
pub(crate) fn expert_setup(planner: &Planner, division: &Division) -> Option<ExpertSetup> {
    let (loads, tier) = (planner.experts.as_ref()?, planner.tier.as_ref()?);
    let pass = planner.pass(division, planner.threads)?;
    let rows = division.chunk.max(1);
    let layer = planner.shape.layers / 2;
    let of_layer = pass.in_memory(&division.memory, ResidentLayer { layer, rows })[1];
    Some(loads.setup(tier.times.first()?, of_layer / 1e9, rows))
}

/// Where the experts of a layer in the middle are computed in passes of `rows` rows.
pub(super) fn expert_plan(
    planner: &Planner,
    division: &Division,
    rows: usize,
) -> Option<ExpertPlan> {
    let setup = expert_setup(planner, division)?;
    let layers = 0..setup.visits.len();
    let layers: Vec<usize> = layers.filter(|&layer| setup.experts(layer) > 0).collect();
    let &layer = layers.get(layers.len() / 2)?;
    let held = setup.banks.held(division.needs.device_clusters);
    let placed = setup.place(layer, rows, &held);
    let of = |group: &CapacityGroup| GroupPlan {
        experts: group.experts.len(),
        capacity: group.capacity,
    };
    Some(ExpertPlan {
        rows,
        groups: placed.groups.iter().map(of).collect(),
        on_cpu: placed.on_cpu.len(),
        clusters: setup.times.neurons.div_ceil(CLUSTER),
    })
}
