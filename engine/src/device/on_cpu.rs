//! What the CPU as a device does for all kinds of work.

use std::ops::Range;

use emberflow_kernels::{Activations, ActivationsRef, Cpu, Row};

use super::products::SharedMatrix;

/// Activations of their own.
pub(super) fn copied(of: ActivationsRef<'_>) -> Activations {
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
