//! Triangular factor of an inverse covariance, which determines the compensation of rounding
//! errors.

use emberflow_kernels::{Columns, Compute};

/// Default damping, relative to the mean variance.
pub(crate) const DAMPING: f64 = 0.01;

/// Rows of the factors computed together, so that repeatedly read ones stay in the cache.
const BLOCK: usize = 64;

/// Columns per thread and step.
const STRIP: usize = 256;

/// The upper triangular `u` with `uᵀ u = (covariance + damping)⁻¹`, row-major. `damping`, relative
/// to the mean variance, is added to every variance. Computed in f64; the number of threads changes
/// no bit.
pub(crate) fn inverse_factor(on: &Compute, d: usize, covariance: &[f32], damping: f64) -> Vec<f32> {
    let variances = (0..d).map(|i| f64::from(covariance[i * (d + 1)]));
    let damping = (damping * variances.sum::<f64>() / d as f64).max(1e-30);
    let a = factor(on, d, covariance, damping);
    inverse(on, d, &a).into_iter().map(|x| x as f32).collect()
}

/// The upper triangular `a` with `a aᵀ = covariance + damping`, by blocks of columns from the last.
fn factor(on: &Compute, d: usize, covariance: &[f32], damping: f64) -> Vec<f64> {
    let mut a = vec![0.0; d * d];
    let mut end = d;
    while end > 0 {
        let start = end.saturating_sub(BLOCK);
        let (above, block) = a.split_at_mut(start * d);
        for i in (start..end).rev() {
            // Rows of the block from row i on.
            let (row, below) = block[(i - start) * d..].split_at_mut(d);
            for j in (i..end).rev() {
                let other = if j == i {
                    &row[j + 1..]
                } else {
                    &below[(j - i - 1) * d + j + 1..(j - i) * d]
                };
                let rest = f64::from(covariance[i * d + j]) - dot(&row[j + 1..], other);
                row[j] = if j == i {
                    (rest + damping).max(damping * 1e-3).sqrt()
                } else {
                    rest / below[(j - i - 1) * d + j]
                };
            }
        }
        let block = &*block;
        on.workers.for_each_chunk_mut(above, d, &|_, i, row| {
            for j in (start..end).rev() {
                let other = &block[(j - start) * d..(j - start + 1) * d];
                let rest = f64::from(covariance[i * d + j]) - dot(&row[j + 1..], &other[j + 1..]);
                row[j] = rest / other[j];
            }
        });
        end = start;
    }
    a
}

/// Inverse of the upper triangular `a`, by blocks of rows from the last: `u[i] = (e_i − Σ_{k>i}
/// a[i][k] u[k]) / a[i][i]`.
fn inverse(on: &Compute, d: usize, a: &[f64]) -> Vec<f64> {
    let mut u = vec![0.0; d * d];
    let mut scratch: Vec<Vec<f64>> = vec![Vec::new(); on.threads()];
    let mut end = d;
    while end > 0 {
        let start = end.saturating_sub(BLOCK);
        let (head, below) = u.split_at_mut(end * d);
        let below = &*below;
        let block = Columns::new(&mut head[start * d..], end - start, d, d);
        let work = |row: &mut Vec<f64>, first: usize, mut strip: Columns<'_, f64>| {
            let columns = first..first + strip.width();
            for (k, other) in (end..d).zip(below.chunks_exact(d)) {
                for i in start..end {
                    subtract(
                        strip.row_mut(i - start),
                        a[i * d + k],
                        &other[columns.clone()],
                    );
                }
            }
            for i in (start..end).rev() {
                row.clear();
                row.extend_from_slice(strip.row_mut(i - start));
                for k in i + 1..end {
                    subtract(row, a[i * d + k], strip.row_mut(k - start));
                }
                if columns.contains(&i) {
                    row[i - first] += 1.0;
                }
                let to = strip.row_mut(i - start).iter_mut().zip(&*row);
                to.for_each(|(to, x)| *to = x / a[i * (d + 1)]);
            }
        };
        (on.workers).for_each_column_block(block, STRIP, &mut scratch, &work);
        end = start;
    }
    u
}

/// `row −= factor · other`.
fn subtract(row: &mut [f64], factor: f64, other: &[f64]) {
    row.iter_mut()
        .zip(other)
        .for_each(|(x, y)| *x -= factor * y);
}

/// Eight accumulators, so that the compiler can vectorise.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `(c + damping) · uᵀ u = 1`.
    fn check(on: &Compute, d: usize, c: &[f32], tolerance: f64) {
        let u = inverse_factor(on, d, c, DAMPING);
        let variances: f64 = (0..d).map(|i| f64::from(c[i * (d + 1)])).sum();
        let damping = DAMPING * variances / d as f64;
        let at = |m: &[f32], i: usize, j: usize| f64::from(m[i * d + j]);
        let mut inverse = vec![0.0; d * d];
        for i in 0..d {
            assert!(u[i * d..i * d + i].iter().all(|&x| x == 0.0), "row {i}");
            for j in 0..d {
                inverse[i * d + j] = (0..d).map(|m| at(&u, m, i) * at(&u, m, j)).sum();
            }
        }
        for i in 0..d {
            for j in 0..d {
                let product = (0..d)
                    .map(|k| at(c, i, k) * inverse[k * d + j])
                    .sum::<f64>()
                    + damping * inverse[i * d + j];
                let expected = f64::from(u8::from(i == j));
                assert!((product - expected).abs() < tolerance, "{i} {j}: {product}");
            }
        }
    }

    #[test]
    fn the_factor_inverts_the_covariance() {
        let on = Compute::new(2, None);
        check(
            &on,
            3,
            &[4.0, 1.0, 0.5, 1.0, 3.0, 0.25, 0.5, 0.25, 2.0],
            1e-5,
        );
        // Several blocks and strips, with correlated neighbours.
        let d = STRIP + BLOCK + 5;
        let near = |i: usize, j: usize| 0.8f32.powi(i.abs_diff(j) as i32);
        let c: Vec<f32> = (0..d * d).map(|at| near(at / d, at % d)).collect();
        check(&on, d, &c, 1e-4);
    }
}
