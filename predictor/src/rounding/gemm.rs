//! Matrix products for training and rounding, on the kernels and thread pool of the forward pass.

use emberflow_kernels::{Columns, Compute, DType, matmul_scratch};

/// Rows of the right-hand matrix per thread and step.
const BLOCK: usize = 32;

/// Products of row-major f32 matrices.
pub struct Gemm<'a> {
    on: &'a Compute,
    scratch: Vec<Vec<f32>>,
}

impl<'a> Gemm<'a> {
    /// On these threads.
    pub fn new(on: &'a Compute) -> Self {
        Self {
            on,
            scratch: vec![Vec::new(); on.threads()],
        }
    }

    /// `c [m × n] = a [m × k] · bᵀ`, where `b` is `[n × k]`.
    ///
    /// # Panics
    /// If `c` has another length.
    pub fn product(&mut self, k: usize, a: &[f32], b: &[f32], c: &mut [f32]) {
        let (m, n) = (a.len() / k, b.len() / k);
        assert_eq!(c.len(), m * n, "a product of {m} × {k} and {k} × {n}");
        for scratch in &mut self.scratch {
            scratch.resize(matmul_scratch(k), 0.0);
        }
        let (cpu, stride) = (self.on.cpu, 4 * k);
        let bytes: &[u8] = bytemuck::cast_slice(b);
        let c = Columns::new(c, m, n, n);
        let scratch = &mut self.scratch;
        self.on
            .workers
            .for_each_column_block(c, BLOCK, scratch, &|scratch, first, mut block| {
                let rows = &bytes[first * stride..(first + block.width()) * stride];
                cpu.matmul_columns(DType::F32, rows, stride, k, a, &mut block, scratch);
            });
    }
}

/// `out [cols × rows]` = the transpose of `a [rows × cols]`.
pub(crate) fn transpose(a: &[f32], cols: usize, out: &mut Vec<f32>) {
    const TILE: usize = 32;
    let rows = a.len() / cols;
    out.resize(a.len(), 0.0);
    for r0 in (0..rows).step_by(TILE) {
        for c0 in (0..cols).step_by(TILE) {
            for r in r0..(r0 + TILE).min(rows) {
                for c in c0..(c0 + TILE).min(cols) {
                    out[c * rows + r] = a[r * cols + c];
                }
            }
        }
    }
}

/// Rows orthonormalised together.
const PANEL: usize = 32;
/// Columns of a panel per thread and step: a strip fits its cache.
const STRIP: usize = 256;

impl Gemm<'_> {
    /// Orthonormalises the rows of `a [rows × cols]` in order, twice for accuracy (Gram-Schmidt,
    /// each panel against all rows before it). A row that depends linearly on those before it
    /// becomes zero.
    pub fn orthonormalise(&mut self, a: &mut [f32], cols: usize) {
        let rows = a.len() / cols;
        let mut along = Vec::new();
        for first in (0..rows).step_by(PANEL) {
            let (before, rest) = a.split_at_mut(first * cols);
            let panel = &mut rest[..PANEL.min(rows - first) * cols];
            for _ in 0..2 {
                let sizes: Vec<f32> = panel.chunks_exact(cols).map(norm).collect();
                if first > 0 {
                    along.resize(panel.len() / cols * first, 0.0);
                    self.product(cols, panel, before, &mut along);
                    self.subtract(panel, cols, &along, before);
                }
                within(panel, cols, &sizes);
            }
        }
    }

    /// `panel [m × cols] −= along [m × k] · before [k × cols]`.
    fn subtract(&mut self, panel: &mut [f32], cols: usize, along: &[f32], before: &[f32]) {
        let (k, rows) = (before.len() / cols, panel.len() / cols);
        let panel = Columns::new(panel, rows, cols, cols);
        self.on.workers.for_each_column_block(
            panel,
            STRIP,
            &mut self.scratch,
            &|_, first, mut strip| {
                let width = strip.width();
                for (q, before) in before.chunks_exact(cols).enumerate() {
                    let before = &before[first..first + width];
                    for (r, along) in along.chunks_exact(k).enumerate() {
                        let x = strip.row_mut(r);
                        x.iter_mut()
                            .zip(before)
                            .for_each(|(x, b)| *x -= along[q] * b);
                    }
                }
            },
        );
    }
}

/// Orthonormalises the rows of a panel among each other; `sizes` are their original norms.
fn within(panel: &mut [f32], cols: usize, sizes: &[f32]) {
    for (r, &size) in sizes.iter().enumerate() {
        let (before, row) = panel.split_at_mut(r * cols);
        let row = &mut row[..cols];
        for q in before.chunks_exact(cols) {
            let along = dot(q, row);
            row.iter_mut().zip(q).for_each(|(x, q)| *x -= along * q);
        }
        let left = norm(row);
        let scale = if left > 1e-6 * size { 1.0 / left } else { 0.0 };
        row.iter_mut().for_each(|x| *x *= scale);
    }
}

/// Eight accumulators, so that the compiler can vectorise.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        a.iter()
            .zip(b)
            .zip(&mut sums)
            .for_each(|((a, b), s)| *s += a * b);
    }
    sums.iter().sum()
}

fn norm(x: &[f32]) -> f32 {
    dot(x, x).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_transposes_and_bases_of_a_hand_case() {
        let on = Compute::new(2, None);
        let mut gemm = Gemm::new(&on);
        let (a, b) = (
            [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            [1.0, 0.0, 1.0, 0.0, 1.0, 0.0],
        );
        let mut c = [0.0; 4];
        gemm.product(3, &a, &b, &mut c);
        assert_eq!(c, [4.0, 2.0, 10.0, 5.0]);
        let mut t = Vec::new();
        transpose(&a, 3, &mut t);
        assert_eq!(t, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let mut q = [3.0, 4.0, 6.0, 8.0, 1.0, 0.0];
        gemm.orthonormalise(&mut q, 2);
        assert_eq!(q[..4], [0.6, 0.8, 0.0, 0.0]);
        assert!((q[4] - 0.8).abs() < 1e-6 && (q[5] + 0.6).abs() < 1e-6);
    }

    #[test]
    fn bases_of_several_panels_are_orthonormal() {
        let on = Compute::new(2, None);
        let mut gemm = Gemm::new(&on);
        let (rows, cols) = (2 * PANEL + 5, 2 * STRIP + 7);
        let mut a: Vec<f32> = (0..rows * cols)
            .map(|i| ((i * i) as f32 * 0.37).sin() + if i % cols == 3 { 50.0 } else { 0.0 })
            .collect();
        // The last row depends on the first two.
        for c in 0..cols {
            a[(rows - 1) * cols + c] = a[c] - 2.0 * a[cols + c];
        }
        gemm.orthonormalise(&mut a, cols);
        for (i, p) in a.chunks_exact(cols).enumerate() {
            for (j, q) in a.chunks_exact(cols).enumerate().take(i + 1) {
                let wanted = f32::from(u8::from(i == j && i + 1 < rows));
                assert!((dot(p, q) - wanted).abs() < 1e-5, "{i} {j}: {}", dot(p, q));
            }
        }
    }
}
