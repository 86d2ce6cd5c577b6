//! `pack --quant auto`, the default: each matrix gets a format with at least as many bits as its source.
//!
//! | source | container |
//! |---|---|
//! | Q4_0, symmetric INT4 in groups of a multiple of 32 | q4, an exact copy (of INT4: if f16 holds the scales) |
//! | Q4_K, Q2_K, Q3_K, all IQ and TQ formats, Q1_0, Q2_0 | q4k |
//! | integers of safetensors with zero points or biases, scales counted: up to 4.5 bits | q4k |
//! | MXFP4 neurons | mxfp4 if they can be copied unchanged |
//! | floats, if the whole source is floats | q4k; embedding and head q8 |
//! | all others | q8 |
//!
//! q4 and q4k need rows of whole groups; other rows become q8. All neurons have one format: q8 if one of their
//! matrices needs it, else q4k if one does. Columns of Down are rounded in any format but a float, as blocks of
//! the source run along its rows.

use emberflow_kernels::{DType, GROUP};
use emberflow_models::{Checkpoint, TensorInfo};

use super::mix;
use super::options::{BySource, PackOptions, is_float};

/// `options` with all formats decided for `source`.
pub(super) fn decided(source: &dyn Checkpoint, options: &PackOptions) -> PackOptions {
    let BySource {
        ffn,
        attention,
        embedding,
    } = options.by_source;
    if options.by_source == BySource::default() {
        return options.keeping_mxfp4(source);
    }
    let tensors = source.tensors();
    let floats = is_float(source);
    let neurons = tensors.iter().filter(|t| t.id.role.is_bundled());
    let ffn_dtype = if ffn {
        ffn_format(source, options, neurons.map(|t| format_of(t, floats)))
    } else {
        options.ffn
    };
    let others: Vec<&TensorInfo> = (tensors.iter())
        .filter(|t| mix::is_chosen(t.id.role))
        .collect();
    let formats: Vec<DType> = (others.iter())
        .map(|t| match mix::is_embedding(t.id.role) {
            true if !embedding => options.embedding,
            true if floats => DType::Q8,
            false if !attention => options.attention,
            _ => format_of(t, floats),
        })
        .collect();
    let undecided = PackOptions {
        by_source: BySource::default(),
        ..options.clone()
    };
    mix::with(source, &undecided, ffn_dtype, &others, &formats)
}

/// The neurons' format, derived from the formats of their matrices.
fn ffn_format(
    source: &dyn Checkpoint,
    options: &PackOptions,
    formats: impl Iterator<Item = DType>,
) -> DType {
    let four_bits = PackOptions {
        ffn: DType::Q4k,
        ..options.clone()
    };
    if four_bits.keeping_mxfp4(source).ffn == DType::Mxfp4 {
        return DType::Q4k; // copied unchanged whichever format of 4 bits it is
    }
    let formats: Vec<DType> = formats.collect();
    if formats.contains(&DType::Q8) {
        DType::Q8
    } else if formats.contains(&DType::Q4k) {
        DType::Q4k
    } else {
        DType::Q4
    }
}

/// The format of one matrix. `floats`: whether all matrices of the source are floats.
pub(super) fn format_of(tensor: &TensorInfo, floats: bool) -> DType {
    let format = match tensor.source_dtype.as_str() {
        "Q4_0" => DType::Q4,
        "INT4" if bits_of(tensor) <= 4.5 => DType::Q4,
        "Q4_K" | "Q2_K" | "Q3_K" | "Q1_0" | "Q2_0" => DType::Q4k,
        name if name.starts_with("IQ") || name.starts_with("TQ") => DType::Q4k,
        "AFFINE2" | "AFFINE3" | "AFFINE4" if bits_of(tensor) <= 4.5 => DType::Q4k,
        "F32" | "F16" | "BF16" if floats => DType::Q4k,
        _ => DType::Q8,
    };
    if tensor.cols.is_multiple_of(GROUP) {
        format
    } else {
        DType::Q8
    }
}

/// Bits of a weight in the source, with its scales.
fn bits_of(tensor: &TensorInfo) -> f64 {
    8.0 * tensor.source_bytes as f64 / (tensor.rows * tensor.cols).max(1) as f64
}
