//! The check of a device against the CPU, with the kernels that the model will run: of clusters of an FFN, and of
//! products of matrices. Results are saved by driver and kernel.

#[cfg(test)]
mod forms_tests;
mod leased;
mod numbers;
mod products;
mod reference;
mod verdicts;

use serde::{Deserialize, Serialize};

pub use self::leased::checked;
pub(crate) use self::numbers::Numbers;
use self::reference::{CLUSTERS, NEURONS, OF_WIDE, Reference, cases, few_cases, is_wrong};
pub use self::reference::{TokenScales, WIDTHS};
pub(crate) use self::verdicts::OfProducts;
pub use self::verdicts::{Entry, Found, Times, Verdicts};
use super::times::{Sample, Samples};
use super::{Backend, DenseShape, DeviceError, Facts, Part};
use emberflow_engine::lane::CLUSTER;

/// How a device's answers compare with the CPU's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Every bit is the CPU's.
    pub same_bits: bool,
    /// Largest deviation, as a share of the largest sum.
    pub worst: f32,
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
    /// From the times of the first `neurons` of the check's neurons and of its first cluster.
    fn of(neurons: usize, all: f64, first: f64) -> Self {
        let slope = (all - first) / (neurons - CLUSTER) as f64;
        // Where one cluster is no faster, launching is all that was measured.
        let neuron = slope.clamp(all / neurons as f64 * 0.01, all / neurons as f64);
        Self {
            // Rounding may leave less than nothing.
            launch: (all - neurons as f64 * neuron).max(0.0),
            neuron,
        }
    }
}

/// Prepares `device` for `shape` and compares it with the CPU: single rows and several, with masks,
/// thresholds and biases, magnitudes down to denormals, and tokens with such scales.
///
/// # Errors
/// The driver's, or a device whose sums are wrong.
pub fn check(
    device: &mut dyn Backend,
    shape: &DenseShape,
    scales: TokenScales,
) -> Result<Verdict, DeviceError> {
    let verdict = compared(device, shape, scales)?;
    accept(device.facts(), verdict.worst)?;
    Ok(verdict)
}

/// [`check`] that refuses nothing: where the sums are wrong there are no times.
fn compared(
    device: &mut dyn Backend,
    shape: &DenseShape,
    scales: TokenScales,
) -> Result<Verdict, DeviceError> {
    let mut reference = Reference::new(shape, scales)?;
    let part = reference.prepare(device)?;
    let apart = reference.compare(device, part, &cases())?;
    let mut verdict = Verdict {
        same_bits: apart.same_bits && device.is_exact(),
        worst: apart.worst,
        speed: Speed::default(),
        wide: [Speed::default(); WIDTHS.len()],
        cpu: Speed::default(),
        copy: 0.0,
    };
    if is_wrong(device.facts(), apart.worst) {
        return Ok(verdict);
    }
    let mut speeds = |rows, most| speeds(&mut reference, device, part, [rows, most]);
    [verdict.speed, verdict.cpu] = speeds(1, CLUSTERS)?;
    for (speed, rows) in verdict.wide.iter_mut().zip(WIDTHS) {
        [*speed, _] = speeds(rows, OF_WIDE)?;
    }
    verdict.copy = reference.copied(device)?;
    device.clear();
    Ok(verdict)
}

/// The device's speed for `rows` rows, by its first `most` clusters, and that of a thread of the CPU.
fn speeds(
    reference: &mut Reference,
    device: &mut dyn Backend,
    part: Part,
    [rows, most]: [usize; 2],
) -> Result<[Speed; 2], DeviceError> {
    let neurons = (most * CLUSTER).min(NEURONS);
    let mut timed = |clusters| reference.timed(device, part, [rows, clusters]);
    let [all, first] = [timed(most)?, timed(1)?];
    Ok([0, 1].map(|i| Speed::of(neurons, all[i], first[i])))
}

/// Prepares `device` for `shape` and compares it with the CPU once more: whether it is as a verdict has it.
///
/// # Errors
/// The driver's.
fn agrees(
    device: &mut dyn Backend,
    shape: &DenseShape,
    scales: TokenScales,
    verdict: &Verdict,
) -> Result<bool, DeviceError> {
    let mut reference = Reference::new(shape, scales)?;
    let part = reference.prepare(device)?;
    let apart = reference.compare(device, part, &few_cases())?;
    let exact = device.is_exact();
    device.clear();
    let same_bits = apart.same_bits && exact;
    Ok(!is_wrong(device.facts(), apart.worst) && (same_bits || !verdict.same_bits))
}

/// How wrong a device's results are, if they are; see [`deviation`].
fn wrong(device: &Facts, deviation: f32) -> Option<String> {
    is_wrong(device, deviation).then(|| {
        format!(
            "they differ from the CPU's by {deviation:.1e} of the largest (driver {})",
            device.driver
        )
    })
}

/// Refuses a device whose results are too far from the CPU's.
fn accept(device: &Facts, deviation: f32) -> Result<(), DeviceError> {
    match wrong(device, deviation) {
        None => Ok(()),
        Some(how) => Err(DeviceError {
            device: device.name.clone(),
            what: format!("computes wrong results: {how}"),
        }),
    }
}
