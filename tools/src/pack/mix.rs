//! `--quant auto:SIZE`: minimizes the total rounding error within a container size.
//!
//! The error of a matrix in a format is Σ(w − ŵ)² / Σw², measured on rows spread over it. Embedding and head count
//! more (`weight_of`; measured in `benches/NOTEBOOK.md`): the embedding's error reaches every layer, the head's every
//! token. All neurons share one format, every other matrix has its own. For each format of the neurons, dynamic
//! programming finds the formats of the others with the smallest sum of errors, up to steps of 1/4096 of the bytes to
//! be distributed.

use std::collections::BTreeMap;
use std::path::Path;

use emberflow_kernels::{Cpu, DType, Row, quantize_row};
use emberflow_models::names::{Role, TensorId};
use emberflow_models::{Checkpoint, TensorInfo};
use emberflow_storage::container::Layout;

use super::layout::PackLayout;
use super::options::{PackOptions, is_float};
use super::write::{MixedReport, Share};
use crate::{Failure, q4_k, size};

/// Possible formats, smallest first.
const FORMATS: [DType; 5] = [DType::Q4, DType::Q4k, DType::Q8, DType::F16, DType::F32];

/// All formats that matrices may have, smallest first: of a given format too, of which no size is made.
const GIVEN: [DType; 7] = [
    DType::Q4c,
    DType::Q4,
    DType::Q4k,
    DType::Q8c,
    DType::Q8,
    DType::F16,
    DType::F32,
];

/// Rows of a matrix that are sampled to measure its error.
const ROWS: usize = 256;

/// Number of steps into which the available bytes are divided.
const STEPS: usize = 4096;

/// Bytes reserved for page alignment: each of two sections may begin one page later.
const PAGES: u64 = 2 * 4096;

/// A non-FFN matrix, or all neurons together.
struct MixItem {
    /// Bytes and error in each of [`FORMATS`].
    stored: [Stored; FORMATS.len()],
}

/// Size and error of a matrix in one format.
#[derive(Clone, Copy, Default)]
struct Stored {
    bytes: u64,
    error: f64,
}

/// The options with the formats of the smallest error such that `output` has at most `size` bytes. It is more than 2
/// % smaller only if larger formats would not reduce the error.
///
/// # Errors
/// A usage error with the smallest possible size, if `size` is below it.
pub(super) fn mixed(
    source: &dyn Checkpoint,
    output: &Path,
    options: &PackOptions,
    size: u64,
) -> Result<PackOptions, Failure> {
    let is_neuron = |t: &&TensorInfo| t.id.role.is_bundled();
    let tensors = source.tensors();
    let neurons: Vec<&TensorInfo> = tensors.iter().filter(is_neuron).collect();
    let others: Vec<&TensorInfo> = tensors.iter().filter(|t| is_chosen(t.id.role)).collect();
    let mut of_others = Vec::with_capacity(others.len());
    for tensor in &others {
        let weight = weight_of(source, tensor.id.role);
        of_others.push(MixItem::measure(source, tensor)?.times(weight));
    }
    let mut of_neurons = [0.0; FORMATS.len()];
    for tensor in &neurons {
        let item = MixItem::measure(source, tensor)?;
        for (sum, stored) in of_neurons.iter_mut().zip(item.stored) {
            *sum += stored.error;
        }
    }
    let (mut best, mut least_error): (Option<PackOptions>, f64) = (None, f64::INFINITY);
    let mut smallest = u64::MAX;
    for (ffn, error) in FORMATS.into_iter().zip(of_neurons) {
        let fixed = |dtype| with(source, options, ffn, &others, &vec![dtype; others.len()]);
        let least = bytes_of(source, output, &fixed(DType::Q4))?;
        smallest = smallest.min(least);
        if least > size {
            continue;
        }
        // Usually no bytes need to be reserved for alignment.
        let fits = |formats: &[DType]| {
            let options = with(source, options, ffn, &others, formats);
            bytes_of(source, output, &options).map(|bytes| bytes <= size)
        };
        let mut formats = share_out(&of_others, size - least);
        if !fits(&formats)? {
            formats = share_out(&of_others, (size - least).saturating_sub(PAGES));
        }
        let stored = of_others.iter().zip(&formats);
        let error = error + stored.map(|(item, &f)| item.of(f).error).sum::<f64>();
        // For equal errors take the smaller format, which comes first.
        if best.is_none() || error < least_error {
            least_error = error;
            best = Some(with(source, options, ffn, &others, &formats));
        }
    }
    best.ok_or_else(|| {
        let [asked, least] = [size, smallest].map(size::show);
        Failure::usage(format!(
            "--quant auto:{asked} is too small: the smallest container of this model has {least} \
             ({smallest} bytes)"
        ))
    })
}

/// Report of the chosen formats.
pub(super) fn report(
    source: &dyn Checkpoint,
    options: &PackOptions,
    asked_bytes: Option<u64>,
) -> MixedReport {
    let others = source.tensors().iter().filter(|t| is_chosen(t.id.role));
    let mut shares = GIVEN.map(|format| Share {
        format: format.name().into(),
        matrices: 0,
        bytes: 0,
    });
    for tensor in others {
        let dtype = options.dtype_of(tensor.id);
        if let Some(share) = shares.iter_mut().find(|s| s.format == dtype.name()) {
            share.matrices += 1;
            share.bytes += (tensor.rows * dtype.row_bytes(tensor.cols)) as u64;
        }
    }
    MixedReport {
        asked_bytes,
        source_is_float: is_float(source),
        ffn: options.ffn.name().into(),
        others: shares.into_iter().filter(|s| s.matrices > 0).collect(),
    }
}

/// Whether the format for this role is chosen individually: attention, embedding and head.
pub(super) fn is_chosen(role: Role) -> bool {
    let of = |dtype| PackOptions::new(dtype).dtype(role);
    !role.is_bundled() && of(DType::Q8) != of(DType::F32)
}

/// Whether tensors of this role are stored in the embedding's format.
pub(super) fn is_embedding(role: Role) -> bool {
    let options = PackOptions {
        attention: DType::F32,
        ..PackOptions::new(DType::F32)
    };
    let other = PackOptions {
        embedding: DType::Q8,
        ..options
    };
    other.dtype(role) == DType::Q8
}

/// Options with these formats: of the neurons, and of the other matrices in their order.
pub(super) fn with(
    source: &dyn Checkpoint,
    options: &PackOptions,
    ffn: DType,
    others: &[&TensorInfo],
    formats: &[DType],
) -> PackOptions {
    // A role's default format is the one that most of its bytes have.
    let most_of = |embedding: bool| {
        let mut bytes = [0; GIVEN.len()];
        for (tensor, &format) in others.iter().zip(formats) {
            if is_embedding(tensor.id.role) == embedding {
                bytes[place(&GIVEN, format)] += tensor.rows * format.row_bytes(tensor.cols);
            }
        }
        let most = (0..GIVEN.len()).max_by_key(|&i| (bytes[i], GIVEN.len() - i));
        most.map_or(ffn, |i| GIVEN[i])
    };
    let ids = others.iter().map(|t| t.id);
    let chosen = PackOptions {
        ffn,
        attention: most_of(false),
        embedding: most_of(true),
        mix: ids.zip(formats.iter().copied()).collect(),
        ..options.clone()
    };
    let chosen = chosen.keeping_mxfp4(source);
    let mut mix: BTreeMap<TensorId, DType> = chosen.mix.clone();
    mix.retain(|id, dtype| chosen.dtype(id.role) != *dtype);
    PackOptions { mix, ..chosen }
}

/// Size of the container in bytes.
fn bytes_of(source: &dyn Checkpoint, output: &Path, options: &PackOptions) -> Result<u64, Failure> {
    let layout = PackLayout::new(source, output, options, None)?;
    let computed = Layout::compute(&layout.spec);
    let refused = |source| emberflow_storage::Error::Layout {
        path: output.to_path_buf(),
        source,
    };
    Ok(computed.map_err(refused)?.file_len)
}

/// Weight of a role's error in the sum.
fn weight_of(source: &dyn Checkpoint, role: Role) -> f64 {
    let c = source.config();
    let both = if c.tied_head && role == Role::Embed {
        2.0
    } else {
        1.0
    };
    if is_embedding(role) {
        2.0 * f64::from(c.layers) * both
    } else {
        1.0
    }
}

fn place(formats: &[DType], format: DType) -> usize {
    formats
        .iter()
        .position(|&f| f == format)
        .unwrap_or_default()
}

impl MixItem {
    fn of(&self, format: DType) -> Stored {
        self.stored[place(&FORMATS, format)]
    }

    fn times(mut self, weight: f64) -> Self {
        self.stored.iter_mut().for_each(|s| s.error *= weight);
        self
    }

    /// Rounds evenly spread rows of a tensor to each format.
    fn measure(source: &dyn Checkpoint, tensor: &TensorInfo) -> Result<Self, Failure> {
        let cpu = Cpu::detect();
        let step = tensor.rows.div_ceil(ROWS);
        let (mut row, mut rounded) = (vec![0.0; tensor.cols], vec![0.0; tensor.cols]);
        let (mut squares, mut errors) = (0.0, [0.0; FORMATS.len()]);
        for number in (0..tensor.rows).step_by(step.max(1)) {
            source.read_rows(tensor.id, number, 1, &mut row)?;
            squares += row
                .iter()
                .map(|&w| f64::from(w) * f64::from(w))
                .sum::<f64>();
            for (error, dtype) in errors.iter_mut().zip(FORMATS) {
                let mut bytes = vec![0; dtype.row_bytes(tensor.cols)];
                if dtype == DType::Q4k
                    && q4_k::read(source, tensor.id, number, tensor.cols, &mut bytes)?
                {
                    continue;
                }
                let (quants, scales) = bytes.split_at_mut(dtype.quants_bytes(tensor.cols));
                if quantize_row(dtype, &row, quants, scales).is_err() {
                    // The format cannot represent it.
                    *error = f64::INFINITY;
                    continue;
                }
                cpu.dequantize(Row::inline(dtype, tensor.cols, &bytes), &mut rounded);
                let differences = row.iter().zip(&rounded);
                *error += differences
                    .map(|(&w, &r)| (f64::from(w) - f64::from(r)).powi(2))
                    .sum::<f64>();
            }
        }
        let mut stored = [Stored::default(); FORMATS.len()];
        for ((stored, dtype), error) in stored.iter_mut().zip(FORMATS).zip(errors) {
            *stored = Stored {
                bytes: ((tensor.rows * dtype.row_bytes(tensor.cols)) as u64).next_multiple_of(64),
                error: error / squares.max(f64::MIN_POSITIVE),
            };
        }
        Ok(Self { stored })
    }
}

/// Formats with the smallest sum of errors, within `bytes` more than the smallest formats take.
fn share_out(items: &[MixItem], bytes: u64) -> Vec<DType> {
    let step = (bytes / STEPS as u64).max(1);
    let steps = (bytes / step) as usize;
    // Smallest error by number of steps spent, and the chosen format by item.
    let mut least = vec![0.0; steps + 1];
    let mut taken: Vec<Vec<u8>> = Vec::with_capacity(items.len());
    for item in items {
        let mut next = vec![f64::INFINITY; steps + 1];
        let mut format = vec![0; steps + 1];
        for (i, stored) in item.stored.iter().enumerate() {
            let more = stored.bytes.saturating_sub(item.stored[0].bytes);
            let cost = more.div_ceil(step) as usize;
            for spent in cost..=steps {
                let error = least[spent - cost] + stored.error;
                if error < next[spent] {
                    (next[spent], format[spent]) = (error, i as u8);
                }
            }
        }
        least = next;
        taken.push(format);
    }
    let mut left = steps;
    let mut formats: Vec<DType> = Vec::with_capacity(items.len());
    for (item, format) in items.iter().zip(&taken).rev() {
        let i = usize::from(format[left]);
        let more = item.stored[i].bytes.saturating_sub(item.stored[0].bytes);
        left -= (more.div_ceil(step) as usize).min(left);
        formats.push(FORMATS[i]);
    }
    formats.reverse();
    formats
}
