//! Comparisons of a device's FFN with the CPU's, and their times.

use std::ops::Range;
use std::time::{Duration, Instant};

use emberflow_kernels::{Activations, Cpu, DType, Row, quantize_row};

use super::numbers::Numbers;
use super::{
    CpuDevice, Dense, DenseShape, DeviceError, Kernels, NeuronRows, Order, Part, Room, Sums, Work,
};
use crate::cluster::CLUSTER;

/// Clusters of the check's part, the last of which is short.
pub(super) const CLUSTERS: usize = 8;
/// Rows of its comparisons where there are several, and many.
const ROWS: usize = 3;
const MANY: usize = super::MANY + 4;
pub(super) const NEURONS: usize = CLUSTERS * CLUSTER - 51;

/// Numbers of rows, besides one, for which times are taken, and clusters of these passes.
pub const WIDTHS: [usize; 4] = [8, 32, 64, 256];
pub(super) const OF_WIDE: usize = 4;

/// Runs of which the fastest counts: with one row, and with more.
const RUNS: [usize; 2] = [5, 2];

/// Largest deviation of a class of numerics of its own, as a share of the largest sum.
const TOLERANCE: f32 = 1e-4;

/// What is compared: single rows and several, with masks, thresholds and biases, magnitudes down to denormals.
pub(super) fn cases() -> [Case; 11] {
    [
        Case::new(1, 1.0),
        Case::new(1, 1.0).totals(),
        Case::new(1, 1.0).masked().biased(),
        Case::new(ROWS, 1.0).masked(),
        Case::new(2, 1e-3).biased(),
        Case::new(1, 1e-37),
        Case::new(1, 1e3),
        Case::new(ROWS, 1.0).biased().totals(),
        Case::new(MANY, 1.0).masked(),
        Case::new(MANY, 1.0).biased().totals(),
        Case::new(WIDTHS[WIDTHS.len() - 1], 1.0).totals(),
    ]
}

/// What is compared at later starts: one row, several and many, so that the driver has made the kernels of all.
pub(super) fn few_cases() -> [Case; 4] {
    let [one, several, many] = [1, ROWS, MANY].map(|rows| Case::new(rows, 1.0).masked().biased());
    [one, several, one.totals(), many]
}

/// How results compare.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Apart {
    /// Largest deviation, as a share of the largest sum.
    pub worst: f32,
    /// Every bit, and the number of pairs that fired.
    pub same_bits: bool,
}

impl Apart {
    /// Nothing differs yet.
    pub const NONE: Self = Self {
        worst: 0.0,
        same_bits: true,
    };

    /// Both together.
    pub fn and(self, other: Self) -> Self {
        Self {
            worst: self.worst.max(other.worst),
            same_bits: self.same_bits && other.same_bits,
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
pub(super) struct Both<'d> {
    pub device: &'d mut dyn Dense,
    reference: CpuDevice,
    neurons: Neurons,
    /// Of the reference.
    known: Part,
    /// Of the device, and how it lies there.
    part: Option<(Part, Order)>,
    pub shape: DenseShape,
    /// Of the reference.
    expected: Vec<(Case, Answer)>,
}

impl<'d> Both<'d> {
    /// Prepares both for a shape. The device has kernels once [`Both::set`] was called.
    pub fn new(device: &'d mut dyn Dense, shape: &DenseShape) -> Result<Self, DeviceError> {
        let mut reference = CpuDevice::new();
        reference.prepare(shape)?;
        device.prepare(shape)?;
        device.make_room(&Room {
            rows: WIDTHS[WIDTHS.len() - 1],
            clusters: CLUSTERS,
            pairs: OF_WIDE * WIDTHS[WIDTHS.len() - 1],
        })?;
        let neurons = Neurons::new(shape);
        let known = neurons.upload(&mut reference)?;
        Ok(Self {
            device,
            reference,
            neurons,
            known,
            part: None,
            shape: *shape,
            expected: Vec::new(),
        })
    }

    /// Has the device run these kernels, with the neurons in their order.
    pub fn set(&mut self, kernels: &Kernels) -> Result<(), DeviceError> {
        self.device.set_kernels(kernels)?;
        if self.part.is_none_or(|(_, order)| order != kernels.order) {
            self.part = None;
            self.part = Some((self.neurons.upload(self.device)?, kernels.order));
        }
        Ok(())
    }

    fn part(&self) -> Result<Part, DeviceError> {
        let missing = || DeviceError {
            device: self.device.facts().name.clone(),
            what: "has no kernels".into(),
        };
        self.part.map(|(part, _)| part).ok_or_else(missing)
    }

    /// How the device's sums compare with the CPU's.
    pub fn compare(&mut self, case: Case) -> Result<Apart, DeviceError> {
        let known = self.expected.iter().position(|(of, _)| *of == case);
        let at = match known {
            Some(at) => at,
            None => {
                let answer = case.run(&mut self.reference, self.known, &self.shape)?;
                self.expected.push((case, answer));
                self.expected.len() - 1
            }
        };
        let part = self.part()?;
        let found = case.run(self.device, part, &self.shape)?;
        let expected = &self.expected[at].1;
        let worst = deviation(&expected.sums, &found.sums);
        Ok(Apart {
            worst,
            same_bits: worst == 0.0 && expected.fired == found.fired,
        })
    }

    /// All comparisons, up to one that is wrong.
    pub fn compare_all(&mut self) -> Result<Apart, DeviceError> {
        let mut all = Apart::NONE;
        for case in cases() {
            all = all.and(self.compare(case)?);
            if is_wrong(all.worst) {
                break;
            }
        }
        Ok(all)
    }

    /// Seconds of the device and of a thread of the CPU for the first clusters and `rows` rows.
    pub fn timed(&mut self, rows: usize, clusters: usize) -> Result<[f64; 2], DeviceError> {
        let timing = Timing::new(self.shape.d, rows, clusters);
        let works = [timing.of(self.part()?), timing.of(self.known)];
        fastest(self.device, &mut self.reference, &works, &self.shape)
    }

    /// Seconds for a byte of neurons that are uploaded as those that pass through the device.
    pub fn copied(&mut self) -> Result<f64, DeviceError> {
        if self.device.facts().unified {
            return Ok(0.0);
        }
        let count = OF_WIDE * CLUSTER;
        let part = self.device.reserve_for_streams(count)?;
        let mut best = f64::INFINITY;
        for _ in 0..RUNS[0] {
            self.neurons.upload_some(self.device, part, 0..count)?;
            best = best.min(self.device.arrived(part)?.as_secs_f64());
        }
        Ok(best / (count as u64 * self.shape.neuron_bytes()) as f64)
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
            // As for next tokens.
            sums: Sums::Total {
                begins: true,
                ends: true,
            },
        }
    }
}

/// A comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Case {
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
    pub fn new(rows: usize, size: f32) -> Self {
        Self {
            rows,
            size,
            masked: false,
            biased: false,
            totals: false,
        }
    }

    pub fn masked(self) -> Self {
        Self {
            masked: true,
            ..self
        }
    }

    pub fn biased(self) -> Self {
        Self {
            biased: true,
            ..self
        }
    }

    pub fn totals(self) -> Self {
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

/// Seconds of the device and of a thread of the CPU, both at work at once where they share a memory, as they will be:
/// the fastest of some runs each.
fn fastest(
    device: &mut dyn Dense,
    cpu: &mut dyn Dense,
    [work, its]: &[Work<'_>; 2],
    shape: &DenseShape,
) -> Result<[f64; 2], DeviceError> {
    let mut best = [f64::INFINITY; 2];
    let mut sums = vec![0.0; work.sums.vectors(work.clusters.len(), work.rows()) * shape.d];
    let (apart, runs) = (!device.facts().unified, RUNS[usize::from(work.rows() > 1)]);
    for _ in 0..runs {
        let start = Instant::now();
        let ticket = device.submit(work)?;
        let mut take = || -> Result<Duration, DeviceError> {
            Ok(match device.take(ticket, &mut sums)?.took {
                // It has no clock of its own.
                Duration::ZERO => start.elapsed(),
                took => took,
            })
        };
        // What has a memory of its own is not slowed by the CPU, and need not have a clock.
        let before = if apart { Some(take()?) } else { None };
        let submitted = Instant::now();
        run(cpu, its, shape)?;
        let busy = submitted.elapsed();
        let took = before.map_or_else(take, Ok)?;
        for (best, took) in best.iter_mut().zip([took, busy]) {
            *best = best.min(took.as_secs_f64());
        }
    }
    Ok(best)
}

/// How far results are from those expected, as a share of the largest: 0 if every bit is the same. One NaN is as good as
/// another.
pub(crate) fn deviation(expected: &[f32], found: &[f32]) -> f32 {
    let largest = expected.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    let both = expected.iter().zip(found);
    let nans = |a: &f32, b: &f32| a.is_nan() && b.is_nan();
    let apart = both.filter(|(a, b)| a.to_bits() != b.to_bits() && a != b && !nans(a, b));
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
pub(super) fn is_wrong(deviation: f32) -> bool {
    deviation > TOLERANCE
}
