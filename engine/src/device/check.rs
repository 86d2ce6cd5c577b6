//! The check of a device against the CPU, with the kernels that the model will run.

use std::ops::Range;
use std::time::Duration;

use emberflow_kernels::{Activations, Cpu, DType, Row, quantize_row};
use emberflow_storage::clock::Moment;
use serde::{Deserialize, Serialize};

use super::numbers::Numbers;
use super::products::{Sample, Samples};
use super::{
    CpuDevice, Dense, DenseShape, DeviceError, Facts, Groups, NeuronRows, Part, Room, Sums, Work,
};
use crate::store::regions::CLUSTER;

/// Clusters of the check's part, the last of which is short.
const CLUSTERS: usize = 8;
/// Most rows of its comparisons.
const ROWS: usize = 3;
const NEURONS: usize = CLUSTERS * CLUSTER - 51;

/// Numbers of rows, besides one, for which times are taken, and clusters of these passes.
pub const WIDTHS: [usize; 4] = [8, 32, 64, 256];
const OF_WIDE: usize = 4;

/// Runs of which the fastest counts: with one row, and with more.
const RUNS: [usize; 2] = [5, 2];

/// How much faster other work groups must be: less is chance.
pub(super) const FASTER: f64 = 0.97;

/// Largest deviation of a class of numerics of its own, as a share of the largest sum.
const TOLERANCE: f32 = 1e-4;

/// How a device's answers compare with the CPU's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Every bit is the CPU's.
    pub same_bits: bool,
    /// Largest deviation, as a share of the largest sum.
    pub worst: f32,
    /// The sizes of work groups with which it was fastest.
    pub groups: Groups,
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

/// The neurons of the check: random rows, some of them zero, tiny or large.
struct Neurons {
    dtype: DType,
    d: usize,
    matrices: usize,
    bytes: Vec<u8>,
}

impl Neurons {
    fn new(shape: &DenseShape) -> Self {
        let (dtype, d, matrices) = (shape.dtype, shape.d, shape.matrices());
        let (len, mut numbers) = (dtype.row_bytes(d), Numbers::new(7));
        let mut bytes = vec![0; NEURONS * matrices * len];
        let mut row = vec![0.0f32; d];
        for (i, bytes) in bytes.chunks_exact_mut(len).enumerate() {
            let size = match i % 11 {
                0 => 0.0,
                1 => 1e-6,
                2 => 30.0,
                _ => 0.1,
            };
            row.iter_mut().for_each(|v| *v = size * numbers.next());
            let (quants, scales) = bytes.split_at_mut(dtype.quants_bytes(d));
            // Finite numbers of such sizes fit every format.
            let _ = quantize_row(dtype, &row, quants, scales);
        }
        Self {
            dtype,
            d,
            matrices,
            bytes,
        }
    }

    fn row(&self, i: usize, matrix: usize) -> Row<'_> {
        let len = self.dtype.row_bytes(self.d);
        let at = (i * self.matrices + matrix) * len;
        Row::inline(self.dtype, self.d, &self.bytes[at..at + len])
    }

    fn upload(&self, device: &mut dyn Dense) -> Result<Part, DeviceError> {
        let part = device.reserve(NEURONS)?;
        // In two pieces, as clusters arrive.
        for range in [CLUSTER..NEURONS, 0..CLUSTER] {
            self.upload_some(device, part, range)?;
        }
        Ok(part)
    }

    fn upload_some(
        &self,
        device: &mut dyn Dense,
        part: Part,
        range: Range<usize>,
    ) -> Result<(), DeviceError> {
        let rows = |i| NeuronRows {
            gate: self.row(i, 0),
            up: (self.matrices == 3).then(|| self.row(i, 1)),
            down: self.row(i, self.matrices - 1),
        };
        device.upload(part, range.start, &mut range.map(rows))
    }
}

/// A device and the CPU as its reference, both with the check's neurons.
struct Both<'d> {
    device: &'d mut dyn Dense,
    reference: CpuDevice,
    /// Of the reference, and of the device.
    parts: [Part; 2],
    shape: DenseShape,
}

impl<'d> Both<'d> {
    fn new(device: &'d mut dyn Dense, shape: &DenseShape) -> Result<Self, DeviceError> {
        let mut reference = CpuDevice::new();
        reference.prepare(shape)?;
        device.prepare(shape)?;
        device.make_room(&Room {
            rows: WIDTHS[WIDTHS.len() - 1],
            clusters: CLUSTERS,
            pairs: OF_WIDE * WIDTHS[WIDTHS.len() - 1],
        })?;
        let neurons = Neurons::new(shape);
        let parts = [neurons.upload(&mut reference)?, neurons.upload(device)?];
        Ok(Self {
            device,
            reference,
            parts,
            shape: *shape,
        })
    }

    /// How far the device's sums are from the CPU's, and whether as many pairs fired.
    fn compare(&mut self, case: Case) -> Result<(f32, bool), DeviceError> {
        let expected = case.run(&mut self.reference, self.parts[0], &self.shape)?;
        let found = case.run(self.device, self.parts[1], &self.shape)?;
        let worst = deviation(&expected.sums, &found.sums);
        Ok((worst, expected.fired == found.fired))
    }

    /// The device's speed for `rows` rows, by its first `most` clusters, and that of a thread of the CPU.
    fn speeds(&mut self, rows: usize, most: usize) -> Result<[Speed; 2], DeviceError> {
        let neurons = (most * CLUSTER).min(NEURONS);
        let [all, first] = [self.timed(rows, most)?, self.timed(rows, 1)?];
        Ok([0, 1].map(|i| Speed::of(neurons, all[i], first[i])))
    }

    /// Seconds of the device and of a thread of the CPU for the first clusters and `rows` rows.
    fn timed(&mut self, rows: usize, clusters: usize) -> Result<[f64; 2], DeviceError> {
        let timing = Timing::new(self.shape.d, rows, clusters);
        let works = [timing.of(self.parts[1]), timing.of(self.parts[0])];
        fastest(self.device, &mut self.reference, &works, &self.shape)
    }

    /// Seconds for a byte of neurons that are uploaded as those that pass through the device.
    fn copied(&mut self) -> Result<f64, DeviceError> {
        if self.device.facts().unified {
            return Ok(0.0);
        }
        let (neurons, count) = (Neurons::new(&self.shape), OF_WIDE * CLUSTER);
        let part = self.device.reserve_for_streams(count)?;
        let mut best = f64::INFINITY;
        for _ in 0..RUNS[0] {
            neurons.upload_some(self.device, part, 0..count)?;
            best = best.min(self.device.arrived(part)?.as_secs_f64());
        }
        Ok(best / (count as u64 * self.shape.neuron_bytes()) as f64)
    }

    /// The sizes of work groups with which the device is fastest, one kernel after the other; it has them
    /// then. What its driver refuses is none.
    fn tuned(&mut self) -> Result<Groups, DeviceError> {
        let sizes = self.device.group_sizes();
        let mut best = Groups::USUAL;
        if sizes.is_empty() {
            return Ok(best);
        }
        let mut least = self.with_groups(best)?;
        let kernels: [fn(Groups, usize) -> Groups; 2] = [
            |of, hidden| Groups { hidden, ..of },
            |of, sums| Groups { sums, ..of },
        ];
        for of in kernels {
            let tried: Vec<Groups> = sizes.iter().map(|&size| of(best, size)).collect();
            for groups in tried {
                match self.with_groups(groups) {
                    Ok(took) if took < least * FASTER => (best, least) = (groups, took),
                    _ => {}
                }
            }
        }
        self.device.set_groups(best)?;
        Ok(best)
    }

    /// Seconds with such work groups, for one row and for several.
    fn with_groups(&mut self, groups: Groups) -> Result<f64, DeviceError> {
        self.device.set_groups(groups)?;
        let mut all = 0.0;
        for (rows, clusters) in [(1, CLUSTERS), (WIDTHS[0], OF_WIDE)] {
            let timing = Timing::new(self.shape.d, rows, clusters);
            let mut best = f64::INFINITY;
            for _ in 0..RUNS[0] {
                best = best.min(alone(self.device, &timing.of(self.parts[1]), &self.shape)?);
            }
            all += best;
        }
        Ok(all)
    }
}

/// Work of which the time is taken.
struct Timing {
    x: Vec<f32>,
    quantized: Activations,
    clusters: Range<usize>,
}

impl Timing {
    fn new(d: usize, rows: usize, clusters: usize) -> Self {
        let x = vec![0.5; rows * d];
        let mut quantized = Activations::default();
        Cpu::detect().quantize_activations(&x, rows, &mut quantized);
        Self {
            x,
            quantized,
            clusters: 0..clusters,
        }
    }

    fn of(&self, part: Part) -> Work<'_> {
        Work {
            part,
            clusters: &self.clusters,
            x: &self.x,
            quantized: self.quantized.all(),
            mask: None,
            cut: 0.0,
            gate_bias: &[],
            up_bias: &[],
            end: usize::MAX,
            sums: Sums::Each,
        }
    }
}

/// Prepares `device` for `shape` and compares it with the CPU: single rows and several, with masks,
/// thresholds and biases, magnitudes down to denormals.
///
/// # Errors
/// The driver's, or a device whose sums are wrong.
pub fn check(device: &mut dyn Dense, shape: &DenseShape) -> Result<Verdict, DeviceError> {
    let verdict = compared(device, shape, false)?;
    accept(device.facts(), verdict.worst)?;
    Ok(verdict)
}

/// [`check`] that refuses nothing: where the sums are wrong there are no times. With `tunes` the sizes of work
/// groups are tried first.
pub(super) fn compared(
    device: &mut dyn Dense,
    shape: &DenseShape,
    tunes: bool,
) -> Result<Verdict, DeviceError> {
    let mut both = Both::new(device, shape)?;
    let mut verdict = Verdict {
        same_bits: true,
        worst: 0.0,
        groups: match tunes {
            true => both.tuned()?,
            false => Groups::USUAL,
        },
        speed: Speed::default(),
        wide: [Speed::default(); WIDTHS.len()],
        cpu: Speed::default(),
        copy: 0.0,
    };
    for case in [
        Case::new(1, 1.0),
        Case::new(1, 1.0).masked().biased(),
        Case::new(ROWS, 1.0).masked(),
        Case::new(2, 1e-3).biased(),
        Case::new(1, 1e-37),
        Case::new(1, 1e3),
        Case::new(ROWS, 1.0).biased().totals(),
    ] {
        let (worst, fired) = both.compare(case)?;
        verdict.same_bits &= worst == 0.0 && fired;
        verdict.worst = verdict.worst.max(worst);
        if is_wrong(worst) {
            return Ok(verdict);
        }
    }
    [verdict.speed, verdict.cpu] = both.speeds(1, CLUSTERS)?;
    for (speed, rows) in verdict.wide.iter_mut().zip(WIDTHS) {
        [*speed, _] = both.speeds(rows, OF_WIDE)?;
    }
    verdict.copy = both.copied()?;
    device.clear();
    Ok(verdict)
}

/// Prepares `device` for `shape` and compares it once: whether it is as a verdict has it.
///
/// # Errors
/// The driver's.
pub(super) fn agrees(
    device: &mut dyn Dense,
    shape: &DenseShape,
    verdict: &Verdict,
) -> Result<bool, DeviceError> {
    let mut both = Both::new(device, shape)?;
    both.device.set_groups(verdict.groups)?;
    let (worst, fired) = both.compare(Case::new(ROWS, 1.0).masked().biased())?;
    device.clear();
    let same = worst == 0.0 && fired;
    Ok(!is_wrong(worst) && (same || !verdict.same_bits))
}

/// A comparison.
#[derive(Clone, Copy)]
struct Case {
    rows: usize,
    /// Magnitude of the input.
    size: f32,
    /// With a mask and a threshold.
    masked: bool,
    biased: bool,
    /// Added up, in two pieces of work.
    totals: bool,
}

impl Case {
    fn new(rows: usize, size: f32) -> Self {
        Self {
            rows,
            size,
            masked: false,
            biased: false,
            totals: false,
        }
    }

    fn masked(self) -> Self {
        Self {
            masked: true,
            ..self
        }
    }

    fn biased(self) -> Self {
        Self {
            biased: true,
            ..self
        }
    }

    fn totals(self) -> Self {
        Self {
            totals: true,
            ..self
        }
    }

    fn run(
        &self,
        device: &mut dyn Dense,
        part: Part,
        shape: &DenseShape,
    ) -> Result<Answer, DeviceError> {
        let (rows, all) = (self.rows, CLUSTERS * CLUSTER);
        let mut numbers = Numbers::new(rows as u64 + 1);
        let x: Vec<f32> = (0..rows * shape.d)
            .map(|_| self.size * numbers.next())
            .collect();
        let mut quantized = Activations::default();
        Cpu::detect().quantize_activations(&x, rows, &mut quantized);
        let mask: Vec<u64> = (0..all * rows / 64)
            .map(|i| 0x9e37_79b9_7f4a_7c15u64.rotate_left(i as u32))
            .collect();
        let bias: Vec<f32> = (0..all).map(|i| i as f32 * 0.001 - 0.2).collect();
        let bias = if self.biased { &bias[..] } else { &[] };
        let work = Work {
            part,
            clusters: &(0..CLUSTERS),
            x: &x,
            quantized: quantized.all(),
            mask: self.masked.then_some(&mask[..]),
            cut: if self.masked { 0.01 } else { 0.0 },
            gate_bias: bias,
            up_bias: if shape.kind.ungated { &[] } else { bias },
            end: usize::MAX,
            sums: Sums::Each,
        };
        match self.totals {
            false => run(device, &work, shape),
            true => in_two(device, &work, shape),
        }
    }
}

/// Sums and the number of fired pairs of some work.
struct Answer {
    sums: Vec<f32>,
    fired: u64,
}

/// Work of which each half goes on from the other, the second without the last neurons.
fn in_two(
    device: &mut dyn Dense,
    work: &Work<'_>,
    shape: &DenseShape,
) -> Result<Answer, DeviceError> {
    let half = CLUSTERS / 2;
    let biases = |bias: &'_ [f32], from: usize| -> Range<usize> {
        (from * CLUSTER).min(bias.len())..bias.len()
    };
    let mut both = Answer {
        sums: Vec::new(),
        fired: 0,
    };
    for (clusters, begins) in [(0..half, true), (half..CLUSTERS, false)] {
        let from = clusters.start;
        let work = Work {
            clusters: &clusters,
            gate_bias: &work.gate_bias[biases(work.gate_bias, from)],
            up_bias: &work.up_bias[biases(work.up_bias, from)],
            end: NEURONS - 9,
            sums: Sums::Total {
                begins,
                ends: !begins,
            },
            ..*work
        };
        let Answer { sums, fired } = run(device, &work, shape)?;
        both = Answer {
            sums,
            fired: both.fired + fired,
        };
    }
    Ok(both)
}

fn run(device: &mut dyn Dense, work: &Work<'_>, shape: &DenseShape) -> Result<Answer, DeviceError> {
    let vectors = work.sums.vectors(work.clusters.len(), work.rows());
    let mut sums = vec![f32::NAN; vectors * shape.d];
    let ticket = device.submit(work)?;
    let fired = device.take(ticket, &mut sums)?.fired;
    Ok(Answer { sums, fired })
}

/// Seconds of the device for some work.
fn alone(device: &mut dyn Dense, work: &Work<'_>, shape: &DenseShape) -> Result<f64, DeviceError> {
    let mut sums = vec![0.0; work.clusters.len() * work.rows() * shape.d];
    let start = Moment::now();
    let ticket = device.submit(work)?;
    let took = match device.take(ticket, &mut sums)?.took {
        Duration::ZERO => start.elapsed(),
        took => took,
    };
    Ok(took.as_secs_f64())
}

/// Seconds of the device and of a thread of the CPU, both at work at once, as they will be: the fastest of
/// some runs each.
fn fastest(
    device: &mut dyn Dense,
    cpu: &mut dyn Dense,
    [work, its]: &[Work<'_>; 2],
    shape: &DenseShape,
) -> Result<[f64; 2], DeviceError> {
    let mut best = [f64::INFINITY; 2];
    let mut sums = vec![0.0; work.clusters.len() * work.rows() * shape.d];
    let runs = RUNS[usize::from(work.rows() > 1)];
    for _ in 0..runs {
        let start = Moment::now();
        let ticket = device.submit(work)?;
        let submitted = Moment::now();
        run(cpu, its, shape)?;
        let busy = submitted.elapsed();
        let took = match device.take(ticket, &mut sums)?.took {
            // It has no clock of its own.
            Duration::ZERO => start.elapsed(),
            took => took,
        };
        for (best, took) in best.iter_mut().zip([took, busy]) {
            *best = best.min(took.as_secs_f64());
        }
    }
    Ok(best)
}

/// How far results are from those expected, as a share of the largest: 0 if every bit is the same.
pub(crate) fn deviation(expected: &[f32], found: &[f32]) -> f32 {
    let largest = expected.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    let both = expected.iter().zip(found);
    let apart = both.filter(|(a, b)| a.to_bits() != b.to_bits() && a != b);
    let share = apart.map(|(a, b)| (a - b).abs() / largest.max(f32::MIN_POSITIVE));
    // Bits that differ count, however little.
    let share = share.map(|s| {
        if s.is_nan() {
            f32::INFINITY
        } else {
            s.max(f32::MIN_POSITIVE)
        }
    });
    share.fold(0.0, f32::max)
}

/// Whether results are further from the CPU's than another order of sums makes them.
fn is_wrong(deviation: f32) -> bool {
    deviation > TOLERANCE
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
pub(super) fn accept(device: &Facts, deviation: f32) -> Result<(), DeviceError> {
    match wrong(device, deviation) {
        None => Ok(()),
        Some(how) => Err(DeviceError {
            device: device.name.clone(),
            what: format!("computes wrong results: {how}; --device none does without it"),
        }),
    }
}
