//! What rounding knows of the inputs of matrices, and the error of products with them.

use emberflow_kernels::{Columns, Compute, DType, Row, matmul_scratch};

use super::factor::{DAMPING, inverse_factor};

/// Number of sweeps over all quants after the first rounding.
const SWEEPS: usize = 3;

/// The mean outer product of the inputs of matrices.
pub struct Inputs<'a> {
    pub(super) on: &'a Compute,
    /// Elements of an input.
    pub(super) size: usize,
    /// `[size × size]`.
    covariance: Vec<f32>,
    /// Damping, added to every variance.
    damping: f32,
}

impl<'a> Inputs<'a> {
    /// With this `covariance`, `[size × size]`.
    pub fn new(on: &'a Compute, size: usize, covariance: Vec<f32>) -> Self {
        let mean = covariance.iter().step_by(size + 1).sum::<f32>() / size as f32;
        Self {
            on,
            size,
            covariance,
            damping: DAMPING as f32 * mean,
        }
    }

    /// The mean square of an input.
    pub fn energy(&self, input: usize) -> f32 {
        self.covariance[input * (self.size + 1)]
    }

    /// The inputs, those of the largest energy first: many others can still compensate their errors.
    pub(super) fn by_energy(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.size as u32).collect();
        let energy = |i: u32| self.energy(i as usize);
        order.sort_by(|&a, &b| energy(b).total_cmp(&energy(a)));
        order
    }

    /// [`inverse_factor`] of the covariance in an order of the inputs.
    pub(super) fn factor(&self, order: &[u32]) -> Vec<f32> {
        let mut turned = Vec::with_capacity(self.covariance.len());
        for &i in order {
            let row = &self.covariance[i as usize * self.size..][..self.size];
            turned.extend(order.iter().map(|&j| row[j as usize]));
        }
        inverse_factor(self.on, self.size, &turned, DAMPING)
    }

    /// `errors · covariance`, row by row.
    pub(super) fn spread(&self, errors: &[f32]) -> Vec<f32> {
        let (n, rows) = (self.size, errors.len() / self.size);
        let mut spread = vec![0.0; errors.len()];
        let mut scratch = vec![0.0; matmul_scratch(n)];
        let covariance: &[u8] = bytemuck::cast_slice(&self.covariance);
        let mut y = Columns::new(&mut spread, rows, n, n);
        let cpu = self.on.cpu;
        cpu.matmul_columns(
            DType::F32,
            covariance,
            4 * n,
            n,
            errors,
            &mut y,
            &mut scratch,
        );
        spread
    }

    /// The mean squared error of each row's products, given the `errors` of its weights, `[rows × size]`.
    pub(super) fn losses(&self, errors: &[f32]) -> Vec<f64> {
        let spread = self.spread(errors);
        let rows = errors.chunks_exact(self.size);
        let rows = rows.zip(spread.chunks_exact(self.size));
        let of = |(errors, spread): (&[f32], &[f32])| {
            let pairs = errors.iter().zip(spread);
            pairs.map(|(e, s)| f64::from(*e) * f64::from(*s)).sum()
        };
        rows.map(of).collect()
    }

    /// Moves each weight to the value that minimises the error of the products while the others are fixed. `errors` are the
    /// weights less what stands for them, `[rows × size]`; `moved` gets row, input and the best change of its
    /// weight, and returns by how much it changed it.
    pub(super) fn settle(
        &self,
        errors: &mut [f32],
        mut moved: impl FnMut(usize, usize, f32) -> f32,
    ) {
        let (n, count) = (self.size, errors.len());
        let mut spread = self.spread(errors);
        for at in (0..SWEEPS).flat_map(|_| 0..count) {
            let (r, i) = (at / n, at % n);
            let row = &self.covariance[i * n..(i + 1) * n];
            let cost = row[i] + self.damping;
            if cost > 0.0 {
                let change = moved(r, i, (spread[at] + self.damping * errors[at]) / cost);
                if change != 0.0 {
                    errors[at] -= change;
                    let spread = &mut spread[r * n..(r + 1) * n];
                    self.on.cpu.axpy(-change, Row::f32(row), spread);
                }
            }
        }
    }
}
