//! Trains the two factors whose product best approximates the gates on a text's inputs.
//!
//! For inputs with covariance `C`, the best rank-`r` map to the gates `G x` is `U Uᵀ G`, where `U`
//! holds the leading eigenvectors of `G C Gᵀ` (reduced-rank regression). Subspace iteration finds
//! them in `d × d` products.
//!
//! The second factor is then refitted to the output of the stored first factor, which corrects most
//! of its rounding error, and rounded against the covariance of that output (`rounding/`).

use emberflow_kernels::{Compute, DType, GROUP, Row, quantize_row, store_q4_row};
use half::f16;

use crate::rounding::{Gemm, Levels, Rows, inverse_factor, round, transpose};

/// Most rounds of subspace iteration: the spectrum decays slowly, and mixing near the cutoff
/// matters little.
const ROUNDS: usize = 6;
/// Stop after a round that increases the captured energy by less than this share.
const GAIN: f64 = 1e-3;

/// Ridge added to the variances of the hidden layer for the fit, relative to their mean.
const RIDGE: f64 = 1e-4;

/// Shrinkage added to every input variance, relative to the mean variance. Gates of 4096 elements
/// trained on 3,000 tokens select 1.26 neurons per firing one with it, 1.36 without. A third or
/// three times of it changes results by 1 % (the bundled model, and synthetic gates of 2048
/// elements).
const SHRINKAGE: f32 = 0.03;

/// Candidates for the scale of a q4 group, in fractions of the scale that reaches its largest
/// element.
const SCALES: std::ops::RangeInclusive<u32> = 13..=21;

/// The two factors as stored, `fc1 [rank × d]` and `fc2 [neurons × rank]`; `None` if an element is
/// not finite.
pub(crate) fn make(
    on: &Compute,
    gate: Rows<'_>,
    covariance: &[f32],
    rank: usize,
    dtype: DType,
) -> Option<[Vec<u8>; 2]> {
    let Rows { d, values: gate } = gate;
    let covariance = &shrunk(d, covariance);
    let mut gemm = Gemm::new(on);
    let first = first_factor(&mut gemm, d, gate, covariance, rank);
    let fc1 = store(dtype, d, &first)?;
    // The stored values, with which inference multiplies.
    let mut read = first;
    let rows = fc1.chunks_exact(dtype.row_bytes(d));
    for (row, read) in rows.zip(read.chunks_exact_mut(d)) {
        on.cpu.dequantize(Row::inline(dtype, d, row), read);
    }
    let mut spread = vec![0.0; rank * d];
    gemm.product(d, &read, covariance, &mut spread);
    let mut hidden = vec![0.0; rank * rank];
    gemm.product(d, &spread, &read, &mut hidden);
    let mut against = vec![0.0; gate.len() / d * rank];
    gemm.product(d, gate, &spread, &mut against);
    // Least squares: `fc2 = G C fc1ᵀ · (fc1 C fc1ᵀ)⁻¹`.
    let mut factor = Vec::new();
    transpose(&inverse_factor(on, rank, &hidden, RIDGE), rank, &mut factor);
    let mut inverse = vec![0.0; rank * rank];
    gemm.product(rank, &factor, &factor, &mut inverse);
    let mut second = vec![0.0; against.len()];
    gemm.product(rank, &against, &inverse, &mut second);
    let finite = second.iter().all(|x| x.is_finite());
    let fc2 = match dtype {
        DType::Q4 => finite.then(|| {
            round(
                on,
                Rows {
                    d: rank,
                    values: &second,
                },
                &hidden,
                &LEVELS,
            )
        })?,
        _ => store(dtype, rank, &second)?,
    };
    Some([fc1, fc2])
}

/// Inputs of a text are correlated, so its covariance has few effective samples and misses
/// directions that other texts use. Shrinkage gives every direction some variance.
fn shrunk(d: usize, covariance: &[f32]) -> Vec<f32> {
    let mut shrunk = covariance.to_vec();
    let variance = shrunk.iter_mut().step_by(d + 1);
    let mean = covariance.iter().step_by(d + 1).sum::<f32>() / d as f32;
    variance.for_each(|v| *v += SHRINKAGE * mean);
    shrunk
}

/// Four bits per element and a scale per group.
const LEVELS: Levels = Levels {
    group: GROUP,
    scale: best_scale,
    nearest,
    bytes: |n| DType::Q4.row_bytes(n),
    store: store_q4_row,
};

/// The quant nearest to `x`, and its value.
fn nearest(x: f32, scale: f32) -> (u8, f32) {
    if scale == 0.0 {
        return (8, 0.0);
    }
    let quant = (x / scale).round().clamp(-8.0, 7.0);
    ((quant + 8.0) as u8, quant * scale)
}

/// The scale with the least squared error on `group`.
fn best_scale(group: &[f32]) -> f16 {
    let largest = group
        .iter()
        .fold(0.0f32, |m, &x| if x.abs() > m.abs() { x } else { m });
    let error = |scale: f32| -> f32 {
        let square = |&x: &f32| (nearest(x, scale).1 - x).powi(2);
        group.iter().map(square).sum()
    };
    let candidates = SCALES.map(|k| f16::from_f32(largest / -8.0 * k as f32 / 20.0));
    let finite = candidates.filter(|scale| scale.is_finite());
    finite
        .min_by(|a, b| error(a.to_f32()).total_cmp(&error(b.to_f32())))
        .unwrap_or(f16::ZERO)
}

/// The first factor, `fc1 [rank × d]`, optimal for its own basis.
fn first_factor(
    gemm: &mut Gemm<'_>,
    d: usize,
    gate: &[f32],
    covariance: &[f32],
    rank: usize,
) -> Vec<f32> {
    let neurons = gate.len() / d;
    let mut gate_t = Vec::new();
    transpose(gate, d, &mut gate_t);
    // `basis [rank × neurons]`, with orthonormal rows
    let mut basis = start(rank, neurons);
    gemm.orthonormalise(&mut basis, neurons);
    let mut narrow = vec![0.0; rank * d];
    let mut spread = vec![0.0; rank * d];
    let mut captured = 0.0;
    for _ in 0..ROUNDS {
        gemm.product(neurons, &basis, &gate_t, &mut narrow);
        gemm.product(d, &narrow, covariance, &mut spread);
        // Trace of U Uᵀ G C Gᵀ.
        let energy: f64 = narrow
            .iter()
            .zip(&spread)
            .map(|(a, b)| f64::from(a * b))
            .sum();
        if energy < captured * (1.0 + GAIN) {
            break;
        }
        captured = energy;
        gemm.product(d, &spread, gate, &mut basis);
        gemm.orthonormalise(&mut basis, neurons);
    }
    gemm.product(neurons, &basis, &gate_t, &mut narrow);
    narrow
}

/// A deterministic start, unlikely to be orthogonal to any eigenvector.
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

/// Rows of `cols` elements in storage format; `None` if one is not finite.
fn store(dtype: DType, cols: usize, rows: &[f32]) -> Option<Vec<u8>> {
    let stride = dtype.row_bytes(cols);
    let mut out = vec![0; rows.len() / cols * stride];
    for (row, out) in rows.chunks_exact(cols).zip(out.chunks_exact_mut(stride)) {
        let (quants, scales) = out.split_at_mut(dtype.quants_bytes(cols));
        quantize_row(dtype, row, quants, scales).ok()?;
    }
    Some(out)
}
