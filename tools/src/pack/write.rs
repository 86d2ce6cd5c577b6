//! Writes a container: rows are read, quantized and written in batches.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use emberflow_engine::bundle::{NeuronFormat, across};
use emberflow_engine::meta::Order;
use emberflow_kernels::{
    Cpu, DType, GROUP, QuantizeError, Row, SUPER_GROUPS, Workers, outlier_channels, quantize_q4c,
    quantize_row,
};
use emberflow_models::names::{Role, TensorId, bundled};
use emberflow_models::{Checkpoint, TensorInfo};
use emberflow_storage::container::{BankSpec, Unit, Writer, append_row};
use serde::Serialize;

use super::layout::PackLayout;
use super::options::PackOptions;
use super::rounding::{self, RoundingError, RoundingErrors};
use crate::pack::calibrate::rounded::Rounded;
use crate::{Failure, q4_k};

/// Rows read and quantized at once.
const BATCH: usize = 64;

/// Output of `pack --json`. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct PackReport {
    /// Path of the container.
    pub output: String,
    /// File size in bytes.
    pub bytes: u64,
    /// Neurons written.
    pub neurons: u64,
    /// Bytes of one bundle.
    pub bundle_bytes: u32,
    /// Share of the bundles that is padding.
    pub padding_share: f64,
    /// Alignment of bundles.
    pub sector: u32,
    /// Reason for this sector size.
    pub sector_why: String,
    /// Mean bits per weight of the source, including scales, over all tensors.
    pub source_bits_per_weight: f64,
    /// The same in the container, without padding.
    pub bits_per_weight: f64,
    /// Order of the neurons.
    pub order: Order,
    /// Units (tensors and banks) resumed from an interrupted pack.
    pub resumed_units: usize,
    /// Calibration, if there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibrated: Option<CalibratedReport>,
    /// Chosen formats, if they follow a size or the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mixed: Option<MixedReport>,
    /// Rounding errors of the weights that this run has rounded, by format. Rows that are copied bit for bit do not count.
    pub rounding: Vec<RoundingError>,
    /// Duration.
    pub seconds: f64,
}

/// Chosen formats. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct MixedReport {
    /// Requested size, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked_bytes: Option<u64>,
    /// Whether all weights of the source are floats.
    pub source_is_float: bool,
    /// Format of the neurons.
    pub ffn: String,
    /// Formats of the other matrices, smallest first.
    pub others: Vec<Share>,
}

impl MixedReport {
    /// Whether any of the formats has fewer bits than `dtype`.
    pub fn is_below(&self, dtype: DType) -> bool {
        let names = self.others.iter().map(|share| &share.format);
        let mut formats = names
            .chain([&self.ffn])
            .filter_map(|name| DType::parse(name));
        formats.any(|format| format.row_bytes(SUPER) < dtype.row_bytes(SUPER))
    }
}

/// Elements of a row that are whole blocks in every format.
const SUPER: usize = GROUP * SUPER_GROUPS;

/// Matrices of one format. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct Share {
    /// The format.
    pub format: String,
    /// Number of matrices.
    pub matrices: usize,
    /// Total bytes.
    pub bytes: u64,
}

/// Calibration report. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct CalibratedReport {
    /// Tokens of the calibration text.
    pub tokens: u64,
    /// Layers resumed from an interrupted pack.
    pub resumed_layers: u32,
    /// Peak resident set of the process (VmHWM).
    pub peak_rss_bytes: Option<u64>,
}

/// Packs `source` into `output`, taking the matrices in `rounded` from there.
pub(crate) fn write(
    source: &dyn Checkpoint,
    output: &Path,
    options: &PackOptions,
    rounded: Option<&Rounded>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PackReport, Failure> {
    let start = Instant::now();
    let layout = PackLayout::new(source, output, options, rounded)?;
    let durable = emberflow_storage::container::Options {
        checkpoint_bytes: options.durable_bytes,
    };
    let mut writer = Writer::create_with(output, layout.spec.clone(), durable)?;
    let mut work = Work {
        source,
        layout: &layout,
        rounded,
        workers: Workers::new(options.threads(), None),
        rows: Vec::new(),
        encoded: Vec::new(),
        channels: BTreeMap::new(),
        errors: RoundingErrors::default(),
        step: 1,
        progress: Progress::new(layout.total_bytes(), progress),
    };
    let mut resumed_units = 0;
    for (i, tensor) in layout.tensors.iter().enumerate() {
        if writer.is_done(Unit::Tensor(i)) {
            resumed_units += 1;
            work.progress.advance(layout.spec.tensors[i].len);
        } else {
            work.tensor(&mut writer, i, tensor)?;
        }
    }
    for (i, bank) in layout.spec.banks.iter().enumerate() {
        if writer.is_done(Unit::Bank(i)) {
            resumed_units += 1;
            let neurons = u64::from(bank.neurons);
            (work.progress).advance(neurons * u64::from(layout.spec.geometry.stride));
        } else {
            work.bank(&mut writer, i, bank)?;
        }
    }
    let bytes = writer.layout().file_len;
    writer.finish()?;
    let weights: u64 = (source.tensors().iter())
        .map(|t| t.rows as u64 * t.cols as u64)
        .sum();
    let bits = |bytes: u64| 8.0 * bytes as f64 / weights.max(1) as f64;
    let g = layout.spec.geometry;
    Ok(PackReport {
        output: output.display().to_string(),
        bytes,
        neurons: layout.spec.banks.iter().map(|b| u64::from(b.neurons)).sum(),
        bundle_bytes: g.stride,
        padding_share: 1.0 - f64::from(g.payload()) / f64::from(g.stride),
        sector: layout.sector.bytes,
        sector_why: layout.sector.why.clone(),
        source_bits_per_weight: bits(source.tensors().iter().map(|t| t.source_bytes).sum()),
        bits_per_weight: bits(layout.payload_bytes()),
        order: layout.order_kind(),
        resumed_units,
        calibrated: None,
        mixed: None,
        rounding: work.errors.report(),
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// Adds the squares of rows to those of their columns.
pub(super) fn add_squares(rows: &[f32], squares: &mut [f32]) {
    for row in rows.chunks_exact(squares.len().max(1)) {
        for (sum, w) in squares.iter_mut().zip(row) {
            *sum += w * w;
        }
    }
}

/// Stores a row of a matrix whose outliers are at these channels; without a list each row has its own.
pub(super) fn round(
    dtype: DType,
    row: &[f32],
    channels: Option<&Vec<u16>>,
    quants: &mut [u8],
    scales: &mut [u8],
) -> Result<(), QuantizeError> {
    match channels.filter(|_| dtype == DType::Q4c) {
        Some(channels) => quantize_q4c(row, channels, quants, scales),
        None => quantize_row(dtype, row, quants, scales),
    }
}

/// Stores rows of a matrix into `out`: quants, then scales, row by row. `channels` as for [`round`].
///
/// # Errors
/// The row of `rows` that the format cannot represent, and why.
pub(super) fn encode_rows(
    workers: &Workers,
    dtype: DType,
    cols: usize,
    channels: Option<&Vec<u16>>,
    rows: &[f32],
    out: &mut Vec<u8>,
) -> Result<(), String> {
    let stride = dtype.row_bytes(cols);
    out.resize(rows.len() / cols * stride, 0);
    let failed = Mutex::new(Ok(()));
    workers.for_each_chunk_mut(out, stride, &|_, i, out| {
        let (quants, scales) = out.split_at_mut(dtype.quants_bytes(cols));
        let row = &rows[i * cols..(i + 1) * cols];
        if let Err(e) = round(dtype, row, channels, quants, scales)
            && let Ok(mut failed) = failed.lock()
            && failed.is_ok()
        {
            *failed = Err(format!("row {i} of a batch: {e}"));
        }
    });
    let panicked = || Err("a worker thread panicked".to_owned());
    failed.into_inner().unwrap_or_else(|_| panicked())
}

/// A running pack.
struct Work<'a> {
    source: &'a dyn Checkpoint,
    layout: &'a PackLayout,
    rounded: Option<&'a Rounded>,
    workers: Workers,
    rows: Vec<f32>,
    encoded: Vec<u8>,
    /// Outliers of the matrices that are being written in q4c.
    channels: BTreeMap<TensorId, Vec<u16>>,
    errors: RoundingErrors,
    /// Distance of the rows whose rounding error is measured.
    step: usize,
    progress: Progress<'a>,
}

/// Tells how far a pack is, ten times per second.
pub(super) struct Progress<'a> {
    done: u64,
    total: u64,
    reported: Instant,
    tell: &'a mut dyn FnMut(u64, u64),
}

impl<'a> Progress<'a> {
    /// Of `total` bytes.
    pub fn new(total: u64, tell: &'a mut dyn FnMut(u64, u64)) -> Self {
        Self {
            done: 0,
            total,
            reported: Instant::now(),
            tell,
        }
    }

    /// Adds bytes that are done.
    pub fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        if self.reported.elapsed() > Duration::from_millis(100) || self.done == self.total {
            self.reported = Instant::now();
            (self.tell)(self.done, self.total);
        }
    }
}

impl Work<'_> {
    /// Reads rows into `self.rows`: for an FFN tensor the neurons with packed numbers `first..first + count`,
    /// otherwise rows in their order.
    fn read(
        &mut self,
        id: TensorId,
        bank: Option<usize>,
        first: usize,
        count: usize,
        cols: usize,
    ) -> Result<(), Failure> {
        self.rows.resize(count * cols, 0.0);
        match bank {
            Some(bank) if !self.layout.order.is_empty() => {
                for (i, out) in self.rows.chunks_exact_mut(cols).enumerate() {
                    let row = self.layout.original(bank, first + i);
                    self.source.read_rows(id, row, 1, out)?;
                }
            }
            _ => self.source.read_rows(id, first, count, &mut self.rows)?,
        }
        Ok(())
    }

    /// Reads rows as [`read`](Self::read) does and encodes them into `self.encoded`.
    fn stored(
        &mut self,
        id: TensorId,
        dtype: DType,
        bank: Option<usize>,
        rows: Range<usize>,
        cols: usize,
    ) -> Result<(), Failure> {
        let Some(rounded) = self.rounded.filter(|rounded| rounded.has(id)) else {
            if dtype == DType::Q4k && self.imported(id, bank, rows.clone(), cols)? {
                return Ok(());
            }
            if dtype == DType::Q4c && id.role != Role::Down {
                self.choose_outliers(id, cols)?;
            }
            self.read(id, bank, rows.start, rows.len(), cols)?;
            if id.role == Role::Down && self.layout.format.is_across() {
                return self.encode_across(id);
            }
            self.encode(id, dtype, cols)?;
            return self.measure(id, dtype, bank, rows, cols);
        };
        let stride = dtype.row_bytes(cols);
        self.encoded.resize(rows.len() * stride, 0);
        for (row, out) in rows.clone().zip(self.encoded.chunks_exact_mut(stride)) {
            let row = bank.map_or(row, |bank| self.layout.original(bank, row));
            rounded.read(id, row, out)?;
        }
        self.rows.clear();
        self.measure(id, dtype, bank, rows, cols)
    }

    /// Adds the rounding errors of sampled rows in `self.encoded`, of which `self.rows` has the source's, or is empty.
    fn measure(
        &mut self,
        id: TensorId,
        dtype: DType,
        bank: Option<usize>,
        rows: Range<usize>,
        cols: usize,
    ) -> Result<(), Failure> {
        let (stride, cpu) = (dtype.row_bytes(cols), Cpu::detect());
        let mut read = Vec::new();
        for (i, row) in rows.enumerate().filter(|(_, row)| row % self.step == 0) {
            let source = match self.rows.is_empty() {
                true => {
                    read.resize(cols, 0.0);
                    let row = bank.map_or(row, |bank| self.layout.original(bank, row));
                    self.source.read_rows(id, row, 1, &mut read)?;
                    &read
                }
                false => &self.rows[i * cols..(i + 1) * cols],
            };
            let stored = &self.encoded[i * stride..(i + 1) * stride];
            self.errors
                .add(cpu, source, Row::inline(dtype, cols, stored));
        }
        Ok(())
    }

    /// Encodes Q4_K rows of the checkpoint as q4k into `self.encoded`, losslessly. Returns false if the checkpoint
    /// has another format.
    fn imported(
        &mut self,
        id: TensorId,
        bank: Option<usize>,
        rows: Range<usize>,
        cols: usize,
    ) -> Result<bool, Failure> {
        let stride = DType::Q4k.row_bytes(cols);
        self.encoded.resize(rows.len() * stride, 0);
        for (row, out) in rows.zip(self.encoded.chunks_exact_mut(stride)) {
            let row = bank.map_or(row, |bank| self.layout.original(bank, row));
            if !q4_k::read(self.source, id, row, cols, out)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Chooses the outlier channels of a matrix, unless they are chosen: the input channels with the largest sums of squared
    /// weights. Down's rows are its columns, and each has its own outliers.
    fn choose_outliers(&mut self, id: TensorId, cols: usize) -> Result<(), Failure> {
        if self.channels.contains_key(&id) {
            return Ok(());
        }
        let tensors = self.source.tensors().iter();
        let count = tensors.filter(|t| t.id == id).map(|t| t.rows).sum();
        let mut squares = vec![0.0; cols];
        for first in (0..count).step_by(BATCH) {
            self.read(id, None, first, BATCH.min(count - first), cols)?;
            add_squares(&self.rows, &mut squares);
        }
        self.channels.insert(id, outlier_channels(&squares));
        Ok(())
    }

    /// Encodes `self.rows` into `self.encoded`: quants, then scales, row by row.
    fn encode(&mut self, id: TensorId, dtype: DType, cols: usize) -> Result<(), Failure> {
        let channels = self.channels.get(&id);
        let (workers, rows) = (&self.workers, &self.rows);
        let encoded = encode_rows(workers, dtype, cols, channels, rows, &mut self.encoded);
        encoded.map_err(|reason| {
            Failure::Fault(format!(
                "{}: tensor {id} cannot be stored as {}: {reason}",
                self.source.path().display(),
                dtype.name()
            ))
        })
    }

    /// Encodes `self.rows`, the Down vectors of whole groups of neurons.
    fn encode_across(&mut self, id: TensorId) -> Result<(), Failure> {
        let d = self.layout.format.d;
        self.encoded.clear();
        for rows in self.rows.chunks_exact(across::NEURONS * d) {
            across::encode(rows, d, &mut self.encoded).map_err(|e| {
                let path = self.source.path().display();
                Failure::Fault(format!(
                    "{path}: tensor {id} cannot be stored as mxfp4: {e}"
                ))
            })?;
        }
        Ok(())
    }

    /// Writes one non-FFN tensor.
    fn tensor(&mut self, writer: &mut Writer, i: usize, info: &TensorInfo) -> Result<(), Failure> {
        let dtype = DType::from_code(self.layout.spec.tensors[i].dtype).unwrap_or(DType::F32);
        let c = self.source.config();
        let place = c.ffn_place(info.id.layer);
        let bank = info.id.role.is_by_neuron().then_some(place);
        let table = info.id.role.is_table(c.tied_head);
        self.channels.clear();
        self.step = rounding::step(info.rows);
        let mut rows = Vec::new();
        let mut sink = writer.begin_tensor(i)?;
        for first in (0..info.rows).step_by(BATCH) {
            let count = BATCH.min(info.rows - first);
            self.stored(info.id, dtype, bank, first..first + count, info.cols)?;
            if table {
                rows.clear();
                let encoded = self.encoded.chunks_exact(dtype.row_bytes(info.cols));
                encoded.for_each(|row| append_row(&mut rows, row));
                std::mem::swap(&mut rows, &mut self.encoded);
            }
            sink.append(&self.encoded)?;
            self.progress.advance(self.encoded.len() as u64);
        }
        sink.finish()?;
        Ok(())
    }

    /// Writes one bank of neurons in packed order.
    fn bank(&mut self, writer: &mut Writer, i: usize, bank: &BankSpec) -> Result<(), Failure> {
        let NeuronFormat {
            dtype,
            d,
            inline_scales,
            ..
        } = self.layout.format;
        let (quants, row) = (dtype.quants_bytes(d), dtype.row_bytes(d));
        let stride = u64::from(self.layout.spec.geometry.stride);
        let neurons = bank.neurons as usize;
        let roles = bundled(self.source.config());
        let mut parts: Vec<Vec<u8>> = vec![Vec::new(); roles.len()];
        let (mut gate, mut rest, mut scales) = (Vec::new(), Vec::new(), Vec::new());
        self.channels.clear();
        self.step = rounding::step(neurons);
        let mut sink = writer.begin_bank(i)?;
        for first in (0..neurons).step_by(BATCH) {
            let count = BATCH.min(neurons - first);
            for (&role, part) in roles.iter().zip(&mut parts) {
                let id = TensorId {
                    role,
                    layer: bank.layer,
                    expert: bank.expert,
                };
                self.stored(id, dtype, Some(i), first..first + count, d)?;
                std::mem::swap(part, &mut self.encoded);
            }
            for n in 0..count {
                for buffer in [&mut gate, &mut rest, &mut scales] {
                    buffer.clear();
                }
                for (part, encoded) in parts.iter().enumerate() {
                    let vector = &encoded[n * row..(n + 1) * row];
                    let to = if part == 0 { &mut gate } else { &mut rest };
                    if inline_scales {
                        to.extend_from_slice(vector);
                    } else {
                        to.extend_from_slice(&vector[..quants]);
                        scales.extend_from_slice(&vector[quants..]);
                    }
                }
                sink.append_neuron(&gate, &rest, &scales)?;
            }
            self.progress.advance(count as u64 * stride);
        }
        sink.finish()?;
        Ok(())
    }
}
