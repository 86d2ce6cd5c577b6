//! Rounds rows so that their products with a text's inputs change least (GPTQ, arXiv 2210.17323):
//! element by element, the rounding error is compensated in the elements not yet rounded, weighted
//! by the inputs' covariance.

use emberflow_kernels::{Compute, Cpu, Row};
use half::f16;

/// Default damping, relative to the mean variance.
const DAMPING: f64 = 0.01;

/// Rows per thread and step.
const ROWS: usize = 16;

/// A quantisation format.
pub(crate) struct Levels {
    /// Elements per scale.
    pub group: usize,
    /// The scale for a group.
    pub scale: fn(&[f32]) -> f16,
    /// The nearest quant of an element and its value, given a scale.
    pub nearest: fn(f32, f32) -> (u8, f32),
    /// Bytes of a row with so many elements.
    pub bytes: fn(usize) -> usize,
    /// Stores the quants and the bits of the groups' scales.
    pub store: fn(&[u8], &[u16], &mut [u8]),
}

/// Rows of `d` elements.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub d: usize,
    /// `[rows × d]`.
    pub values: &'a [f32],
}

/// Stored rows, for inputs with this covariance, `[d × d]`.
pub(crate) fn round(on: &Compute, rows: Rows<'_>, covariance: &[f32], levels: &Levels) -> Vec<u8> {
    let Rows { d, values } = rows;
    let u = inverse_factor(d, covariance, DAMPING);
    let bytes = (levels.bytes)(d);
    let mut out = vec![0; values.len() / d * bytes];
    on.workers
        .for_each_chunk_mut(&mut out, ROWS * bytes, &|_, chunk, out| {
            let first = chunk * ROWS;
            let (mut row, mut quants) = (vec![0.0; d], vec![0; d]);
            for (r, out) in out.chunks_exact_mut(bytes).enumerate() {
                row.copy_from_slice(&values[(first + r) * d..(first + r + 1) * d]);
                let scales = round_row(on.cpu, &mut row, &u, levels, &mut quants);
                (levels.store)(&quants, &scales, out);
            }
        });
    out
}

/// Rounds one row in place; `u` is the [`inverse_factor`] of the inputs' covariance. Returns the
/// bits of the groups' scales.
fn round_row(cpu: Cpu, row: &mut [f32], u: &[f32], levels: &Levels, quants: &mut [u8]) -> Vec<u16> {
    let d = row.len();
    let mut scales = Vec::with_capacity(d.div_ceil(levels.group));
    let mut scale = 0.0;
    for i in 0..d {
        if i % levels.group == 0 {
            let bits = (levels.scale)(&row[i..(i + levels.group).min(d)]);
            scale = bits.to_f32();
            scales.push(bits.to_bits());
        }
        let (quant, value) = (levels.nearest)(row[i], scale);
        quants[i] = quant;
        let diagonal = u[i * d + i];
        let error = (row[i] - value) / diagonal;
        cpu.axpy(-error, Row::f32(&u[i * d + i..(i + 1) * d]), &mut row[i..]);
    }
    scales
}

/// The upper triangular `u` with `uᵀ u = inverse(covariance + damping)`, row-major. `damping` is
/// added to every variance, relative to the mean variance.
pub(crate) fn inverse_factor(d: usize, covariance: &[f32], damping: f64) -> Vec<f32> {
    let mean = (0..d)
        .map(|i| f64::from(covariance[i * d + i]))
        .sum::<f64>()
        / d as f64;
    let damping = (damping * mean).max(1e-30);
    // `covariance = a aᵀ` with upper triangular `a`, from the last row up; then `u` is
    // the inverse of `a`.
    let mut a = vec![0.0f64; d * d];
    for j in (0..d).rev() {
        for i in (0..=j).rev() {
            let (row_i, row_j) = (
                &a[i * d + j + 1..(i + 1) * d],
                &a[j * d + j + 1..(j + 1) * d],
            );
            let known: f64 = row_i.iter().zip(row_j).map(|(x, y)| x * y).sum();
            let rest = f64::from(covariance[i * d + j]) - known;
            a[i * d + j] = if i == j {
                (rest + damping).max(damping * 1e-3).sqrt()
            } else {
                rest / a[j * d + j]
            };
        }
    }
    // rows of the inverse from the last up: u[i] = (e_i − Σ_{k>i} a[i][k] u[k]) / a[i][i]
    let mut u = vec![0.0f64; d * d];
    for i in (0..d).rev() {
        let (head, tail) = u.split_at_mut((i + 1) * d);
        let row = &mut head[i * d..];
        for (k, below) in (i + 1..d).zip(tail.chunks_exact(d)) {
            let factor = a[i * d + k];
            for (x, y) in row[k..].iter_mut().zip(&below[k..]) {
                *x -= factor * y;
            }
        }
        row[i] += 1.0;
        let diagonal = a[i * d + i];
        row[i..].iter_mut().for_each(|x| *x /= diagonal);
    }
    u.into_iter().map(|x| x as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_inverts_the_covariance() {
        let c = [4.0, 1.0, 0.5, 1.0, 3.0, 0.25, 0.5, 0.25, 2.0];
        let u = inverse_factor(3, &c, DAMPING);
        assert_eq!([u[3], u[6], u[7]], [0.0; 3]);
        // (c + damping) · uᵀ u = 1
        let damping = DAMPING as f32 * 3.0;
        for i in 0..3 {
            for j in 0..3 {
                let mut sum = 0.0;
                for k in 0..3 {
                    let inverse: f32 = (0..3).map(|m| u[m * 3 + k] * u[m * 3 + j]).sum();
                    let c = c[i * 3 + k] + if i == k { damping } else { 0.0 };
                    sum += c * inverse;
                }
                let expected = f32::from(u8::from(i == j));
                assert!((sum - expected).abs() < 1e-5, "{i} {j}: {sum}");
            }
        }
    }
}
