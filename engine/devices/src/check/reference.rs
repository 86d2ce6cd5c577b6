//! Comparisons of a device's FFN with the CPU's, and their times.

use std::ops::Range;
use std::time::{Duration, Instant};

use emberflow_kernels::{Activations, Cpu, DType, Row, quantize_row, with_scale_per_token};

use super::numbers::Numbers;
use crate::{
    Backend, Clusters, CpuDevice, DenseShape, DeviceError, Facts, NeuronRows, Part, PartKind,
    Program, Room, Sums, Ticket, Work,
};
use emberflow_engine::lane::CLUSTER;

/// Clusters of the check's part, the last of which is short.
pub(super) const CLUSTERS: usize = 8;
/// Rows of its comparisons where there are several, and many.
const ROWS: usize = 3;
const MANY: usize = 20;
pub(super) const NEURONS: usize = CLUSTERS * CLUSTER - 51;

/// Numbers of rows that are timed in addition to one, and clusters of these passes.
pub const WIDTHS: [usize; 4] = [8, 32, 64, 256];
pub(super) const OF_WIDE: usize = 4;

/// Runs of which the fastest counts: with one row, and with more.
const RUNS: [usize; 2] = [5, 2];

/// Largest deviation of another class of numerics, as a share of the largest sum: if floats have 32 bits, and if
/// they may have 16, with a unit of 2^-11 for each of a few roundings.
const TOLERANCES: [f32; 2] = [1e-4, 4.0 / 1024.0];

/// Comparisons: single rows and several, with masks, thresholds and biases, magnitudes down to denormals.
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

/// Comparisons of later starts: one row, several and many, so that the driver compiles the kernels of all.
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

    fn upload(&self, device: &mut dyn Backend) -> Result<Part, DeviceError> {
        let part = device.memory(PartKind::Held(NEURONS))?;
        // In two pieces, as clusters arrive.
        for range in [CLUSTER..NEURONS, 0..CLUSTER] {
            self.upload_some(device, part, range)?;
        }
        Ok(part)
    }

    fn upload_some(
        &self,
        device: &mut dyn Backend,
        part: Part,
        range: Range<usize>,
    ) -> Result<Ticket, DeviceError> {
        let rows = |i| NeuronRows {
            gate: self.row(i, 0),
            up: (self.matrices == 3).then(|| self.row(i, 1)),
            down: self.row(i, self.matrices - 1),
        };
        device.upload(part, range.start, &mut range.map(rows))
    }
}

/// The CPU with the check's neurons.
pub(super) struct Reference {
    cpu: CpuDevice,
    neurons: Neurons,
    known: Part,
    shape: DenseShape,
    scales: TokenScales,
    /// Its answers so far.
    answers: Vec<(Case, Answer)>,
}

impl Reference {
    /// For a shape, and tokens with such scales.
    pub fn new(shape: &DenseShape, scales: TokenScales) -> Result<Self, DeviceError> {
        let mut cpu = CpuDevice::new();
        cpu.prepare(&Program::Ffn(*shape))?;
        let neurons = Neurons::new(shape);
        Ok(Self {
            known: neurons.upload(&mut cpu)?,
            cpu,
            neurons,
            shape: *shape,
            scales,
            answers: Vec::new(),
        })
    }

    /// Prepares a device, and has it hold the neurons.
    pub fn prepare(&self, device: &mut dyn Backend) -> Result<Part, DeviceError> {
        device.prepare(&Program::Ffn(self.shape))?;
        device.prepare(&Program::Room(Room {
            rows: WIDTHS[WIDTHS.len() - 1],
            clusters: CLUSTERS,
            pairs: OF_WIDE * WIDTHS[WIDTHS.len() - 1],
        }))?;
        self.neurons.upload(device)
    }

    /// Compares a device's sums with the CPU's, case by case, up to one that is wrong.
    pub fn compare(
        &mut self,
        device: &mut dyn Backend,
        part: Part,
        cases: &[Case],
    ) -> Result<Apart, DeviceError> {
        let mut all = Apart::NONE;
        for &case in cases {
            let known = self.answers.iter().position(|(of, _)| *of == case);
            let at = match known {
                Some(at) => at,
                None => {
                    let answer = case.run(&mut self.cpu, self.known, &self.shape, self.scales)?;
                    self.answers.push((case, answer));
                    self.answers.len() - 1
                }
            };
            let found = case.run(device, part, &self.shape, self.scales)?;
            let expected = &self.answers[at].1;
            let worst = deviation(&expected.sums, &found.sums);
            all = all.and(Apart {
                worst,
                same_bits: worst == 0.0 && expected.fired == found.fired,
            });
            if is_wrong(device.facts(), all.worst) {
                break;
            }
        }
        Ok(all)
    }

    /// What the CPU's sums come to.
    #[cfg(test)]
    pub fn sums(&mut self, case: Case) -> Result<Vec<f32>, DeviceError> {
        let answer = case.run(&mut self.cpu, self.known, &self.shape, self.scales)?;
        Ok(answer.sums)
    }

    /// Seconds of a device and of a thread of the CPU for the first clusters and `rows` rows.
    pub fn timed(
        &mut self,
        device: &mut dyn Backend,
        part: Part,
        [rows, clusters]: [usize; 2],
    ) -> Result<[f64; 2], DeviceError> {
        let timing = Timing::new(self.scales.cpu(), self.shape.d, rows, clusters);
        let works = [timing.of(part), timing.of(self.known)];
        fastest(device, &mut self.cpu, &works, &self.shape)
    }

    /// Seconds for a byte of neurons that are uploaded as those that pass through a device.
    pub fn copied(&self, device: &mut dyn Backend) -> Result<f64, DeviceError> {
        if device.facts().unified {
            return Ok(0.0);
        }
        let count = OF_WIDE * CLUSTER;
        let part = device.memory(PartKind::Passing(count))?;
        let mut best = f64::INFINITY;
        for _ in 0..RUNS[0] {
            let ticket = self.neurons.upload_some(device, part, 0..count)?;
            best = best.min(device.take(ticket, &mut [])?.took.as_secs_f64());
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

/// Scales of a model's activations in 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenScales {
    /// One for each group.
    ByGroup,
    /// One for each token, and what exceeds it: where any rows of the model have one scale, also for rows of other formats.
    One,
}

impl TokenScales {
    /// Those of a model with only such rows.
    pub fn of(dtype: DType) -> Self {
        match dtype.is_per_channel() {
            true => Self::One,
            false => Self::ByGroup,
        }
    }

    /// The CPU that quantises so.
    pub(crate) fn cpu(self) -> Cpu {
        with_scale_per_token(Cpu::detect(), self == Self::One)
    }

    /// What kernels are compared with: rows of a format and tokens with such scales.
    pub(super) fn of_kernels(self, dtype: DType) -> &'static str {
        match self == Self::of(dtype) || !dtype.is_grouped() {
            true => "",
            false => ", tokens with one scale",
        }
    }
}

/// Makes a few elements exceed the scale of their token.
pub(super) fn exceed(x: &mut [f32]) {
    x.iter_mut().step_by(97).for_each(|x| *x *= 40.0);
}

impl Timing {
    fn new(cpu: Cpu, d: usize, rows: usize, clusters: usize) -> Self {
        let x = vec![0.5; rows * d];
        let mut quantized = Activations::default();
        cpu.quantize_activations(&x, rows, &mut quantized);
        Self {
            x,
            quantized,
            clusters: 0..clusters,
        }
    }

    fn of(&self, part: Part) -> Clusters<'_> {
        Clusters {
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
        device: &mut dyn Backend,
        part: Part,
        shape: &DenseShape,
        scales: TokenScales,
    ) -> Result<Answer, DeviceError> {
        let (rows, all) = (self.rows, CLUSTERS * CLUSTER);
        let mut numbers = Numbers::new(rows as u64 + 1);
        let mut x: Vec<f32> = (0..rows * shape.d)
            .map(|_| self.size * numbers.next())
            .collect();
        if scales == TokenScales::One {
            exceed(&mut x);
        }
        let mut quantized = Activations::default();
        scales.cpu().quantize_activations(&x, rows, &mut quantized);
        let mask: Vec<u64> = (0..all * rows / 64)
            .map(|i| 0x9e37_79b9_7f4a_7c15u64.rotate_left(i as u32))
            .collect();
        let bias: Vec<f32> = (0..all).map(|i| i as f32 * 0.001 - 0.2).collect();
        let bias = if self.biased { &bias[..] } else { &[] };
        let work = Clusters {
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

/// Two halves of a running total, the second without the last neurons.
fn in_two(
    device: &mut dyn Backend,
    work: &Clusters<'_>,
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
        let work = Clusters {
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

fn run(
    device: &mut dyn Backend,
    work: &Clusters<'_>,
    shape: &DenseShape,
) -> Result<Answer, DeviceError> {
    let vectors = work.sums.vectors(work.clusters.len(), work.rows());
    let mut sums = vec![f32::NAN; vectors * shape.d];
    let ticket = device.submit(&Work::Clusters(*work))?;
    let fired = device.take(ticket, &mut sums)?.fired;
    Ok(Answer { sums, fired })
}

/// Seconds of the device and of a thread of the CPU, both at work at once where they share a memory, as they will be:
/// the fastest of some runs each.
fn fastest(
    device: &mut dyn Backend,
    cpu: &mut dyn Backend,
    [work, its]: &[Clusters<'_>; 2],
    shape: &DenseShape,
) -> Result<[f64; 2], DeviceError> {
    let mut best = [f64::INFINITY; 2];
    let mut sums = vec![0.0; work.sums.vectors(work.clusters.len(), work.rows()) * shape.d];
    let (apart, runs) = (!device.facts().unified, RUNS[usize::from(work.rows() > 1)]);
    for _ in 0..runs {
        let start = Instant::now();
        let ticket = device.submit(&Work::Clusters(*work))?;
        let mut take = || -> Result<Duration, DeviceError> {
            Ok(match device.take(ticket, &mut sums)?.took {
                // The device has no clock.
                Duration::ZERO => start.elapsed(),
                took => took,
            })
        };
        // Separate memory is not slowed by the CPU, and its device need not have a clock.
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
pub(super) fn deviation(expected: &[f32], found: &[f32]) -> f32 {
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
pub(super) fn is_wrong(device: &Facts, deviation: f32) -> bool {
    deviation > TOLERANCES[usize::from(device.halves)]
}
