//! Opens devices for a model: leases them, checks them against the CPU, and says what the planner needs to know.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use emberflow_engine::Error;
use emberflow_engine::lane::{CLUSTER, Lane, LaneFacts, LaneModel, OpenLane};
use emberflow_kernels::DType;

use crate::backend::{DenseShape, Facts, Program};
use crate::check::{TokenScales, Verdicts, checked};
use crate::device::Device;
use crate::error::DeviceUse;
use crate::experts::GroupShape;
use crate::in_use::{Devices, InUse, MOST_DEVICES};
use crate::lane::{DeviceLane, Parts};
use crate::loads::{ExpertModel, Grouping};
use crate::plan::{LEAST_STREAMED, MeasuredTimes};
use crate::tiers::capacities;

/// Devices for the models that an engine opens.
#[derive(Clone, Default)]
pub struct OnDevices {
    devices: Vec<Device>,
    memory: Option<u64>,
    grouping: Grouping,
    pass_seconds: Option<[f64; 2]>,
    outcomes: Option<Verdicts>,
}

impl fmt::Debug for OnDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OnDevices").field(&self.devices).finish()
    }
}

impl OnDevices {
    /// Devices that hold as many neurons as pays by their times. With the CPU's bits they change no text. Several need these
    /// bits, and the machine's memory.
    pub fn new(devices: Vec<Device>) -> Self {
        Self {
            devices,
            ..Self::default()
        }
    }

    /// The same with this many bytes for neurons, if given.
    #[must_use]
    pub fn holding(self, memory: impl Into<Option<u64>>) -> Self {
        Self {
            memory: memory.into(),
            ..self
        }
    }

    /// The same with other groups of experts.
    #[must_use]
    pub fn grouping(self, grouping: Grouping) -> Self {
        Self { grouping, ..self }
    }

    /// The same with seconds of a pass with devices and without, in place of the clock's, to decide whether devices
    /// are left out.
    #[must_use]
    pub fn pass_seconds(self, seconds: Option<[f64; 2]>) -> Self {
        Self {
            pass_seconds: seconds,
            ..self
        }
    }

    /// The same with a file in which is saved where devices are left out, from start to start.
    #[must_use]
    pub fn saving_to(self, verdicts: Option<Verdicts>) -> Self {
        Self {
            outcomes: verdicts,
            ..self
        }
    }

    /// For the options of an engine; `None` without devices.
    pub fn lane(self) -> Option<Arc<dyn OpenLane>> {
        match self.devices.is_empty() {
            true => None,
            false => Some(Arc::new(self)),
        }
    }

    /// The devices that are used for a model.
    fn wanted(&self, model: &LaneModel<'_>, shape: &DenseShape) -> Vec<&Device> {
        let top = model.config.form.has_gate_top();
        let knows =
            |device: &Device| reads(model, device.facts()) && !top && shape.unsupported().is_none();
        let wanted = |device: &&Device| {
            let wanted = !device.is_optional() || knows(device);
            if !wanted {
                let device = &device.facts().name;
                tracing::warn!(device, "left out, as it does not know this model");
            }
            wanted
        };
        self.devices.iter().filter(wanted).collect()
    }

    /// Bytes of a device's memory to use; a tenth is left to its driver.
    fn memory(&self, facts: &Facts) -> u64 {
        self.memory.unwrap_or(facts.memory / 10 * 9)
    }

    /// Clusters per stream buffer, if the longest pass streams some. In separate memory the two buffers take at most half. 0
    /// if times must not decide.
    fn at_once(&self, model: &LaneModel<'_>, devices: &Devices, cluster_len: u64) -> usize {
        let same_bits = devices.iter().all(|device| device.verdict.same_bits);
        let streams = model.rows >= LEAST_STREAMED && !model.banks.has_experts() && same_bits;
        let most = (2 * model.threads).min(model.banks.clusters_at_once());
        let of_device = |device: &Arc<InUse>| match device.facts().unified {
            true => most,
            false => {
                let fit = self.memory(device.facts()) / 4 / cluster_len;
                most.min(usize::try_from(fit).unwrap_or(usize::MAX))
            }
        };
        let least = devices.iter().map(of_device).min();
        least.filter(|_| streams).unwrap_or(0)
    }

    /// The devices as the planner sees them.
    fn facts(
        &self,
        model: &LaneModel<'_>,
        devices: &Devices,
        shape: &DenseShape,
        experts: Option<ExpertModel>,
    ) -> LaneFacts {
        let all = |is: fn(&InUse) -> bool| devices.iter().all(|device| is(device));
        let unified = all(|device| device.facts().unified);
        let same_bits = all(|device| device.verdict.same_bits);
        let cluster_len = CLUSTER as u64 * shape.neuron_bytes();
        let at_once = self.at_once(model, devices, cluster_len.max(1));
        let verdict = devices[0].verdict;
        let memory = devices.iter().map(|device| self.memory(device.facts()));
        let names = devices.iter().map(|device| device.facts().name.clone());
        let names: Vec<String> = names.collect();
        // A text follows from what a device with other bits computes: what the user gives it, whatever the budget.
        let fixed = match self.memory {
            Some(bytes) if !same_bits => {
                let bytes = bytes.min(devices[0].facts().memory);
                (bytes / cluster_len.max(1)).min(model.banks.total_clusters())
            }
            _ => 0,
        };
        LaneFacts {
            names: names.clone(),
            unified,
            memory: memory.min().unwrap_or(0),
            asked: self.memory.is_some(),
            fixed,
            cluster_len,
            same_bits,
            at_once,
            cpu_cluster: CLUSTER as f64 * verdict.cpu.neuron / model.threads as f64,
            times: Arc::new(MeasuredTimes {
                names,
                times: devices
                    .iter()
                    .map(|device| device.verdict.times())
                    .collect(),
                unified,
                same_bits,
                at_once,
                copy: verdict.copy,
                experts,
            }),
        }
    }
}

/// Whether a device knows the scales of a model's tokens.
fn reads(model: &LaneModel<'_>, facts: &Facts) -> bool {
    !model.one_scale || facts.per_channel
}

/// Why devices cannot be used with a model and options, if so.
fn refused(model: &LaneModel<'_>) -> Option<&'static str> {
    match () {
        // A device activates each gate independently.
        () if model.config.form.has_gate_top() => Some("models without Gaussian top-k"),
        () if !model.full => Some("--policy full only"),
        () if model.observed => Some("models that are not observed"),
        () => None,
    }
}

impl OpenLane for OnDevices {
    fn open(&self, model: &LaneModel<'_>) -> Result<Option<Box<dyn Lane>>, Error> {
        let shape = DenseShape::of(&model.banks.format, model.config.ffn_kind);
        let wanted = self.wanted(model, &shape);
        if wanted.is_empty() {
            return Ok(None);
        }
        if let Some(what) = refused(model) {
            return Err(DeviceUse::Options(what).into());
        }
        if wanted.len() > MOST_DEVICES {
            return Err(DeviceUse::Options("a list of three devices at most").into());
        }
        let mut devices = Devices::new();
        for (number, device) in wanted.iter().enumerate() {
            if !reads(model, device.facts()) {
                return Err(DeviceUse::Scales(device.facts().name.clone()).into());
            }
            let device = checked_device(model, device, number, &shape)?;
            if wanted.len() > 1 {
                together(&device)?;
            }
            devices.push(Arc::new(device));
        }
        let experts = ExpertModel::of(model, &devices, self.memory.is_some(), self.grouping);
        if let Some(experts) = &experts {
            self.prepare_groups(model, &devices, experts)?;
        }
        let parts = Parts {
            facts: self.facts(model, &devices, &shape, experts.clone()),
            devices,
            banks: Arc::clone(model.banks),
            shape,
            experts,
            model: format!("model {:032x}, {} threads", model.identity, model.threads),
            outcomes: self.outcomes.clone(),
            scripted: self.pass_seconds,
        };
        Ok(Some(Box::new(DeviceLane::new(parts))))
    }

    fn slow_start(&self) -> Option<String> {
        let all = self.devices.iter().map(|device| device.facts());
        let each = all.filter_map(|of| Some(format!("{} for {}", of.compiles?, of.name)));
        let each: Vec<String> = each.collect();
        (!each.is_empty()).then(|| {
            format!(
                "compiling and timing {}, which takes seconds to minutes the first time",
                each.join(" and ")
            )
        })
    }
}

impl OnDevices {
    /// Has devices make what groups of experts need in passes of any length.
    fn prepare_groups(
        &self,
        model: &LaneModel<'_>,
        devices: &Devices,
        experts: &ExpertModel,
    ) -> Result<(), Error> {
        let capacities: Vec<usize> = match self.grouping {
            Grouping::All {
                capacity: capacity @ 1..,
                ..
            } => vec![capacity],
            _ => capacities(model.rows).collect(),
        };
        let neurons = experts.neurons();
        for device in devices {
            for &capacity in &capacities {
                let shape = GroupShape { neurons, capacity };
                device.backend().prepare(&Program::Groups(shape))?;
            }
        }
        Ok(())
    }
}

/// Refuses a device that cannot compute together with others: which of them computes a cluster follows from times, and all
/// read the same bytes.
fn together(device: &InUse) -> Result<(), Error> {
    let what = match device.verdict.same_bits {
        _ if !device.facts().unified => "has a memory of its own, which others cannot read",
        false => "does not compute the CPU's bits, and times must not decide on a text",
        true => return Ok(()),
    };
    Err(device
        .failed(&format!("{what}: name it alone in --device"))
        .into())
}

/// Prepares a device for a model's FFN and products, and checks it against the CPU.
fn checked_device(
    model: &LaneModel<'_>,
    device: &Device,
    number: usize,
    shape: &DenseShape,
) -> Result<InUse, Error> {
    let scales = match model.one_scale {
        true => TokenScales::One,
        false => TokenScales::ByGroup,
    };
    let lease = device.lease()?;
    let verdict = checked(&lease, shape, scales)?;
    let name = &device.facts().name;
    tracing::info!(device = name, ?verdict, "checked against the CPU");
    // Done now, so that the measured process size includes the driver's code. Devices with other bits compute no
    // products.
    let mut products: BTreeSet<(DType, usize)> = BTreeSet::new();
    if verdict.same_bits {
        let known = |of: &&(DType, usize)| device.facts().multiplies(of.0);
        for &(dtype, cols) in model.matrices.iter().filter(known) {
            if lease.prepare_products(dtype, cols, scales)? {
                products.insert((dtype, cols));
            } else {
                tracing::warn!(%dtype, cols, "products have other bits: left to the CPU");
            }
        }
    }
    Ok(InUse::new(lease, number, verdict, products))
}
