//! Devices whose memory is the process's: parts are bytes of it, and a thread computes. How, an [`Arithmetic`] says.

mod experts;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use emberflow_kernels::{Activations, ActivationsRef, Cpu, Row};
use emberflow_storage::prefer_huge_pages;

use super::{
    Backend, Block, Clusters, DenseShape, DeviceError, Facts, GraphRuns, HostBytes, Input,
    NeuronRows, Part, PartKind, PickedTokens, Program, SharedMatrix, Sums, Taken, Ticket, Work,
};
use emberflow_engine::lane::CLUSTER;

/// Bytes of the thread's stack, on which compilers of drivers run; only touched pages take memory.
const STACK: usize = 8 << 20;

/// Longest wait for a piece of work, or until a model's graphs are compiled, which takes drivers of NPUs seconds to a minute.
/// A driver that takes longer hangs: the device is lost. One that hangs at once is found by the probe, sooner.
const LONGEST: Duration = Duration::from_secs(120);

/// How a device computes.
pub trait Arithmetic: Send + 'static {
    /// Has another process make what a program needs, where a driver may crash or hang.
    ///
    /// # Errors
    /// It did not end well.
    fn try_elsewhere(&mut self, _: &Program) -> Result<(), String> {
        Ok(())
    }

    /// Makes what a program needs.
    ///
    /// # Errors
    /// The driver's, or a format that it does not know.
    fn prepare(&mut self, program: &Program) -> Result<(), String>;

    /// Whether all that was made returns what the CPU's arithmetic does, wherever it was tried.
    fn is_exact(&self) -> bool {
        true
    }

    /// Adds the hidden values of a task's clusters, `[neurons × rows]`: zero where a pair is not wanted, or does not fire.
    /// Returns how many fired.
    ///
    /// # Errors
    /// The driver's.
    fn hidden(&mut self, task: &Task, hidden: &mut Vec<f32>) -> Result<u64, String>;

    /// Adds the hidden values of several experts, `[neurons × rows]` each: one after the other, unless it has graphs for
    /// groups. Returns the number that fired, and the graphs run.
    ///
    /// # Errors
    /// The driver's.
    fn experts(
        &mut self,
        experts: &[Task],
        _capacity: usize,
        hidden: &mut Vec<f32>,
    ) -> Result<(u64, GraphRuns), String> {
        let (mut fired, mut graphs) = (0, GraphRuns::default());
        for expert in experts {
            fired += self.hidden(expert, hidden)?;
            graphs.runs += 1;
            graphs.places += expert.rows() as u64;
        }
        Ok((fired, graphs))
    }

    /// What the neurons of a cluster with these hidden values come to for each row, in place of `sums`, `[rows × d]`.
    fn sum(&mut self, task: &Task, cluster: usize, hidden: &[f32], sums: &mut [f32]);

    /// Adds the products of some rows of a matrix with all tokens to `out`, `[tokens × rows]`.
    ///
    /// # Errors
    /// The driver's.
    fn products(
        &mut self,
        matrix: &SharedMatrix,
        rows: Range<usize>,
        tokens: &Tokens,
        out: &mut Vec<f32>,
    ) -> Result<(), String>;
}

/// The rows of a part, matrix by matrix.
#[derive(Clone)]
pub struct Rows {
    pub(super) shape: DenseShape,
    neurons: usize,
    bytes: RowBytes,
}

/// Where rows lie.
#[derive(Clone)]
enum RowBytes {
    Own(Vec<u8>),
    Shared(HostBytes),
}

impl AsRef<[u8]> for Rows {
    fn as_ref(&self) -> &[u8] {
        match &self.bytes {
            RowBytes::Own(bytes) => bytes,
            RowBytes::Shared(bytes) => (**bytes).as_ref(),
        }
    }
}

impl Rows {
    /// Row `matrix` of neuron `i`.
    pub(super) fn row(&self, i: usize, matrix: usize) -> Row<'_> {
        let (dtype, d) = (self.shape.dtype, self.shape.d);
        Row::inline(dtype, d, self.some(i..i + 1, matrix))
    }

    /// The bytes of these neurons' rows of a matrix.
    pub(super) fn some(&self, neurons: Range<usize>, matrix: usize) -> &[u8] {
        let len = self.shape.dtype.row_bytes(self.shape.d);
        let at = (matrix * self.neurons() + neurons.start) * len;
        &self.as_ref()[at..at + neurons.len() * len]
    }

    pub(super) fn neurons(&self) -> usize {
        self.neurons
    }

    /// Copies neurons to their place, from number `first` on. False if it is not here, or the bytes are another's.
    fn put(&mut self, first: usize, neurons: &mut dyn Iterator<Item = NeuronRows<'_>>) -> bool {
        let (all, len) = (self.neurons, self.shape.dtype.row_bytes(self.shape.d));
        let RowBytes::Own(bytes) = &mut self.bytes else {
            return false;
        };
        for (i, neuron) in (first..).zip(neurons) {
            for (matrix, row) in neuron.matrices().enumerate() {
                let Some(to) = bytes
                    .get_mut((matrix * all + i) * len..)
                    .filter(|_| i < all)
                else {
                    return false;
                };
                let (quants, scales) = to[..len].split_at_mut(row.quants().len());
                quants.copy_from_slice(row.quants());
                scales.copy_from_slice(row.scales());
            }
        }
        true
    }
}

/// A copy of an input.
#[derive(Default)]
pub struct Tokens {
    /// Floats; empty where rows of groups are multiplied, which read `quantized`.
    pub(super) x: Vec<f32>,
    pub(super) quantized: Activations,
}

impl Tokens {
    fn new(grouped: bool, x: &[f32], quantized: ActivationsRef<'_>) -> Self {
        let all = PickedTokens::From(0, quantized.tokens());
        Self::picked(grouped, Input { x, quantized }, all)
    }

    /// A copy of some tokens.
    fn picked(grouped: bool, input: Input<'_>, some: PickedTokens<'_>) -> Self {
        let n = input.quantized.n();
        let mut copy = Self {
            x: Vec::with_capacity(if grouped { 0 } else { some.count() * n }),
            quantized: Activations::with_capacity(n, some.count()),
        };
        copy.quantized.clear(n);
        for token in some.each() {
            copy.quantized.push(input.quantized, token);
            if !grouped {
                copy.x.extend_from_slice(&input.x[token * n..][..n]);
            }
        }
        copy
    }

    /// The product of a row with a token.
    pub(super) fn product(&self, cpu: Cpu, of: Row<'_>, token: usize) -> f32 {
        match of.dtype().is_grouped() {
            true => cpu.dot_q(of, self.quantized.token(token)),
            false => cpu.dot(of, &self.x[token * of.len()..][..of.len()]),
        }
    }
}

/// A copy of submitted work on clusters.
pub struct Task {
    pub(super) part: Arc<Rows>,
    /// The first neuron, and how many clusters there are from there on.
    pub(super) first: usize,
    pub(super) clusters: usize,
    pub(super) tokens: Tokens,
    pub(super) mask: Option<Vec<u64>>,
    pub(super) cut: f32,
    pub(super) gate_bias: Vec<f32>,
    pub(super) up_bias: Vec<f32>,
    /// Neurons of the part that count.
    pub(super) end: usize,
    sums: Sums,
    /// Running total of the pieces before.
    total: Vec<f32>,
}

impl Task {
    /// Rows of the input.
    pub(super) fn rows(&self) -> usize {
        self.tokens.quantized.tokens()
    }

    /// Neurons of its clusters that are there, counted from its first.
    pub(super) fn neurons(&self) -> usize {
        let end = self.part.neurons().min(self.end);
        (self.clusters * CLUSTER).min(end.saturating_sub(self.first))
    }

    /// Whether the mask wants neuron `n` for a row.
    pub(super) fn wants(&self, n: usize, row: usize) -> bool {
        let pair = n * self.rows() + row;
        let word = |mask: &Vec<u64>| mask[pair / 64] >> (pair % 64) & 1 == 1;
        self.mask.as_ref().is_none_or(word)
    }

    /// Computes it, cluster after cluster.
    fn answer(mut self, by: &mut dyn Arithmetic) -> Result<Answer, String> {
        let submitted = Instant::now();
        let (d, rows) = (self.part.shape.d, self.rows());
        let mut hidden = Vec::with_capacity(self.neurons() * rows);
        let fired = by.hidden(&self, &mut hidden)?;
        let each = self.sums == Sums::Each;
        let mut total = std::mem::take(&mut self.total);
        let mut sums = vec![0.0; if each { self.clusters } else { 1 } * rows * d];
        for cluster in 0..self.clusters {
            let place = if each { cluster * rows * d } else { 0 };
            let of_cluster = &mut sums[place..place + rows * d];
            let end = ((cluster + 1) * CLUSTER * rows).min(hidden.len());
            let its_hidden = &hidden[(cluster * CLUSTER * rows).min(end)..end];
            by.sum(&self, cluster, its_hidden, of_cluster);
            if !each {
                // With another number of rows `take` reports an error.
                let both = total.iter_mut().zip(of_cluster);
                both.for_each(|(total, sum)| *total += *sum);
            }
        }
        let took = submitted.elapsed();
        Ok(Answer {
            total,
            of: self.sums,
            vectors: rows,
            d,
            ..Answer::plain(sums, taken(fired, took))
        })
    }
}

/// Results of a piece of work.
struct Answer {
    sums: Vec<f32>,
    taken: Taken,
    /// Running total, if one was requested.
    total: Vec<f32>,
    /// Kind of result, and the number of vectors of a running total.
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

/// Counters of a piece of work that took `took`.
fn taken(fired: u64, took: Duration) -> Taken {
    Taken {
        fired,
        took,
        ..Taken::default()
    }
}

/// Contents of a part.
enum HostPart {
    Neurons(Arc<Rows>),
    Matrix(SharedMatrix),
}

/// A device whose memory is the process's.
pub struct HostDevice<A> {
    facts: Facts,
    by: Arc<Mutex<A>>,
    shape: Option<DenseShape>,
    parts: Vec<Option<HostPart>>,
    underway: Option<Receiver<Result<Answer, String>>>,
    /// The answer of the work under way, once it was polled.
    answered: Option<Result<Answer, String>>,
    /// Running total of pieces that continue.
    total: Vec<f32>,
    /// Longest wait for a piece of work, or for what a program needs.
    longest: Duration,
    /// A piece of work took longer: its thread holds `by`, which nobody waits for.
    hangs: bool,
}

impl<A: Arithmetic> HostDevice<A> {
    /// A device that computes so.
    pub(super) fn computing(facts: Facts, by: A) -> Self {
        Self {
            facts,
            by: Arc::new(Mutex::new(by)),
            shape: None,
            parts: Vec::new(),
            underway: None,
            answered: None,
            total: Vec::new(),
            longest: LONGEST,
            hangs: false,
        }
    }

    /// The running total that a piece continues or begins.
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

    /// Keeps a piece's running total, and copies it to `out` at its end.
    fn keep_total(&mut self, total: Vec<f32>, len: usize, out: &mut [f32]) -> bool {
        self.total = total;
        let fits = self.total.len() == len && (out.is_empty() || out.len() == len);
        if fits && !out.is_empty() {
            out.copy_from_slice(&self.total);
        }
        fits
    }

    /// Runs a piece of work on a new thread.
    fn begin(
        &mut self,
        work: impl FnOnce(&mut A) -> Result<Answer, String> + Send + 'static,
    ) -> Result<Ticket, DeviceError> {
        self.answers()?;
        let (send, receive) = channel();
        let by = Arc::clone(&self.by);
        Builder::new()
            .name("ember-device".into())
            .stack_size(STACK)
            .spawn(move || {
                let mut by = by.lock().unwrap_or_else(PoisonError::into_inner);
                // The receiver may be gone.
                let _ = send.send(work(&mut by));
            })
            .map_err(|e| self.failed(format!("cannot start a thread: {e}")))?;
        (self.underway, self.answered) = (Some(receive), None);
        Ok(Ticket::Work)
    }

    /// An error once a piece of work took too long.
    fn answers(&self) -> Result<(), DeviceError> {
        match self.hangs {
            false => Ok(()),
            true => Err(self.failed(format!(
                "did not answer within {} seconds: its library or driver hangs; update it",
                self.longest.as_secs()
            ))),
        }
    }

    fn failed(&self, what: impl Into<String>) -> DeviceError {
        DeviceError {
            device: self.facts.name.clone(),
            what: what.into(),
        }
    }

    fn part(&self, part: Part) -> Option<&HostPart> {
        self.parts.get(part.0)?.as_ref()
    }

    /// The neurons of a part.
    fn neurons(&self, part: Part) -> Result<&Arc<Rows>, DeviceError> {
        match self.part(part) {
            Some(HostPart::Neurons(rows)) => Ok(rows),
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
            tokens: Tokens::new(grouped, work.x, work.quantized),
            mask: work.mask.map(<[u64]>::to_vec),
            cut: work.cut,
            gate_bias: work.gate_bias.to_vec(),
            up_bias: work.up_bias.to_vec(),
            end: work.end,
            sums: work.sums,
        };
        self.begin(move |by| task.answer(by))
    }

    fn begin_products(
        &mut self,
        blocks: &[Block],
        input: Input<'_>,
    ) -> Result<Ticket, DeviceError> {
        let of = |block: &Block| match self.part(block.matrix)? {
            HostPart::Matrix(matrix) => Some((matrix.clone(), block.rows.clone())),
            HostPart::Neurons(_) => None,
        };
        let blocks: Option<Vec<_>> = blocks.iter().map(of).collect();
        let blocks = blocks.ok_or_else(|| self.failed("has no such matrix"))?;
        let grouped = blocks.iter().all(|(matrix, _)| matrix.dtype.is_grouped());
        let tokens = Tokens::new(grouped, input.x, input.quantized);
        self.begin(move |by| {
            let submitted = Instant::now();
            let mut products = Vec::new();
            for (matrix, rows) in blocks {
                by.products(&matrix, rows, &tokens, &mut products)?;
            }
            Ok(Answer::plain(products, taken(0, submitted.elapsed())))
        })
    }
}

impl<A: Arithmetic> Backend for HostDevice<A> {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&mut self, program: &Program) -> Result<(), DeviceError> {
        self.answers()?;
        if let Program::Ffn(shape) = program {
            self.clear();
            if let Some(why) = shape.unsupported() {
                return Err(self.failed(why));
            }
            self.shape = Some(*shape);
        }
        if let Program::Room(_) = program {
            self.total = Vec::new();
        }
        let program = *program;
        for step in [A::try_elsewhere, A::prepare] {
            let begun = self.begin(move |by| {
                step(by, &program)?;
                Ok(Answer::plain(Vec::new(), Taken::default()))
            });
            self.take(begun?, &mut [])?;
        }
        Ok(())
    }

    fn is_exact(&self) -> bool {
        // A thread that hangs holds it.
        !self.hangs
            && self
                .by
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .is_exact()
    }

    fn memory(&mut self, of: PartKind) -> Result<Part, DeviceError> {
        let rows = |neurons, bytes| {
            let shape = self.shape.ok_or_else(|| self.failed("is not prepared"))?;
            let len = neurons * shape.neuron_bytes() as usize;
            let rows = Rows {
                shape,
                neurons,
                bytes: match bytes {
                    Some(bytes) => RowBytes::Shared(bytes),
                    None => {
                        let mut bytes = vec![0; len];
                        prefer_huge_pages(&mut bytes);
                        RowBytes::Own(bytes)
                    }
                },
            };
            match rows.as_ref().len() < len {
                true => Err(self.failed("was given too few bytes")),
                false => Ok(HostPart::Neurons(Arc::new(rows))),
            }
        };
        let held = match of {
            PartKind::Matrix(matrix) => HostPart::Matrix(matrix),
            PartKind::Held(neurons) | PartKind::Passing(neurons) => rows(neurons, None)?,
            PartKind::Shared(bytes, neurons) => rows(neurons, Some(bytes))?,
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
            Some(Some(HostPart::Neurons(rows))) => Arc::make_mut(rows),
            _ => return Err(self.failed("has no such part")),
        };
        match rows.put(first, neurons) {
            true => Ok(Ticket::Upload(part)),
            false => Err(self.failed("has no such place")),
        }
    }

    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError> {
        match work {
            Work::Clusters(work) => self.begin_clusters(work),
            Work::Products(blocks, input) => self.begin_products(blocks, *input),
            Work::Experts(group, input) => self.begin_experts(*group, *input),
        }
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, DeviceError> {
        let Some(underway) = self.underway.as_ref().filter(|_| ticket == Ticket::Work) else {
            return Ok(true);
        };
        if self.answered.is_none() {
            match underway.try_recv() {
                Ok(answer) => self.answered = Some(answer),
                Err(TryRecvError::Empty) => return Ok(false),
                Err(TryRecvError::Disconnected) => {}
            }
        }
        Ok(true)
    }

    fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Taken, DeviceError> {
        if ticket != Ticket::Work {
            return Ok(Taken::default());
        }
        let underway = self.underway.take();
        let underway = underway.ok_or_else(|| self.failed("has no such work"))?;
        let answer = match self.answered.take() {
            Some(answer) => Ok(answer),
            None => underway.recv_timeout(self.longest),
        };
        self.hangs = answer.as_ref().err() == Some(&RecvTimeoutError::Timeout);
        self.answers()?;
        let answer = answer.map_err(|_| self.failed("stopped in the middle"))?;
        let answer = answer.map_err(|e| self.failed(e))?;
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
        (self.underway, self.answered) = (None, None);
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
