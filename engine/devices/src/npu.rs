//! NPUs, by ONNX Runtime: the sums of groups or rows of Gate, Up and other matrices come from static graphs, exact as integers.
//! Scales, activations and Down are the host's, by the CPU's formulas: text has the CPU's bits.
//!
//! ```text
//! NPU    sum[g][row][token] = Σ_j q[row][g][j] · x[token][g][j]         i32
//!        or, where rows and tokens have one scale each, all groups in one sum, and the row's outliers in another
//! host   product = chains of fma(sum, weight scale · activation scale)  as the CPU's kernels add them; or sum · scales
//!        hidden = activated gate · up; Down: fma by fma, in the order of neurons
//! ```
//!
//! The hidden values are floats and Down's scales differ from neuron to neuron, so no integer sum over neurons has the CPU's
//! bits.

mod experts;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::PathBuf;

use emberflow_kernels::{ActivationsRef, Cpu, DType, Outliers, Row, dot_of_sums, outliers};
use emberflow_npu as npu;
use emberflow_npu::{Form, Operands, Provider, RUN_BYTES, Summed, Wanted, Weights};
use emberflow_storage::profile::DeviceProfile;

use super::host::{Arithmetic, HostDevice, Task, Tokens};
use super::{DeviceError, Facts, GraphRuns, Program, SharedMatrix};
use emberflow_engine::lane::CLUSTER;
use emberflow_engine::lane::{Gating, of_up};

/// An NPU.
pub type NpuDevice = HostDevice<Graphs>;

/// Products whose sums are gathered together, for which a cache line is read once.
const TOGETHER: usize = 16;

/// Most bytes of [`Graphs::tokens`]: 256 tokens, the widest graphs', of 8192 elements.
const TOKEN_BYTES: usize = 2 << 20;

/// Rows with outliers that are multiplied at once: those of the highest graphs.
const OUTLIER_ROWS: usize = 1024;

/// Most bytes of the outliers of rows, 1024 of each, and of the activations that they meet.
const OUTLIER_BYTES: usize = (OUTLIER_ROWS << 10) + TOKEN_BYTES / emberflow_kernels::GROUP;

/// Has another process try graphs out (`NpuDevice::try_out`); an error if that did not end well.
pub type TryOut = fn(Provider, Wanted) -> Result<(), String>;

/// Sums from graphs, the rest by the CPU's kernels.
pub struct Graphs {
    cpu: Cpu,
    npu: npu::Npu,
    /// Called before graphs that are untried are made here.
    try_out: Option<TryOut>,
    /// Format and width of the FFN's rows.
    ffn: Option<(DType, usize)>,
    /// Quants of some tokens, as graphs read them.
    tokens: Vec<i8>,
    /// Sums of some products, each of all groups.
    gathered: Vec<i32>,
    /// Outliers of some rows, and the quants of some tokens that they meet.
    outliers: [Vec<i8>; 2],
}

impl NpuDevice {
    /// Opens a provider.
    ///
    /// # Errors
    /// No library, or none that has the provider: what to install.
    pub fn open(provider: Provider) -> Result<Self, DeviceError> {
        Self::open_trying(provider, None)
    }

    /// The same; with `try_out` another process makes the graphs that a model needs first.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_trying(provider: Provider, try_out: Option<TryOut>) -> Result<Self, DeviceError> {
        Self::of(opened(provider)?, try_out)
    }

    /// [`open`](Self::open); calls `progress` whenever a graph was compiled or run for the first time.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_telling(provider: Provider, progress: fn()) -> Result<Self, DeviceError> {
        Self::of(opened(provider)?.telling(progress), None)
    }

    /// Removes compiled graphs and the records of failed ones.
    ///
    /// # Errors
    /// The folder cannot be removed.
    pub fn forget_graphs() -> std::io::Result<()> {
        match graphs_folder().map(std::fs::remove_dir_all) {
            Some(Err(e)) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Makes graphs and runs them, in a process that may end by that; calls `progress` after each.
    ///
    /// # Errors
    /// As [`open`](Self::open), or the provider does not take them.
    pub fn try_out(provider: Provider, wanted: Wanted, progress: fn()) -> Result<(), DeviceError> {
        let mut npu = opened(provider)?.telling(progress);
        npu.try_out(wanted).map_err(|e| failed(provider, &e))
    }

    fn of(opened: npu::Npu, try_out: Option<TryOut>) -> Result<Self, DeviceError> {
        let provider = opened.provider();
        let integers = opened.knows_integers().map_err(|e| failed(provider, &e))?;
        let facts = Facts {
            name: name(provider),
            driver: opened.versions(),
            unified: true,
            memory: u64::MAX,
            longest: u64::MAX,
            rows_at_once: 1,
            floats: false,
            per_channel: true,
            grouped: integers,
            halves: provider.halves(),
            groups: true,
            graphs: &npu::WIDTHS,
            work_bytes: (RUN_BYTES + TOKEN_BYTES + OUTLIER_BYTES) as u64,
            compiles: Some("graphs"),
            kernels: [String::new(), format!("graphs {}", npu::GRAPHS)],
        };
        let graphs = Graphs::of(opened);
        Ok(Self::computing(facts, Graphs { try_out, ..graphs }))
    }
}

fn name(provider: Provider) -> String {
    format!("npu:{provider}")
}

fn failed(provider: Provider, e: &npu::Error) -> DeviceError {
    DeviceError {
        device: name(provider),
        what: e.to_string(),
    }
}

/// A provider, with the folder of compiled graphs.
fn opened(provider: Provider) -> Result<npu::Npu, DeviceError> {
    let opened = npu::Npu::open(provider).map_err(|e| failed(provider, &e))?;
    Ok(opened.with_cache(graphs_folder().as_deref()))
}

/// Where compiled graphs are.
fn graphs_folder() -> Option<PathBuf> {
    DeviceProfile::default_path().map(|path| path.with_file_name("graphs"))
}

/// Rows of a format as graphs read them.
fn form(dtype: DType, cols: usize) -> Result<Form, String> {
    let weights = match dtype {
        DType::Q8 | DType::Q8c => Weights::Bytes,
        DType::Q4 | DType::Q4c => Weights::Nibbles(8),
        DType::Q4k => Weights::Nibbles(0),
        DType::F32 | DType::F16 | DType::BF16 | DType::Mxfp4 | DType::Block(_) => {
            return Err(format!(
                "NPUs do not know {dtype}: pack the model with --quant q8, q8c, q4, q4c or q4k"
            ));
        }
    };
    let summed = match dtype {
        DType::Q8c => Summed::ByRow(0),
        DType::Q4c => Summed::ByRow(outliers(cols)),
        _ => Summed::ByGroup,
    };
    Ok(Form {
        weights,
        summed,
        groups: cols.div_ceil(emberflow_kernels::GROUP),
        row_bytes: dtype.row_bytes(cols),
    })
}

impl Arithmetic for Graphs {
    fn try_elsewhere(&mut self, program: &Program) -> Result<(), String> {
        let wanted = match program {
            Program::Ffn(shape) => Wanted::Rows(form(shape.dtype, shape.d)?),
            Program::Products { dtype, cols } => Wanted::Rows(form(*dtype, *cols)?),
            Program::Groups(shape) => return self.try_groups(*shape),
            Program::Room(_) | Program::ProductRoom(_) => return Ok(()),
        };
        self.first_elsewhere(wanted)
    }

    fn prepare(&mut self, program: &Program) -> Result<(), String> {
        let (dtype, cols) = match program {
            Program::Ffn(shape) => {
                self.npu.clear();
                self.ffn = Some((shape.dtype, shape.d));
                (shape.dtype, shape.d)
            }
            Program::Products { dtype, cols } => (*dtype, *cols),
            Program::Groups(shape) => return self.prepare_groups(*shape),
            Program::Room(_) | Program::ProductRoom(_) => {
                (self.tokens, self.gathered) = (Vec::new(), Vec::new());
                self.outliers = [Vec::new(), Vec::new()];
                return Ok(());
            }
        };
        let prepared = self.npu.prepare(form(dtype, cols)?);
        prepared.map_err(|e| e.to_string())
    }

    fn is_exact(&self) -> bool {
        self.npu.is_exact()
    }

    fn hidden(&mut self, task: &Task, hidden: &mut Vec<f32>) -> Result<u64, String> {
        let (shape, rows) = (task.part.shape, task.rows());
        let some = task.first..task.first + task.neurons();
        let of = |matrix| Multiplied {
            dtype: shape.dtype,
            bytes: task.part.some(some.clone(), matrix),
            x: task.tokens.quantized.all(),
        };
        let before = hidden.len();
        hidden.resize(before + task.neurons() * rows, 0.0);
        let hidden = &mut hidden[before..];
        self.multiply(&of(0), |n, row, gate| hidden[n * rows + row] = gate)?;
        let gating = Gating {
            activation: shape.kind.activation,
            cut: task.cut,
            top: None,
        };
        add_biases(hidden, &task.gate_bias, rows);
        gating.apply(self.cpu, &[], hidden);
        for (n, of_neuron) in hidden.chunks_exact_mut(rows).enumerate() {
            for (row, gate) in of_neuron.iter_mut().enumerate() {
                *gate = if task.wants(n, row) { *gate } else { 0.0 };
            }
        }
        let fired = hidden.iter().filter(|&&gate| gate != 0.0).count();
        if !shape.kind.ungated {
            let bias = &task.up_bias;
            self.multiply(&of(1), |n, row, up| {
                let value = &mut hidden[n * rows + row];
                if *value != 0.0 {
                    *value *= of_up(shape.kind, up + bias.get(n).unwrap_or(&0.0));
                }
            })?;
        }
        Ok(fired as u64)
    }

    fn experts(
        &mut self,
        experts: &[Task],
        capacity: usize,
        hidden: &mut Vec<f32>,
    ) -> Result<(u64, GraphRuns), String> {
        self.hidden_of_experts(experts, capacity, hidden)
    }

    fn sum(&mut self, task: &Task, cluster: usize, hidden: &[f32], sums: &mut [f32]) {
        let (rows, last) = (task.rows(), task.part.shape.matrices() - 1);
        let first = task.first + cluster * CLUSTER;
        let neurons = first..first + hidden.len() / rows;
        let down: Vec<Row<'_>> = neurons.map(|i| task.part.row(i, last)).collect();
        self.cpu.sum_rows_tokens(hidden, &down, rows, sums);
    }

    fn products(
        &mut self,
        matrix: &SharedMatrix,
        rows: Range<usize>,
        tokens: &Tokens,
        out: &mut Vec<f32>,
    ) -> Result<(), String> {
        let len = matrix.dtype.row_bytes(matrix.cols);
        let bytes: &[u8] = (*matrix.bytes).as_ref();
        let of = Multiplied {
            dtype: matrix.dtype,
            bytes: &bytes[rows.start * len..rows.end * len],
            x: tokens.quantized.all(),
        };
        let (first, count) = (out.len(), rows.len());
        out.resize(first + of.x.tokens() * count, 0.0);
        self.multiply(&of, |row, token, product| {
            out[first + token * count + row] = product;
        })
    }
}

/// Adds each neuron's bias to its values, `[neurons × rows]`.
fn add_biases(values: &mut [f32], bias: &[f32], rows: usize) {
    for (values, bias) in values.chunks_exact_mut(rows).zip(bias) {
        values.iter_mut().for_each(|value| *value += bias);
    }
}

/// Rows, which lie one after the other, and tokens.
struct Multiplied<'a> {
    dtype: DType,
    bytes: &'a [u8],
    x: ActivationsRef<'a>,
}

impl Multiplied<'_> {
    fn count(&self) -> usize {
        self.bytes.len() / self.dtype.row_bytes(self.x.n()).max(1)
    }

    fn row(&self, row: usize) -> Row<'_> {
        let (n, len) = (self.x.n(), self.dtype.row_bytes(self.x.n()));
        Row::inline(self.dtype, n, &self.bytes[row * len..][..len])
    }

    /// The outliers of rows, and what those of the first row meet of each token.
    fn picked(&self, tokens: &[i8]) -> [Vec<i8>; 2] {
        let [mut outliers, mut picked] = [Vec::new(), Vec::new()];
        for row in 0..self.count() {
            outliers.extend_from_slice(bytemuck::cast_slice(Outliers::of(self.row(row)).quants));
        }
        let n = self.x.n();
        let channels = Outliers::of(self.row(0)).channels;
        for x in tokens.chunks_exact(token_len(n)) {
            let at = |channel: [u8; 2]| x[..n].get(usize::from(u16::from_le_bytes(channel)));
            picked.extend(channels.iter().map(|&channel| at(channel).unwrap_or(&0)));
        }
        [outliers, picked]
    }

    /// The products of a tile of which `tokens` are the quants: calls `then` with row, token and product. `gathered` has room
    /// for the sums of [`TOGETHER`] of them. Graphs sum up the outliers of rows that have theirs in the channels of the first
    /// row; the CPU sums up those of other rows.
    fn fold(
        &self,
        cpu: Cpu,
        tile: &npu::Sums<'_>,
        tokens: &[i8],
        gathered: &mut [i32],
        mut then: impl FnMut(usize, usize, f32),
    ) {
        let (len, groups) = (token_len(self.x.n()), gathered.len() / TOGETHER);
        let picked = Outliers::of(self.row(0)).channels;
        for (r, row) in tile.rows.clone().enumerate() {
            let weights = self.row(row);
            let others = Some(Outliers::of(weights)).filter(|its| its.channels != picked);
            for first in tile.tokens.clone().step_by(TOGETHER) {
                let count = TOGETHER.min(tile.tokens.end - first);
                let at = r * tile.width + first - tile.tokens.start;
                for g in 0..groups {
                    let sums = &tile.sums[g * tile.group + at..][..count];
                    for (i, &sum) in sums.iter().enumerate() {
                        gathered[i * groups + g] = sum;
                    }
                }
                for (i, sums) in gathered.chunks_exact_mut(groups).take(count).enumerate() {
                    let x = self.x.range(first + i, 1);
                    if let (Some(its), [_, sum]) = (others, &mut *sums) {
                        *sum = sum_of(its, &tokens[(first + i) * len..][..x.n()]);
                    }
                    then(row, first + i, dot_of_sums(cpu, weights, sums, x));
                }
            }
        }
    }
}

/// Batch size: tokens that fit [`TOKEN_BYTES`], at least one, rounded down to the widest graph if possible.
fn tokens_at_once(n: usize) -> usize {
    let [.., widest] = npu::WIDTHS;
    let fit = (TOKEN_BYTES / token_len(n)).max(1);
    match fit - fit % widest {
        0 => fit,
        full => full,
    }
}

/// Quants of a token as graphs read it: those of whole groups.
fn token_len(n: usize) -> usize {
    n.next_multiple_of(emberflow_kernels::GROUP).max(1)
}

/// Dot product of a row's outliers with the activations of their channels.
fn sum_of(outliers: Outliers<'_>, token: &[i8]) -> i32 {
    let product = |(quant, channel): (i8, usize)| {
        let x = token.get(channel).copied().unwrap_or(0);
        i32::from(quant) * i32::from(x)
    };
    outliers.each().map(product).sum()
}

impl Graphs {
    /// Has another process make graphs that are untried.
    fn first_elsewhere(&self, wanted: Wanted) -> Result<(), String> {
        match self.try_out {
            Some(try_out) if self.npu.is_untried(wanted) => try_out(self.npu.provider(), wanted),
            _ => Ok(()),
        }
    }

    fn of(npu: npu::Npu) -> Self {
        Self {
            cpu: Cpu::detect(),
            npu,
            try_out: None,
            ffn: None,
            tokens: Vec::new(),
            gathered: Vec::new(),
            outliers: [Vec::new(), Vec::new()],
        }
    }

    /// Puts the quants of tokens as graphs read them.
    fn quantize(&mut self, x: ActivationsRef<'_>) {
        self.tokens.clear();
        self.quantize_more(x);
    }

    /// Adds the quants of tokens.
    fn quantize_more(&mut self, x: ActivationsRef<'_>) {
        let groups = x.n().div_ceil(emberflow_kernels::GROUP);
        (self.tokens).reserve_exact(x.tokens() * groups * emberflow_kernels::GROUP);
        for token in 0..x.tokens() {
            x.each_quant(token, |quant| self.tokens.push(quant));
        }
    }

    /// The products of rows with all tokens, as many tokens at once as [`TOKEN_BYTES`] allows: calls `then` with row, token and
    /// product.
    fn multiply(
        &mut self,
        of: &Multiplied<'_>,
        mut then: impl FnMut(usize, usize, f32),
    ) -> Result<(), String> {
        let (tokens, at_once) = (of.x.tokens(), tokens_at_once(of.x.n()));
        for first in (0..tokens).step_by(at_once) {
            let some = Multiplied {
                x: of.x.range(first, at_once.min(tokens - first)),
                ..*of
            };
            self.multiply_some(&some, |row, token, product| {
                then(row, first + token, product)
            })?;
        }
        Ok(())
    }

    /// The products of rows with tokens that fit in [`TOKEN_BYTES`]: of all rows at once, or of [`OUTLIER_ROWS`] that have
    /// outliers.
    fn multiply_some(
        &mut self,
        of: &Multiplied<'_>,
        mut then: impl FnMut(usize, usize, f32),
    ) -> Result<(), String> {
        self.quantize(of.x);
        let (len, count) = (of.dtype.row_bytes(of.x.n()), of.count());
        let at_once = match of.dtype {
            DType::Q4c => OUTLIER_ROWS,
            _ => count.max(1),
        };
        for first in (0..count).step_by(at_once) {
            let end = count.min(first + at_once);
            let some = Multiplied {
                bytes: &of.bytes[first * len..end * len],
                ..*of
            };
            self.pick(&some);
            self.multiply_at_once(&some, |row, token, product| {
                then(first + row, token, product)
            })?;
        }
        Ok(())
    }

    /// Gathers the outliers of rows, and what those of the first row meet of each token.
    fn pick(&mut self, of: &Multiplied<'_>) {
        self.outliers = match of.dtype {
            DType::Q4c => of.picked(&self.tokens),
            _ => Default::default(),
        };
    }

    /// The products of rows with tokens that are quantised, after [`pick`](Self::pick). Graphs sum up the outliers of rows that
    /// have theirs in the channels of the first, as packed matrices do; the CPU sums up those of other rows.
    fn multiply_at_once(
        &mut self,
        of: &Multiplied<'_>,
        mut then: impl FnMut(usize, usize, f32),
    ) -> Result<(), String> {
        let form = form(of.dtype, of.x.n())?;
        let (cpu, gathered, tokens) = (self.cpu, &mut self.gathered, &self.tokens);
        gathered.resize(TOGETHER * form.sums(), 0);
        if of.count() == 0 {
            return Ok(());
        }
        let fold = |tile: npu::Sums<'_>| {
            of.fold(cpu, &tile, tokens, gathered, &mut then);
        };
        let outliers = match form.outliers() {
            0 => [&[][..]; 2],
            _ => self.outliers.each_ref().map(Vec::as_slice),
        };
        let operands = Operands {
            rows: of.bytes,
            tokens: &self.tokens,
            outliers,
        };
        let multiplied = self.npu.multiply(form, operands, fold);
        multiplied.map_err(|e| e.to_string())
    }
}
