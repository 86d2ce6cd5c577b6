//! Gate rows in two bits, rounded so that their products with a text's inputs change
//! least (GPTQ, arXiv 2210.17323): element by element, the error that rounding makes is
//! passed on to the elements that have not been rounded yet, by the inputs' covariance.

use emberflow_kernels::{Cpu, Row, TWO_BIT_GROUP, Workers, store_two_bit_row, two_bit_row_bytes};
use half::f16;

/// Share of the mean variance that is added to every variance.
const DAMPING: f64 = 0.01;

/// Candidates for a group's scale, as shares of the one that just reaches its largest
/// element.
const SCALES: std::ops::RangeInclusive<u32> = 8..=21;

/// Rows that a thread takes at a time.
const ROWS: usize = 16;

/// Two-bit rows of `gate [neurons × d]`, for inputs with the covariance `c [d × d]`.
pub(crate) fn round(
    cpu: Cpu,
    workers: &Workers,
    d: usize,
    gate: &[f32],
    covariance: &[f32],
) -> Vec<u8> {
    let u = inverse_factor(d, covariance);
    let bytes = two_bit_row_bytes(d);
    let mut out = vec![0; gate.len() / d * bytes];
    workers.for_each_chunk_mut(&mut out, ROWS * bytes, &|_, chunk, out| {
        let first = chunk * ROWS;
        let mut row = vec![0.0; d];
        let mut quants = vec![0; d];
        for (r, out) in out.chunks_exact_mut(bytes).enumerate() {
            row.copy_from_slice(&gate[(first + r) * d..(first + r + 1) * d]);
            let scales = round_row(cpu, &mut row, &u, &mut quants);
            store_two_bit_row(&quants, &scales, out);
        }
    });
    out
}

/// Rounds one row, which is used up. Returns the bits of the groups' scales.
fn round_row(cpu: Cpu, row: &mut [f32], u: &[f32], quants: &mut [u8]) -> Vec<u16> {
    let d = row.len();
    let mut scales = Vec::with_capacity(d.div_ceil(TWO_BIT_GROUP));
    let mut scale = 0.0;
    for i in 0..d {
        if i % TWO_BIT_GROUP == 0 {
            let bits = best_scale(&row[i..(i + TWO_BIT_GROUP).min(d)]);
            scale = bits.to_f32();
            scales.push(bits.to_bits());
        }
        let (quant, value) = nearest(row[i], scale);
        quants[i] = quant;
        let diagonal = u[i * d + i];
        let error = (row[i] - value) / diagonal;
        cpu.axpy(-error, Row::f32(&u[i * d + i..(i + 1) * d]), &mut row[i..]);
    }
    scales
}

/// The quant nearest to `x`, and its value.
fn nearest(x: f32, scale: f32) -> (u8, f32) {
    if scale == 0.0 {
        return (1, 0.0);
    }
    // −3, −1, 1, 3 times the scale
    let quant = ((x / scale + 3.0) * 0.5).round().clamp(0.0, 3.0);
    (quant as u8, (2.0 * quant - 3.0) * scale)
}

/// The scale with the least squared error on `group`.
fn best_scale(group: &[f32]) -> f16 {
    let largest = group.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let error = |scale: f32| -> f32 {
        let square = |&x: &f32| (nearest(x, scale).1 - x).powi(2);
        group.iter().map(square).sum()
    };
    let candidates = SCALES.map(|k| f16::from_f32(largest / 3.0 * k as f32 / 20.0));
    candidates
        .min_by(|a, b| error(a.to_f32()).total_cmp(&error(b.to_f32())))
        .unwrap_or(f16::ZERO)
}

/// The upper triangular `u` with `uᵀ u = inverse(covariance + damping)`, row-major.
fn inverse_factor(d: usize, covariance: &[f32]) -> Vec<f32> {
    let mean = (0..d)
        .map(|i| f64::from(covariance[i * d + i]))
        .sum::<f64>()
        / d as f64;
    let damping = (DAMPING * mean).max(1e-30);
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
        let u = inverse_factor(3, &c);
        assert_eq!([u[3], u[6], u[7]], [0.0; 3]);
        // (c + damping) · uᵀ u = 1
        let damping = 0.01 * 3.0;
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

    #[test]
    fn values_that_two_bits_hold_stay_what_they_are() {
        let d = 70;
        let mut identity = vec![0.0; d * d];
        (0..d).for_each(|i| identity[i * d + i] = 1.0);
        let gate: Vec<f32> = (0..2 * d).map(|i| [-1.5, -0.5, 0.5, 1.5][i % 4]).collect();
        let workers = Workers::new(1, None);
        let cpu = Cpu::detect();
        let rows = round(cpu, &workers, d, &gate, &identity);
        let mut wide = vec![0; 2 * emberflow_kernels::DType::Q4.row_bytes(d)];
        cpu.widen_two_bit(&rows, d, &mut wide);
        for (row, gate) in wide.chunks_exact(wide.len() / 2).zip(gate.chunks_exact(d)) {
            let mut values = vec![0.0; d];
            cpu.dequantize(
                Row::inline(emberflow_kernels::DType::Q4, d, row),
                &mut values,
            );
            for (value, gate) in values.iter().zip(gate) {
                assert!((value - gate).abs() < 1e-3, "{value} {gate}");
            }
        }
    }
}
