//! `emberflow verify`: checks every byte of a container.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};

use emberflow_engine::unpacked;
use emberflow_kernels::{Cpu, DType, Row, error_bound};
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Required, TensorId};
use emberflow_models::{Bands, Checkpoint, TensorInfo};
use emberflow_storage::container::Container;
use serde::Serialize;

use crate::activity::original_ids;
use crate::cli::VerifyArgs;
use crate::model::open_container;
use crate::pack::calibrate;
use crate::packed::Packed;
use crate::{Failure, print_json, progress, size};

/// Output of `verify --json`. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct VerifyResult {
    /// The container.
    pub file: String,
    /// Whether no problem was found.
    pub ok: bool,
    /// Bytes read.
    pub bytes: u64,
    /// Whether the file has checksums to compare with; a checkpoint has none.
    pub checksums: bool,
    /// Problems, each with its place.
    pub problems: Vec<String>,
    /// Comparison with the checkpoint, if one was given.
    pub source: Option<SourceResult>,
}

/// Comparison of every weight with the checkpoint.
#[derive(Debug, Clone, Serialize)]
pub struct SourceResult {
    /// Weights compared.
    pub weights: u64,
    /// Largest error as a share of the error bound of its block format.
    pub worst_share_of_bound: f64,
    /// Tensor with the largest error.
    pub worst_tensor: String,
    /// Matrices rounded by calibration, for which the bound of the format does not hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibrated: Option<CalibratedResult>,
}

/// Comparison of the matrices rounded by `pack --calibrate`.
#[derive(Debug, Clone, Serialize)]
pub struct CalibratedResult {
    /// Their weights.
    pub weights: u64,
    /// Largest relative error of a matrix: ‖w − source‖ / ‖source‖.
    pub worst_relative_error: f64,
    /// Matrix with the largest error.
    pub worst_tensor: String,
}

/// Maximum relative error of a calibrated matrix. Rounding to 4 bits gives 0.1 or less, compensation up to three
/// times that, and an unrelated matrix more than 1.
const CALIBRATED_ERROR: f64 = 0.5;

/// Runs the command.
pub fn command(args: &VerifyArgs) -> Result<(), Failure> {
    let mut result = VerifyResult {
        file: match args.model.file() {
            Some(path) => path.display().to_string(),
            None => "bundled model".into(),
        },
        ok: false,
        bytes: 0,
        checksums: true,
        problems: Vec::new(),
        source: None,
    };
    let outcome = check(args, &mut result).map_err(as_fault);
    result.ok = outcome.is_ok();
    if args.json {
        if let Err(failure) = &outcome
            && result.problems.is_empty()
        {
            result.problems.push(failure.to_string());
        }
        print_json(&result)?;
    } else {
        tell(&result)?;
    }
    outcome
}

/// Runs all checks.
fn check(args: &VerifyArgs, result: &mut VerifyResult) -> Result<(), Failure> {
    let container = open_container(&args.model)?;
    result.file = container.path().display().to_string();
    if container.is_outside() {
        return read_all(args, &container, result);
    }
    let bar = progress::bytes("verifying", 0);
    let report = container.verify(&mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let report = report?;
    result.bytes = report.bytes;
    result.problems = report
        .problems
        .iter()
        .map(|p| format!("offset {}: {}", p.offset, p.what))
        .collect();
    if !report.is_clean() {
        return Err(Failure::Fault(format!(
            "{} is damaged: copy it again or pack the checkpoint again",
            result.file
        )));
    }
    let packed = Packed::new(&container)?;
    if let Some(checkpoint) = &args.source {
        let source = emberflow_models::open(checkpoint)?;
        let bar = progress::steps("comparing weights", 0);
        let mut tell = |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        };
        let outcome = match packed.is_by_rows() {
            true => compare_rows(&container, &packed, source.as_ref(), &mut tell),
            false => compare(&container, &packed, source.as_ref(), &mut tell),
        };
        bar.finish_and_clear();
        result.source = Some(outcome?);
    }
    Ok(())
}

/// Reads every tensor of a checkpoint, which has no checksums: a file that is cut or cannot be read is found.
fn read_all(
    args: &VerifyArgs,
    container: &Container,
    result: &mut VerifyResult,
) -> Result<(), Failure> {
    if args.source.is_some() {
        return Err(Failure::usage(
            "--source compares a packed model with its checkpoint; this model is a checkpoint itself",
        ));
    }
    let total = container.tensors().iter().map(|t| t.len).sum();
    let bar = progress::bytes("reading", total);
    let mut bytes = Vec::new();
    for tensor in container.tensors() {
        bytes.resize(usize::try_from(tensor.len).unwrap_or(usize::MAX), 0);
        container.read_tensor(tensor, &mut bytes)?;
        result.bytes += tensor.len;
        bar.set_position(result.bytes);
    }
    bar.finish_and_clear();
    result.checksums = false;
    Ok(())
}

/// Turns errors about the container itself into a failed check; I/O errors stay errors.
fn as_fault(failure: Failure) -> Failure {
    use emberflow_storage::Error as Storage;
    match failure {
        Failure::Storage(Storage::File { .. } | Storage::Read { .. }) => failure,
        Failure::Storage(_) | Failure::Engine(_) | Failure::Stats { .. } => {
            Failure::Fault(failure.to_string())
        }
        // No model at all.
        Failure::File { ref source, .. } if source.kind() == ErrorKind::InvalidData => {
            Failure::Fault(failure.to_string())
        }
        failure => failure,
    }
}

fn tell(result: &VerifyResult) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    for problem in &result.problems {
        writeln!(out, "{problem}")?;
    }
    if result.ok {
        writeln!(
            out,
            "{}: {} read, {}",
            result.file,
            size::show(result.bytes),
            match result.checksums {
                true => "all checksums match",
                false => "which has no checksums",
            }
        )?;
    }
    if let Some(c) = result.source.as_ref().and_then(|s| s.calibrated.as_ref()) {
        writeln!(
            out,
            "{} weights rounded by calibration; largest relative error: {:.1} %, in {}",
            c.weights,
            100.0 * c.worst_relative_error,
            c.worst_tensor
        )?;
    }
    if let Some(s) = &result.source {
        match s.worst_tensor.as_str() {
            "" => writeln!(out, "{} weights equal the source's", s.weights)?,
            tensor => writeln!(
                out,
                "{} weights within the error bound of their format; largest: {:.1} % of the bound, in {tensor}",
                s.weights,
                100.0 * s.worst_share_of_bound
            )?,
        }
    }
    Ok(())
}

/// Compares every weight of the container with the checkpoint `source`. `tell` receives weights compared and total
/// weights.
///
/// # Errors
/// A failed check that names tensor, row and values if a weight differs by more than its block format allows, or if
/// configuration or tensors differ.
pub fn compare(
    container: &Container,
    packed: &Packed<'_>,
    source: &dyn Checkpoint,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<SourceResult, Failure> {
    same_model(container, packed, source)?;
    let orders = Orders::of(container, packed.config())?;
    let mut check = Comparison::new(source, packed.meta.calibration.is_some(), tell);
    for info in dense_tensors(source) {
        let want = Required {
            id: info.id,
            rows: info.rows,
            cols: info.cols,
        };
        packed.rows(want, &mut |r, stored, row| {
            let original = if info.id.role.is_by_neuron() {
                orders.original(packed.config().ffn_place(info.id.layer), r)
            } else {
                r
            };
            check.row(info.id, original, stored.dtype(), row)
        })?;
    }
    let dtype = packed.ffn_dtype()?;
    for (b, bank) in container.banks().iter().enumerate() {
        packed.neurons(b, &mut |n, neuron| {
            let original = orders.original(b, n);
            for (role, row) in neuron.vectors() {
                let id = TensorId {
                    role,
                    layer: bank.layer,
                    expert: bank.expert,
                };
                check.row(id, original, dtype, row)?;
            }
            Ok(())
        })?;
    }
    check.finish()
}

/// [`compare`] for a container whose matrices lie by rows: a row in the checkpoint's own format must have the same bytes.
fn compare_rows(
    container: &Container,
    packed: &Packed<'_>,
    source: &dyn Checkpoint,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<SourceResult, Failure> {
    same_model(container, packed, source)?;
    let from = unpacked(source.path(), Bands::Large)?;
    let mut check = Comparison::new(source, false, tell);
    let (cpu, mut batch, mut want) = (Cpu::detect(), Vec::new(), Vec::new());
    for entry in from.tensors() {
        let (Ok(id), &[rows, cols]) = (entry.name.parse::<TensorId>(), entry.dims()) else {
            continue;
        };
        let (rows, cols) = (rows as usize, cols as usize);
        let own = DType::from_code(entry.dtype).unwrap_or(DType::F32);
        let row_bytes = own.row_bytes(cols);
        let at_once = (SOURCE_BATCH / row_bytes.max(1)).clamp(1, rows);
        want.resize(cols, 0.0);
        packed.rows(Required { id, rows, cols }, &mut |r, stored, row| {
            let place = r % at_once;
            if place == 0 {
                batch.resize(at_once.min(rows - r) * row_bytes, 0);
                from.read_tensor_rows(entry, r, &mut batch)?;
            }
            let bytes = &batch[place * row_bytes..][..row_bytes];
            if stored.dtype() == own {
                if [stored.quants(), stored.scales()].concat() != bytes {
                    return Err(Failure::Fault(format!(
                        "tensor {id} row {r}: other bytes than in {}",
                        source.path().display()
                    )));
                }
                check.count(cols);
                return Ok(());
            }
            cpu.dequantize(Row::inline(own, cols, bytes), &mut want);
            check.values(id, r, stored.dtype(), &want, row)
        })?;
    }
    check.finish()
}

/// Bytes of a checkpoint that are read at once.
const SOURCE_BATCH: usize = 64 << 20;

/// Non-FFN tensors of a checkpoint.
fn dense_tensors(source: &dyn Checkpoint) -> impl Iterator<Item = &TensorInfo> {
    (source.tensors().iter()).filter(|t| !t.id.role.is_bundled())
}

/// Fails if `source` has another fingerprint, configuration or number of tensors.
fn same_model(
    container: &Container,
    packed: &Packed<'_>,
    source: &dyn Checkpoint,
) -> Result<(), Failure> {
    let fingerprint = format!("{:016x}", source.fingerprint());
    let path = container.path().display();
    if fingerprint != packed.meta.source.fingerprint {
        return Err(Failure::Fault(format!(
            "{path} was packed from {:?} with fingerprint {}, but {} has fingerprint {fingerprint}",
            packed.meta.source.name,
            packed.meta.source.fingerprint,
            source.path().display()
        )));
    }
    // The name comes from the folder, which may have been renamed.
    let name = packed.config().name.clone();
    let config = ModelConfig {
        name,
        ..source.config().clone()
    };
    if config != *packed.config() {
        return Err(Failure::Fault(format!(
            "the configuration of {path} differs from that of {}",
            source.path().display()
        )));
    }
    let expected = match packed.is_by_rows() {
        true => source.tensors().len(),
        false => dense_tensors(source).count(),
    };
    let found = container.tensors().len();
    if found != expected {
        return Err(Failure::Fault(format!(
            "{path} has {found} tensors that are not in bundles, {} has {expected}",
            source.path().display()
        )));
    }
    Ok(())
}

/// Number of weights of a tensor.
fn weights_of(source: &dyn Checkpoint, id: TensorId) -> u64 {
    let found = source.tensors().iter().find(|t| t.id == id);
    found.map_or(0, |t| (t.rows * t.cols) as u64)
}

/// Packed → original neuron number per bank; empty for the original order.
struct Orders(Vec<Vec<u32>>);

impl Orders {
    /// Reads the order from the container's statistics.
    fn of(container: &Container, c: &ModelConfig) -> Result<Self, Failure> {
        Ok(Self(original_ids(container, c)?))
    }

    fn original(&self, bank: usize, packed: usize) -> usize {
        match self.0.get(bank).and_then(|o| o.get(packed)) {
            Some(&id) => id as usize,
            None => packed,
        }
    }
}

struct Comparison<'a> {
    source: &'a dyn Checkpoint,
    tell: &'a mut dyn FnMut(u64, u64),
    /// Weights of the source.
    total: u64,
    buffer: Vec<f32>,
    result: SourceResult,
    /// Squared error and squared norm of each calibrated matrix; `None` if the container is not calibrated.
    calibrated: Option<BTreeMap<TensorId, [f64; 2]>>,
}

impl<'a> Comparison<'a> {
    fn new(
        source: &'a dyn Checkpoint,
        calibrated: bool,
        tell: &'a mut dyn FnMut(u64, u64),
    ) -> Self {
        let sizes = source.tensors().iter().map(|t| (t.rows * t.cols) as u64);
        Self {
            source,
            tell,
            total: sizes.sum(),
            buffer: Vec::new(),
            result: SourceResult {
                weights: 0,
                worst_share_of_bound: 0.0,
                worst_tensor: String::new(),
                calibrated: None,
            },
            calibrated: calibrated.then(BTreeMap::new),
        }
    }

    fn row(
        &mut self,
        id: TensorId,
        row: usize,
        dtype: DType,
        found: &[f32],
    ) -> Result<(), Failure> {
        let mut want = std::mem::take(&mut self.buffer);
        want.resize(found.len(), 0.0);
        self.source.read_rows(id, row, 1, &mut want)?;
        let outcome = self.values(id, row, dtype, &want, found);
        self.buffer = want;
        outcome
    }

    /// Compares a row with the values that it should have.
    fn values(
        &mut self,
        id: TensorId,
        row: usize,
        dtype: DType,
        expected: &[f32],
        found: &[f32],
    ) -> Result<(), Failure> {
        if let Some(calibrated) = &mut self.calibrated
            && calibrate::is_calibrated(self.source.config(), id.role, dtype)
        {
            let sums = calibrated.entry(id).or_default();
            for (w, h) in expected.iter().zip(found) {
                let (w, h) = (f64::from(*w), f64::from(*h));
                sums[0] += (w - h) * (w - h);
                sums[1] += w * w;
            }
            self.count(found.len());
            return Ok(());
        }
        // For float formats, the bound over 32 elements is tight enough.
        let span = dtype.span().max(32);
        for (group, (want, have)) in expected.chunks(span).zip(found.chunks(span)).enumerate() {
            let max = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            let bound = error_bound(dtype, max);
            for (i, (w, h)) in want.iter().zip(have).enumerate() {
                let error = (w - h).abs();
                if error > bound || error.is_nan() {
                    return Err(Failure::Fault(format!(
                        "tensor {id} row {row} column {}: {h} in the container, {w} in {}; \
                         {} allows an error of {bound}",
                        group * span + i,
                        self.source.path().display(),
                        dtype.name()
                    )));
                }
                if bound > 0.0 && f64::from(error / bound) > self.result.worst_share_of_bound {
                    self.result.worst_share_of_bound = f64::from(error / bound);
                    self.result.worst_tensor = id.to_string();
                }
            }
        }
        self.count(found.len());
        Ok(())
    }

    fn count(&mut self, weights: usize) {
        self.result.weights += weights as u64;
        (self.tell)(self.result.weights, self.total);
    }

    /// The result, after all rows.
    fn finish(self) -> Result<SourceResult, Failure> {
        let mut result = self.result;
        let Some(calibrated) = self.calibrated else {
            return Ok(result);
        };
        let mut all = CalibratedResult {
            weights: 0,
            worst_relative_error: 0.0,
            worst_tensor: String::new(),
        };
        for (id, [error, norm]) in calibrated {
            let share = if error == 0.0 {
                0.0
            } else {
                (error / norm).sqrt()
            };
            if share.is_nan() || share > CALIBRATED_ERROR {
                return Err(Failure::Fault(format!(
                    "tensor {id} has a relative error of {:.0} % against {}, too much for \
                     calibrated rounding",
                    100.0 * share,
                    self.source.path().display()
                )));
            }
            if share >= all.worst_relative_error {
                (all.worst_relative_error, all.worst_tensor) = (share, id.to_string());
            }
            all.weights += weights_of(self.source, id);
        }
        result.calibrated = Some(all);
        Ok(result)
    }
}
