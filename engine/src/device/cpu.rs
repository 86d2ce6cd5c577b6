//! The CPU as a device: a thread of its own with the ordinary kernels. It is the reference of
//! [`check`](super::check), and stands in for a device where there is none.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::Builder;
use std::time::Instant;

use emberflow_kernels::{Activations, ActivationsRef, Cpu, Row};
use emberflow_storage::prefer_huge_pages;

use super::{
    Backend, Block, Clusters, DenseShape, DeviceError, Facts, HostBytes, Input, NeuronRows, Part,
    PartKind, Program, SharedMatrix, Sums, Taken, Ticket, Work,
};
use crate::activation::{Gating, of_up};
use crate::cluster::CLUSTER;

/// Bytes of the thread's stack.
const STACK: usize = 256 << 10;

/// The rows of a part, matrix by matrix.
#[derive(Clone)]
struct Rows {
    shape: DenseShape,
    bytes: Vec<u8>,
}

impl AsRef<[u8]> for Rows {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Rows {
    /// Row `matrix` of neuron `i`.
    fn row(&self, i: usize, matrix: usize) -> Row<'_> {
        let (dtype, d) = (self.shape.dtype, self.shape.d);
        let len = dtype.row_bytes(d);
        let at = (matrix * self.neurons() + i) * len;
        Row::inline(dtype, d, &self.bytes[at..at + len])
    }

    fn neurons(&self) -> usize {
        self.bytes.len() / self.shape.neuron_bytes() as usize
    }
}

/// A copy of submitted work.
struct Task {
    part: Arc<Rows>,
    first: usize,
    clusters: usize,
    x: Vec<f32>,
    quantized: Activations,
    mask: Option<Vec<u64>>,
    cut: f32,
    gate_bias: Vec<f32>,
    up_bias: Vec<f32>,
    end: usize,
    sums: Sums,
    /// Of the work before, where that goes on.
    total: Vec<f32>,
    submitted: Instant,
}

/// Sums of each cluster and row, and what came out besides.
struct Answer {
    sums: Vec<f32>,
    taken: Taken,
    /// What the work has come to so far, where that is asked for.
    total: Vec<f32>,
    /// What is to come out of it: so many vectors of `d` elements, where it is a total.
    of: Sums,
    vectors: usize,
    d: usize,
}

impl Answer {
    /// Results as they are.
    fn plain(sums: Vec<f32>, taken: Taken) -> Self {
        Self {
            sums,
            taken,
            total: Vec::new(),
            of: Sums::Each,
            vectors: 0,
            d: 0,
        }
    }
}

/// What a part has.
enum CpuPart {
    Neurons(Arc<Rows>),
    Matrix(SharedMatrix),
}

/// The CPU as a device.
pub struct CpuDevice {
    facts: Facts,
    shape: Option<DenseShape>,
    parts: Vec<Option<CpuPart>>,
    underway: Option<Receiver<Answer>>,
    /// What work came to whose total goes on.
    total: Vec<f32>,
}

impl CpuDevice {
    /// With as much memory as the machine has.
    pub fn new() -> Self {
        Self {
            facts: Facts {
                name: "cpu".into(),
                driver: Cpu::detect().name().into(),
                unified: true,
                memory: u64::MAX,
                longest: u64::MAX,
                rows_at_once: 1,
                kernels: ["the CPU's", "the CPU's"].map(String::from),
            },
            shape: None,
            parts: Vec::new(),
            underway: None,
            total: Vec::new(),
        }
    }

    /// The total that a work goes on from, or begins.
    fn total_of(&mut self, work: &Clusters<'_>, d: usize) -> Vec<f32> {
        let Sums::Total { begins, .. } = work.sums else {
            return Vec::new();
        };
        let mut total = std::mem::take(&mut self.total);
        if begins {
            total.clear();
            total.resize(work.rows() * d, 0.0);
        }
        total
    }

    /// Keeps a work's total, and copies it to `out` where it ends.
    fn keep_total(&mut self, total: Vec<f32>, len: usize, out: &mut [f32]) -> bool {
        self.total = total;
        let fits = self.total.len() == len && (out.is_empty() || out.len() == len);
        if fits && !out.is_empty() {
            out.copy_from_slice(&self.total);
        }
        fits
    }

    /// Begins some work on a thread of its own.
    fn begin(
        &mut self,
        work: impl FnOnce() -> Answer + Send + 'static,
    ) -> Result<Ticket, DeviceError> {
        let (send, receive) = channel();
        Builder::new()
            .name("ember-device".into())
            .stack_size(STACK)
            // The receiver may be gone.
            .spawn(move || _ = send.send(work()))
            .map_err(|e| self.failed(&format!("cannot start a thread: {e}")))?;
        self.underway = Some(receive);
        Ok(Ticket::Work)
    }

    fn failed(&self, what: &str) -> DeviceError {
        DeviceError {
            device: self.facts.name.clone(),
            what: what.into(),
        }
    }
}

impl Default for CpuDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl CpuDevice {
    fn part(&self, part: Part) -> Option<&CpuPart> {
        self.parts.get(part.0)?.as_ref()
    }

    /// The neurons of a part.
    fn neurons(&self, part: Part) -> Result<&Arc<Rows>, DeviceError> {
        match self.part(part) {
            Some(CpuPart::Neurons(rows)) => Ok(rows),
            _ => Err(self.failed("has no such part")),
        }
    }

    fn begin_clusters(&mut self, work: &Clusters<'_>) -> Result<Ticket, DeviceError> {
        let part = Arc::clone(self.neurons(work.part)?);
        let grouped = part.shape.dtype.is_grouped();
        let task = Task {
            total: self.total_of(work, part.shape.d),
            part,
            first: work.clusters.start * CLUSTER,
            clusters: work.clusters.len(),
            x: floats(grouped, work.x),
            quantized: copied(work.quantized),
            mask: work.mask.map(<[u64]>::to_vec),
            cut: work.cut,
            gate_bias: work.gate_bias.to_vec(),
            up_bias: work.up_bias.to_vec(),
            end: work.end,
            sums: work.sums,
            submitted: Instant::now(),
        };
        self.begin(move || task.answer())
    }

    fn begin_products(
        &mut self,
        blocks: &[Block],
        input: Input<'_>,
    ) -> Result<Ticket, DeviceError> {
        let of = |block: &Block| match self.part(block.matrix)? {
            CpuPart::Matrix(matrix) => Some((matrix.clone(), block.rows.clone())),
            CpuPart::Neurons(_) => None,
        };
        let blocks: Option<Vec<_>> = blocks.iter().map(of).collect();
        let blocks = blocks.ok_or_else(|| self.failed("has no such matrix"))?;
        let grouped = blocks.iter().all(|(matrix, _)| matrix.dtype.is_grouped());
        let task = Multiply {
            blocks,
            x: floats(grouped, input.x),
            quantized: copied(input.quantized),
            submitted: Instant::now(),
        };
        self.begin(move || task.answer())
    }
}

impl Backend for CpuDevice {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&mut self, program: &Program) -> Result<(), DeviceError> {
        let Program::Ffn(shape) = program else {
            return Ok(());
        };
        self.clear();
        match shape.unsupported() {
            Some(why) => Err(self.failed(&why)),
            None => {
                self.shape = Some(*shape);
                Ok(())
            }
        }
    }

    fn memory(&mut self, of: PartKind) -> Result<Part, DeviceError> {
        let held = match of {
            PartKind::Matrix(matrix) => CpuPart::Matrix(matrix),
            PartKind::Held(neurons) | PartKind::Passing(neurons) => {
                let shape = self.shape.ok_or_else(|| self.failed("is not prepared"))?;
                let mut bytes = vec![0; neurons * shape.neuron_bytes() as usize];
                prefer_huge_pages(&mut bytes);
                CpuPart::Neurons(Arc::new(Rows { shape, bytes }))
            }
        };
        Ok(put(&mut self.parts, held))
    }

    fn host(&mut self, part: Part) -> Result<Option<HostBytes>, DeviceError> {
        let part = Arc::clone(self.neurons(part)?);
        Ok(Some(part))
    }

    fn release(&mut self, part: Part) {
        self.parts[part.0] = None;
    }

    fn upload(
        &mut self,
        part: Part,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<Ticket, DeviceError> {
        let rows = match self.parts.get_mut(part.0) {
            Some(Some(CpuPart::Neurons(rows))) => Arc::make_mut(rows),
            _ => return Err(self.failed("has no such part")),
        };
        let (all, len) = (rows.neurons(), rows.shape.dtype.row_bytes(rows.shape.d));
        for (i, neuron) in (first..).zip(neurons) {
            for (matrix, row) in neuron.matrices().enumerate() {
                let to = &mut rows.bytes[(matrix * all + i) * len..][..len];
                let (quants, scales) = to.split_at_mut(row.quants().len());
                quants.copy_from_slice(row.quants());
                scales.copy_from_slice(row.scales());
            }
        }
        Ok(Ticket::Upload(part))
    }

    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError> {
        match work {
            Work::Clusters(work) => self.begin_clusters(work),
            Work::Products(blocks, input) => self.begin_products(blocks, *input),
        }
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, DeviceError> {
        // Sums are taken in once they are asked for.
        Ok(ticket != Ticket::Work)
    }

    fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Taken, DeviceError> {
        if ticket != Ticket::Work {
            return Ok(Taken::default());
        }
        let underway = self.underway.take();
        let underway = underway.ok_or_else(|| self.failed("has no such work"))?;
        let answer = underway
            .recv()
            .map_err(|_| self.failed("stopped in the middle"))?;
        let fits = match answer.of {
            Sums::Total { .. } => self.keep_total(answer.total, answer.vectors * answer.d, out),
            Sums::Each if out.len() == answer.sums.len() => {
                out.copy_from_slice(&answer.sums);
                true
            }
            Sums::Each => false,
        };
        match fits {
            true => Ok(answer.taken),
            false => Err(self.failed("was asked for other sums")),
        }
    }

    fn clear(&mut self) {
        self.underway = None;
        self.parts.clear();
        self.total = Vec::new();
    }
}

/// Puts what a part has in the first free place.
pub(super) fn put<T>(places: &mut Vec<Option<T>>, value: T) -> Part {
    let free = places.iter().position(Option::is_none);
    let number = free.unwrap_or(places.len());
    match places.get_mut(number) {
        Some(place) => *place = Some(value),
        None => places.push(Some(value)),
    }
    Part(number)
}

/// A copy of inputs; none where rows of groups are multiplied, which read them in 8 bits.
fn floats(grouped: bool, x: &[f32]) -> Vec<f32> {
    if grouped { Vec::new() } else { x.to_vec() }
}

/// Activations of their own.
fn copied(of: ActivationsRef<'_>) -> Activations {
    let mut copy = Activations::default();
    copy.clear(of.n());
    for row in 0..of.tokens() {
        copy.push(of, row);
    }
    copy
}

/// The products of some rows of a matrix with all tokens, `[tokens × rows]`, one row and token after the other.
pub(super) fn products(
    cpu: Cpu,
    matrix: &SharedMatrix,
    rows: Range<usize>,
    x: &[f32],
    quantized: &Activations,
) -> Vec<f32> {
    let len = matrix.dtype.row_bytes(matrix.cols);
    let bytes: &[u8] = (*matrix.bytes).as_ref();
    let tokens = 0..quantized.tokens();
    let pairs = tokens.flat_map(|token| rows.clone().map(move |row| (token, row)));
    let product = |(token, row): (usize, usize)| {
        let row = Row::inline(matrix.dtype, matrix.cols, &bytes[row * len..][..len]);
        match matrix.dtype.is_grouped() {
            true => cpu.dot_q(row, quantized.token(token)),
            false => cpu.dot(row, &x[token * matrix.cols..][..matrix.cols]),
        }
    };
    pairs.map(product).collect()
}

/// Products to be computed.
struct Multiply {
    blocks: Vec<(SharedMatrix, Range<usize>)>,
    x: Vec<f32>,
    quantized: Activations,
    submitted: Instant,
}

impl Multiply {
    /// Computes them, one row and token after the other.
    fn answer(&self) -> Answer {
        let cpu = Cpu::detect();
        let all: usize = self.blocks.iter().map(|(_, rows)| rows.len()).sum();
        let mut sums = Vec::with_capacity(all * self.quantized.tokens());
        for (matrix, rows) in &self.blocks {
            let rows = rows.clone();
            sums.append(&mut products(cpu, matrix, rows, &self.x, &self.quantized));
        }
        let (fired, took) = (0, self.submitted.elapsed());
        Answer::plain(sums, Taken { fired, took })
    }
}

impl Task {
    /// Computes it, one (neuron, row) pair after the other.
    fn answer(mut self) -> Answer {
        let (d, rows) = (self.part.shape.d, self.quantized.tokens());
        let cpu = Cpu::detect();
        let mut total = std::mem::take(&mut self.total);
        let mut sums = match self.sums {
            Sums::Each => vec![0.0; self.clusters * rows * d],
            Sums::Total { .. } => vec![0.0; d],
        };
        let mut fired = 0;
        for at in 0..self.clusters * rows {
            let (cluster, row) = (at / rows, at % rows);
            if self.sums == Sums::Each {
                fired += self.add(cpu, cluster, row, &mut sums[at * d..][..d]);
                continue;
            }
            sums.fill(0.0);
            fired += self.add(cpu, cluster, row, &mut sums);
            // Of another number of rows it is not what is asked for.
            if let Some(total) = total.get_mut(row * d..(row + 1) * d) {
                total.iter_mut().zip(&sums).for_each(|(t, s)| *t += s);
            }
        }
        let took = self.submitted.elapsed();
        Answer {
            total,
            of: self.sums,
            vectors: rows,
            d,
            ..Answer::plain(sums, Taken { fired, took })
        }
    }

    /// Adds what the neurons of a cluster are for a row; how many fired.
    fn add(&self, cpu: Cpu, cluster: usize, row: usize, sum: &mut [f32]) -> u64 {
        let rows = self.quantized.tokens();
        let last = self.part.shape.matrices() - 1;
        let mut fired = 0;
        for n in cluster * CLUSTER..(cluster + 1) * CLUSTER {
            let i = self.first + n;
            if i >= self.part.neurons().min(self.end) || !self.wants(n * rows + row) {
                continue;
            }
            let gate = self.gate(cpu, n, row);
            if gate == 0.0 {
                continue;
            }
            fired += 1;
            let factor = self.hidden(cpu, gate, n, row);
            if factor != 0.0 {
                cpu.axpy_rows(&[factor], &[self.part.row(i, last)], sum);
            }
        }
        fired
    }

    fn wants(&self, pair: usize) -> bool {
        let word = |mask: &Vec<u64>| mask[pair / 64] >> (pair % 64) & 1 == 1;
        self.mask.as_ref().is_none_or(word)
    }

    /// The product of a row with a token.
    fn product(&self, cpu: Cpu, of: Row<'_>, row: usize) -> f32 {
        match of.dtype().is_grouped() {
            true => cpu.dot_q(of, self.quantized.token(row)),
            false => cpu.dot(of, &self.x[row * of.len()..][..of.len()]),
        }
    }

    /// The activated gate of the `n`-th neuron.
    fn gate(&self, cpu: Cpu, n: usize, row: usize) -> f32 {
        let mut gate = [self.product(cpu, self.part.row(self.first + n, 0), row)];
        gate[0] += self.gate_bias.get(n).unwrap_or(&0.0);
        let gating = Gating {
            activation: self.part.shape.kind.activation,
            cut: self.cut,
            top: None,
        };
        gating.apply(cpu, &[], &mut gate);
        gate[0]
    }

    /// The factor of the `n`-th neuron's Down.
    fn hidden(&self, cpu: Cpu, gate: f32, n: usize, row: usize) -> f32 {
        let kind = self.part.shape.kind;
        if kind.ungated {
            return gate;
        }
        let mut up = self.product(cpu, self.part.row(self.first + n, 1), row);
        up += self.up_bias.get(n).unwrap_or(&0.0);
        gate * of_up(kind, up)
    }
}
