//! `pack --quant auto`, the default: each matrix gets a format with at least as many bits as its source.
//!
//! | source | container |
//! |---|---|
//! | Q4_0, Q4_K, Q2_K, Q3_K, IQ4_NL, IQ4_XS | q4k |
//! | MXFP4 neurons | mxfp4 if they can be copied unchanged |
//! | floats, if the whole source is floats | q4k; embedding and head q8 |
//! | all others | q8 |
//!
//! q4k needs rows of whole groups; other rows become q8. All neurons have one format: q8 if one of their matrices
//! needs it.

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
    mut formats: impl Iterator<Item = DType>,
) -> DType {
    let four_bits = PackOptions {
        ffn: DType::Q4k,
        ..options.clone()
    };
    match four_bits.keeping_mxfp4(source).ffn {
        DType::Q4k if formats.any(|format| format == DType::Q8) => DType::Q8,
        // Either q4k or mxfp4 copied unchanged.
        _ => DType::Q4k,
    }
}

/// The format of one matrix. `floats`: whether all matrices of the source are floats.
fn format_of(tensor: &TensorInfo, floats: bool) -> DType {
    let four_bits = match tensor.source_dtype.as_str() {
        "Q4_0" | "Q4_K" | "Q2_K" | "Q3_K" | "IQ4_NL" | "IQ4_XS" => true,
        "F32" | "F16" | "BF16" => floats,
        _ => false,
    };
    if four_bits && tensor.cols.is_multiple_of(GROUP) {
        DType::Q4k
    } else {
        DType::Q8
    }
}
