//! The check of a device against the CPU, with the kernels that the model will run.

use serde::{Deserialize, Serialize};

pub use super::compare::WIDTHS;
pub(crate) use super::compare::deviation;
use super::compare::{Apart, Both, CLUSTERS, NEURONS, OF_WIDE, few_cases, is_wrong};
use super::products::{Sample, Samples};
use super::{Dense, DenseShape, DeviceError, Facts, Kernels};
use crate::cluster::CLUSTER;

/// How a device's answers compare with the CPU's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Every bit is the CPU's.
    pub same_bits: bool,
    /// Largest deviation, as a share of the largest sum.
    pub worst: f32,
    /// Its kernels.
    pub kernels: Kernels,
    /// How long it takes for one row.
    pub speed: Speed,
    /// The same for [`WIDTHS`] rows.
    pub wide: [Speed; WIDTHS.len()],
    /// How long one thread of the CPU takes.
    pub cpu: Speed,
    /// Seconds for a byte on its way to a memory of the device's own, beside what the CPU takes to hand it over.
    pub copy: f64,
}

impl Verdict {
    /// The device's times by the number of rows, for neurons as rows of one column.
    pub(crate) fn times(&self) -> Samples {
        let one = std::iter::once((1, self.speed));
        let all = one.chain(WIDTHS.into_iter().zip(self.wide));
        let samples = all.map(|(n, speed)| Sample {
            n,
            launch: speed.launch,
            weight: speed.neuron,
        });
        Samples(samples.collect())
    }
}

/// Time of a piece of work of some rows: `launch + neurons · neuron`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Seconds that any piece of work takes.
    pub launch: f64,
    /// Seconds for each neuron.
    pub neuron: f64,
}

impl Speed {
    /// By the times of so many of the check's neurons and of its first cluster.
    fn of(neurons: usize, all: f64, first: f64) -> Self {
        let slope = (all - first) / (neurons - CLUSTER) as f64;
        // Where one cluster is no faster, launching is all that was measured.
        let neuron = slope.clamp(all / neurons as f64 * 0.01, all / neurons as f64);
        Self {
            launch: all - neurons as f64 * neuron,
            neuron,
        }
    }
}

/// Prepares `device` for `shape` and compares it with the CPU: single rows and several, with masks,
/// thresholds and biases, magnitudes down to denormals.
///
/// # Errors
/// The driver's, or a device whose sums are wrong.
pub fn check(device: &mut dyn Dense, shape: &DenseShape) -> Result<Verdict, DeviceError> {
    let verdict = compared(device, shape)?;
    accept(device.facts(), verdict.worst)?;
    Ok(verdict)
}

/// [`check`] that refuses nothing: where the sums are wrong there are no times.
pub(super) fn compared(device: &mut dyn Dense, shape: &DenseShape) -> Result<Verdict, DeviceError> {
    let kernels = device.kernels(shape.dtype);
    let mut both = Both::new(device, shape)?;
    both.set(&kernels)?;
    let apart = both.compare_all()?;
    let mut verdict = Verdict {
        same_bits: apart.same_bits,
        worst: apart.worst,
        kernels,
        speed: Speed::default(),
        wide: [Speed::default(); WIDTHS.len()],
        cpu: Speed::default(),
        copy: 0.0,
    };
    if is_wrong(apart.worst) {
        return Ok(verdict);
    }
    [verdict.speed, verdict.cpu] = speeds(&mut both, 1, CLUSTERS)?;
    for (speed, rows) in verdict.wide.iter_mut().zip(WIDTHS) {
        [*speed, _] = speeds(&mut both, rows, OF_WIDE)?;
    }
    verdict.copy = both.copied()?;
    device.clear();
    Ok(verdict)
}

/// The device's speed for `rows` rows, by its first `most` clusters, and that of a thread of the CPU.
fn speeds(both: &mut Both<'_>, rows: usize, most: usize) -> Result<[Speed; 2], DeviceError> {
    let neurons = (most * CLUSTER).min(NEURONS);
    let [all, first] = [both.timed(rows, most)?, both.timed(rows, 1)?];
    Ok([0, 1].map(|i| Speed::of(neurons, all[i], first[i])))
}

/// Prepares `device` for `shape` and compares it with the CPU once more: whether it is as a verdict has it.
///
/// # Errors
/// The driver's.
pub(super) fn agrees(
    device: &mut dyn Dense,
    shape: &DenseShape,
    verdict: &Verdict,
) -> Result<bool, DeviceError> {
    let mut both = Both::new(device, shape)?;
    both.set(&verdict.kernels)?;
    let mut apart = Apart::NONE;
    for case in few_cases() {
        apart = apart.and(both.compare(case)?);
    }
    device.clear();
    Ok(!is_wrong(apart.worst) && (apart.same_bits || !verdict.same_bits))
}

/// How wrong a device's results are, if they are; see [`deviation`].
pub(crate) fn wrong(device: &Facts, deviation: f32) -> Option<String> {
    is_wrong(deviation).then(|| {
        format!(
            "they differ from the CPU's by {deviation:.1e} of the largest (driver {})",
            device.driver
        )
    })
}

/// Refuses a device whose results are too far from the CPU's.
pub(crate) fn accept(device: &Facts, deviation: f32) -> Result<(), DeviceError> {
    match wrong(device, deviation) {
        None => Ok(()),
        Some(how) => Err(DeviceError {
            device: device.name.clone(),
            what: format!("computes wrong results: {how}; --device none does without it"),
        }),
    }
}
