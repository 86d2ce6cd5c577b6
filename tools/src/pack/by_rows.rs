//! Containers of models in whose FFNs every neuron is active: all matrices lie row by row, those of a quantized checkpoint in its
//! own blocks.
//!
//! Such a container has the bits and the size of its checkpoint, and is computed in the same way. What products cannot read
//! (GPTQ, AWQ, FP8 with scales elsewhere) gets a format of ours with at least as many bits, as do floats if the whole
//! checkpoint is floats.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use emberflow_engine::meta::{ContainerMeta, Order, Quant};
use emberflow_engine::{unpacked, unpacked_geometry};
use emberflow_kernels::{Cpu, DType, Row, Workers};
use emberflow_models::names::{Role, TensorId};
use emberflow_models::{Bands, Checkpoint, TensorInfo};
use emberflow_storage::container::{
    Container, Options, ROW_CHECKSUM, Spec, TensorEntry, TensorSpec, Unit, Writer, append_row,
};

use super::by_source::{decided, format_of};
use super::layout::{state_of, to_json};
use super::mix;
use super::options::{PackOptions, is_float, is_float_name};
use super::rounding::{self, RoundingErrors};
use super::write::{MixedReport, PackReport, Progress, Share, encode_rows};
use crate::{Failure, q4_k};

/// Bytes of rows in f32 that are read at once. A matrix that is stored by columns is read once for each batch.
const BATCH: usize = 64 << 20;

/// Whether `pack` with these options stores a model's matrices row by row.
pub(super) fn applies(source: &dyn Checkpoint, options: &PackOptions) -> bool {
    let of_neurons = options.stats.is_some() || options.calibrate.is_some();
    options.by_source.ffn && !of_neurons && (options.keep || !source.config().has_zeros())
}

/// A matrix of the container.
struct RowMatrix {
    id: TensorId,
    /// Rows that are multiplied.
    rows: usize,
    cols: usize,
    dtype: DType,
    /// Whether its rows are those that are multiplied in the checkpoint.
    is_copied: bool,
    /// Each row is followed by its checksum.
    is_table: bool,
}

impl RowMatrix {
    /// The matrices of `source`. `own`: the format in which a matrix's rows are multiplied without being packed, if that is
    /// known.
    fn all(
        source: &dyn Checkpoint,
        options: &PackOptions,
        own: impl Fn(&TensorInfo) -> Option<DType>,
    ) -> Vec<Self> {
        let (c, floats) = (source.config(), is_float(source));
        let decided = decided(source, options);
        let of = |info: &TensorInfo| {
            let by_rows = match info.id.role == Role::Down {
                true => TensorInfo {
                    rows: info.cols,
                    cols: info.rows,
                    ..info.clone()
                },
                false => info.clone(),
            };
            let own = own(info).filter(|&own| keeps(options, info, own, floats));
            let dtype = own.unwrap_or_else(|| match info.id.role.is_bundled() {
                true => format_by_rows(&by_rows, floats),
                false => decided.dtype_of(info.id),
            });
            Self {
                id: info.id,
                rows: by_rows.rows,
                cols: by_rows.cols,
                dtype,
                is_copied: own.is_some(),
                is_table: info.id.role.is_table(c.tied_head),
            }
        };
        source.tensors().iter().map(of).collect()
    }

    fn spec(&self) -> TensorSpec {
        let checksum = if self.is_table { ROW_CHECKSUM } else { 0 };
        TensorSpec {
            name: self.id.to_string(),
            dtype: self.dtype.code(),
            dims: vec![self.rows as u64, self.cols as u64],
            len: (self.rows * (self.dtype.row_bytes(self.cols) + checksum)) as u64,
        }
    }

    /// Bytes of its rows.
    fn bytes(&self) -> u64 {
        (self.rows * self.dtype.row_bytes(self.cols)) as u64
    }
}

/// Whether tensors of a role are multiplied, or tables: not small ones, or lists of numbers.
fn is_weight(role: Role) -> bool {
    role.is_bundled() || mix::is_chosen(role)
}

/// The format of a matrix of an FFN, of which `info` has the rows that are multiplied.
fn format_by_rows(info: &TensorInfo, floats: bool) -> DType {
    match info.source_dtype.as_str() {
        "MXFP4" if info.cols.is_multiple_of(32) => DType::Mxfp4,
        _ => format_of(info, floats),
    }
}

/// Whether a tensor, whose rows are multiplied in `own`, is copied.
fn keeps(options: &PackOptions, info: &TensorInfo, own: DType, floats: bool) -> bool {
    let follows = match mix::is_embedding(info.id.role) {
        true => options.by_source.embedding,
        false => options.by_source.attention || !info.id.role.is_projection(),
    };
    let copied = match own {
        // Of integers in a format that products cannot read, too.
        DType::F32 | DType::F16 | DType::BF16 => {
            is_float_name(&info.source_dtype) && (options.keep || !floats)
        }
        _ => true,
    };
    follows && copied
}

/// The container of these matrices.
fn spec(source: &dyn Checkpoint, matrices: &[RowMatrix]) -> Result<Spec, Failure> {
    let formats = matrices.iter().map(|of| (of.id.role, of.dtype, of.bytes()));
    // A quantizer's name for the whole is true of what is copied.
    let mut weights = matrices.iter().filter(|of| is_weight(of.id.role));
    let copied = weights.all(|of| of.is_copied);
    let stated = source.quantization().filter(|_| copied);
    let meta = ContainerMeta::of(source, Quant::of_matrices(formats, stated));
    let (geometry, bundle_dtype) = unpacked_geometry(source.config(), source.path())?;
    Ok(Spec {
        geometry,
        bundle_dtype,
        meta: to_json(&meta)?,
        stats: Vec::new(),
        predictor_len: 0,
        tensors: matrices.iter().map(RowMatrix::spec).collect(),
        banks: Vec::new(),
        source: format!(
            "{:016x} {:016x}",
            source.fingerprint(),
            state_of(source.path())
        ),
    })
}

/// The container that [`write`] would make of a model of which only the configuration is known. Embedding and head are floats
/// in nearly all quantized checkpoints; projections are where no other matrices but those of experts are quantized, in MXFP4.
pub(super) fn described(source: &dyn Checkpoint, options: &PackOptions) -> Result<Spec, Failure> {
    let mut neurons = source.tensors().iter().filter(|of| of.id.role.is_bundled());
    let in_floats = neurons.all(|of| is_float_name(&of.source_dtype) || of.source_dtype == "MXFP4");
    let own = |of: &TensorInfo| {
        let role = of.id.role;
        let known = in_floats || !role.is_projection();
        match of.source_dtype.as_str() {
            "BF16" if known && is_weight(role) => Some(DType::BF16),
            _ => None,
        }
    };
    spec(source, &RowMatrix::all(source, options, own))
}

/// Packs the checkpoint at `path`, which `source` is, into `output`.
pub(super) fn write(
    path: &Path,
    source: &dyn Checkpoint,
    output: &Path,
    options: &PackOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PackReport, Failure> {
    let start = Instant::now();
    let from = unpacked(path, Bands::Large)?;
    let own = |of: &TensorInfo| DType::from_code(from.tensor(&of.id.to_string())?.dtype);
    let matrices = RowMatrix::all(source, options, own);
    let spec = spec(source, &matrices)?;
    let durable = Options {
        checkpoint_bytes: options.durable_bytes,
    };
    let mut writer = Writer::create_with(output, spec, durable)?;
    let mut work = Work {
        source,
        from: &from,
        workers: Workers::new(options.threads(), None),
        errors: RoundingErrors::default(),
        progress: Progress::new(matrices.iter().map(RowMatrix::bytes).sum(), progress),
    };
    let mut resumed_units = 0;
    for (number, matrix) in matrices.iter().enumerate() {
        if writer.is_done(Unit::Tensor(number)) {
            resumed_units += 1;
            work.progress.advance(matrix.bytes());
        } else {
            work.matrix(&mut writer, number, matrix)?;
        }
    }
    let (bytes, geometry) = (writer.layout().file_len, *from.geometry());
    writer.finish()?;
    let infos = source.tensors();
    let weights: usize = infos.iter().map(|t| t.rows * t.cols).sum();
    let bits = |bytes: u64| 8.0 * bytes as f64 / weights.max(1) as f64;
    Ok(PackReport {
        output: output.display().to_string(),
        bytes,
        neurons: 0,
        bundle_bytes: 0,
        padding_share: 0.0,
        sector: geometry.sector,
        sector_why: "rows are read with the stripes and sectors that hold them".into(),
        source_bits_per_weight: bits(infos.iter().map(|t| t.source_bytes).sum()),
        bits_per_weight: bits(matrices.iter().map(RowMatrix::bytes).sum()),
        order: Order::Original,
        resumed_units,
        calibrated: None,
        mixed: Some(formats(source, &matrices)),
        rounding: work.errors.report(),
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// The formats of all matrices.
fn formats(source: &dyn Checkpoint, matrices: &[RowMatrix]) -> MixedReport {
    let shares = |bundled: bool| {
        let mut shares = BTreeMap::<DType, [u64; 2]>::new();
        let chosen = |of: &&RowMatrix| match of.id.role.is_bundled() {
            true => bundled,
            false => !bundled && mix::is_chosen(of.id.role),
        };
        for matrix in matrices.iter().filter(chosen) {
            let [count, bytes] = shares.entry(matrix.dtype).or_default();
            *count += 1;
            *bytes += matrix.bytes();
        }
        let mut shares: Vec<Share> = (shares.into_iter())
            .map(|(format, [matrices, bytes])| Share {
                format: format.name().into(),
                matrices: matrices as usize,
                bytes,
            })
            .collect();
        shares.sort_by_key(|share| std::cmp::Reverse(share.bytes));
        shares
    };
    let ffn = shares(true).into_iter().map(|share| share.format);
    MixedReport {
        asked_bytes: None,
        source_is_float: is_float(source),
        ffn: ffn.collect::<Vec<_>>().join(", "),
        others: shares(false),
    }
}

/// A running pack.
struct Work<'a> {
    source: &'a dyn Checkpoint,
    /// The same by rows.
    from: &'a Container,
    workers: Workers,
    errors: RoundingErrors,
    progress: Progress<'a>,
}

impl Work<'_> {
    /// Writes one matrix.
    fn matrix(
        &mut self,
        writer: &mut Writer,
        number: usize,
        of: &RowMatrix,
    ) -> Result<(), Failure> {
        let name = of.id.to_string();
        let Some(entry) = self.from.tensor(&name) else {
            let path = self.from.path().display();
            return Err(Failure::Fault(format!("{path}: tensor {name} is missing")));
        };
        let row_bytes = of.dtype.row_bytes(of.cols);
        let at_once = (BATCH / (4 * of.cols).max(1)).clamp(1, of.rows);
        let (mut rows, mut table) = (Vec::new(), Vec::new());
        let mut sink = writer.begin_tensor(number)?;
        for first in (0..of.rows).step_by(at_once) {
            let count = at_once.min(of.rows - first);
            self.rows(of, entry, first, count, &mut rows)?;
            if of.is_table {
                table.clear();
                let each = rows.chunks_exact(row_bytes);
                each.for_each(|row| append_row(&mut table, row));
                sink.append(&table)?;
            } else {
                sink.append(&rows)?;
            }
            self.progress.advance(rows.len() as u64);
        }
        sink.finish()?;
        Ok(())
    }

    /// Rows of a matrix as they are stored.
    fn rows(
        &mut self,
        of: &RowMatrix,
        entry: &TensorEntry,
        first: usize,
        count: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let (cols, row_bytes) = (of.cols, of.dtype.row_bytes(of.cols));
        out.resize(count * row_bytes, 0);
        if of.is_copied {
            return Ok(self.from.read_tensor_rows(entry, first, out)?);
        }
        if of.dtype == DType::Q4k && of.id.role != Role::Down {
            let mut rows = (first..).zip(out.chunks_exact_mut(row_bytes));
            let read = |(row, out)| q4_k::read(self.source, of.id, row, cols, out);
            if rows.try_fold(true, |all, row| Ok::<_, Failure>(all && read(row)?))? {
                return Ok(());
            }
        }
        let own = DType::from_code(entry.dtype).unwrap_or(DType::F32);
        let own_bytes = own.row_bytes(cols);
        out.resize(count * own_bytes, 0);
        self.from.read_tensor_rows(entry, first, out)?;
        let cpu = Cpu::detect();
        let mut values = vec![0.0; count * cols];
        let numbers = values.chunks_exact_mut(cols);
        for (row, numbers) in out.chunks_exact(own_bytes).zip(numbers) {
            cpu.dequantize(Row::inline(own, cols, row), numbers);
        }
        encode_rows(&self.workers, of.dtype, cols, None, &values, out).map_err(|reason| {
            Failure::Fault(format!(
                "{}: tensor {} cannot be stored as {}: {reason}",
                self.from.path().display(),
                of.id,
                of.dtype.name()
            ))
        })?;
        let stored = out.chunks_exact(row_bytes);
        let step = rounding::step(of.rows);
        for (row, (values, stored)) in (first..).zip(values.chunks_exact(cols).zip(stored)) {
            if row.is_multiple_of(step) {
                let stored = Row::inline(of.dtype, cols, stored);
                self.errors.add(cpu, values, stored);
            }
        }
        Ok(())
    }
}
