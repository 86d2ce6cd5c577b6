//! The two thin factors whose product is closest to the gates on a text's inputs.
//!
//! For inputs with covariance `C` the best rank-`r` map to the gates `G x` is `U Uᵀ G`,
//! where `U` holds the leading eigenvectors of `G C Gᵀ` (reduced-rank regression). They
//! are found by subspace iteration, in `d × d` products.

use emberflow_kernels::{DType, quantize_row};

use super::gemm::{Gemm, transpose};

/// Most rounds of subspace iteration: the spectrum falls slowly, and what is mixed up near
/// the cut matters little.
const ROUNDS: usize = 6;
/// A round that adds less than this share to the energy of the gates kept is the last.
const GAIN: f64 = 1e-3;

/// The two factors, `fc1 [rank × d]` and `fc2 [neurons × rank]`.
pub(crate) fn factors(
    gemm: &mut Gemm<'_>,
    d: usize,
    gate: &[f32],
    covariance: &[f32],
    rank: usize,
) -> [Vec<f32>; 2] {
    let neurons = gate.len() / d;
    let mut gate_t = Vec::new();
    transpose(gate, d, &mut gate_t);
    // `basis [rank × neurons]`, rows orthonormal
    let mut basis = start(rank, neurons);
    gemm.orthonormalise(&mut basis, neurons);
    let mut narrow = vec![0.0; rank * d];
    let mut spread = vec![0.0; rank * d];
    let mut kept = 0.0;
    for _ in 0..ROUNDS {
        gemm.product(neurons, &basis, &gate_t, &mut narrow);
        gemm.product(d, &narrow, covariance, &mut spread);
        // trace of U Uᵀ G C Gᵀ
        let energy: f64 = narrow
            .iter()
            .zip(&spread)
            .map(|(a, b)| f64::from(a * b))
            .sum();
        if energy < kept * (1.0 + GAIN) {
            break;
        }
        kept = energy;
        gemm.product(d, &spread, gate, &mut basis);
        gemm.orthonormalise(&mut basis, neurons);
    }
    gemm.product(neurons, &basis, &gate_t, &mut narrow);
    let mut fc2 = Vec::new();
    transpose(&basis, neurons, &mut fc2);
    [narrow, fc2]
}

/// A start that no eigenvector is likely to be orthogonal to, the same every time.
fn start(rank: usize, neurons: usize) -> Vec<f32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..rank * neurons).map(|_| next()).collect()
}

/// Rows of `cols` elements as stored; `None` where one is not finite.
pub(crate) fn store(dtype: DType, cols: usize, rows: &[f32]) -> Option<Vec<u8>> {
    let stride = dtype.row_bytes(cols);
    let mut out = vec![0; rows.len() / cols * stride];
    for (row, out) in rows.chunks_exact(cols).zip(out.chunks_exact_mut(stride)) {
        let (quants, scales) = out.split_at_mut(dtype.quants_bytes(cols));
        quantize_row(dtype, row, quants, scales).ok()?;
    }
    Some(out)
}
