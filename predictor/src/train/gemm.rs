//! Matrix products of the trainer, on the kernels and the thread pool of the forward pass.

use emberflow_kernels::{Columns, Cpu, DType, Workers, matmul_scratch};

/// Rows of the right-hand matrix that one thread takes at a time.
const BLOCK: usize = 32;

/// Products of row-major f32 matrices.
pub(crate) struct Gemm<'a> {
    cpu: Cpu,
    workers: &'a Workers,
    scratch: Vec<Vec<f32>>,
}

impl<'a> Gemm<'a> {
    pub fn new(cpu: Cpu, workers: &'a Workers) -> Self {
        Self {
            cpu,
            workers,
            scratch: vec![Vec::new(); workers.threads()],
        }
    }

    /// `c [m × n] = a [m × k] · bᵀ`, where `b` is `[n × k]`.
    pub fn product(&mut self, k: usize, a: &[f32], b: &[f32], c: &mut [f32]) {
        let (m, n) = (a.len() / k, b.len() / k);
        assert_eq!(c.len(), m * n, "a product of {m} × {k} and {k} × {n}");
        for scratch in &mut self.scratch {
            scratch.resize(matmul_scratch(k), 0.0);
        }
        let (cpu, stride) = (self.cpu, 4 * k);
        let bytes: &[u8] = bytemuck::cast_slice(b);
        let c = Columns::new(c, m, n, n);
        let scratch = &mut self.scratch;
        self.workers
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

/// Makes the rows of `a [rows × cols]` orthonormal, in order, twice over for accuracy
/// (modified Gram-Schmidt). A row that depends on those before it becomes zero.
pub(crate) fn orthonormalise(a: &mut [f32], cols: usize) {
    let rows = a.len() / cols;
    for r in 0..rows {
        let (before, row) = a.split_at_mut(r * cols);
        let row = &mut row[..cols];
        let size = norm(row);
        for _ in 0..2 {
            for q in before.chunks_exact(cols) {
                let along: f32 = q.iter().zip(&*row).map(|(q, x)| q * x).sum();
                row.iter_mut().zip(q).for_each(|(x, q)| *x -= along * q);
            }
        }
        let left = norm(row);
        let scale = if left > 1e-6 * size { 1.0 / left } else { 0.0 };
        row.iter_mut().for_each(|x| *x *= scale);
    }
}

fn norm(x: &[f32]) -> f32 {
    x.iter()
        .map(|v| f64::from(*v) * f64::from(*v))
        .sum::<f64>()
        .sqrt() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_transposes_and_bases_of_a_hand_case() {
        let workers = Workers::new(2, None);
        let mut gemm = Gemm::new(Cpu::detect(), &workers);
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
        orthonormalise(&mut q, 2);
        assert_eq!(q[..4], [0.6, 0.8, 0.0, 0.0]);
        assert!((q[4] - 0.8).abs() < 1e-6 && (q[5] + 0.6).abs() < 1e-6);
    }
}
