//! `pack` without `--quant`: each matrix gets a format of at least as many bits as the source has.
//!
//! | source | container |
//! |---|---|
//! | Q4_0, Q4_K | q4k |
//! | MXFP4 neurons | mxfp4 where they can stay so |
//! | floats, in a source of floats alone | q4k; embedding and head q8 |
//! | all others | q8 |
//!
//! q4k wants rows of whole groups; others are q8. Neurons have one format, which is q8 if one of their
//! matrices needs it.

use emberflow_kernels::{DType, GROUP};
use emberflow_models::{Checkpoint, TensorInfo};

use super::mix;
use super::options::{BySource, PackOptions, is_float};

/// The options with all formats decided for `source`.
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
    let ffn_dtype = match ffn {
        true => ffn_format(source, options, neurons.map(|t| format_of(t, floats))),
        false => options.ffn,
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

/// The neurons' format, from those that their matrices would have.
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
        // q4k, or mxfp4 as it is
        _ => DType::Q4k,
    }
}

/// The format of one matrix, in a source whose matrices are all `floats` or not.
fn format_of(tensor: &TensorInfo, floats: bool) -> DType {
    let four_bits = match tensor.source_dtype.as_str() {
        "Q4_0" | "Q4_K" | "Q2_K" | "Q3_K" | "IQ4_NL" | "IQ4_XS" => true,
        "F32" | "F16" | "BF16" => floats,
        _ => false,
    };
    match four_bits && tensor.cols.is_multiple_of(GROUP) {
        true => DType::Q4k,
        false => DType::Q8,
    }
}
