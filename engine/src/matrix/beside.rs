//! Products of which a lane computes a share.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use emberflow_kernels::Compute;

use super::{Matrix, Stored};
use crate::input::Input;
use crate::lane::{HostMatrix, LaneMatrix, MATRICES, MatrixRows, Products, SharedMatrix};

impl Matrix {
    /// Products of which a lane computes a share: the CPU's part, then that share. False if it takes none.
    pub(super) fn matmul_beside(
        on: &Compute,
        multiplied: &mut [(&Self, &mut [f32])],
        input: Input<'_>,
        scratch: &mut [Vec<f32>],
    ) -> bool {
        let matrices = multiplied.iter().map(|(matrix, _)| *matrix);
        let Some((products, rows)) = Self::shared_rows(matrices) else {
            return false;
        };
        let Some(share) = products.offer(&rows, input, false) else {
            return false;
        };
        let (tokens, some) = (input.tokens(), share.tokens);
        for ((matrix, y), &left) in multiplied.iter_mut().zip(&share.left) {
            let y = &mut y[..tokens * matrix.rows];
            matrix.matmul_rows(on, input, 0..left, scratch, y);
            if some < tokens {
                let (input, y) = (
                    input.range(some, tokens - some),
                    &mut y[some * matrix.rows..],
                );
                matrix.matmul_rows(on, input, left..matrix.rows, scratch, y);
            }
        }
        let out = multiplied.iter_mut().map(|(matrix, y)| {
            let rows = matrix.rows;
            (rows, &mut y[..tokens * rows])
        });
        let mut out: ArrayVec<_, MATRICES> = out.collect();
        let collected = products.collect_into(&share, &mut out);
        drop(out);
        if collected {
            return true;
        }
        for ((matrix, y), &left) in multiplied.iter_mut().zip(&share.left) {
            let y = &mut y[..tokens * matrix.rows];
            matrix.matmul_rows(on, input, left..matrix.rows, scratch, y);
        }
        true
    }

    /// The lane's products of all these matrices, and all their rows.
    fn shared_rows<'a>(
        matrices: impl Iterator<Item = &'a Self>,
    ) -> Option<(Arc<dyn Products>, ArrayVec<MatrixRows, MATRICES>)> {
        let mut products: Option<&Arc<dyn Products>> = None;
        let mut rows = ArrayVec::new();
        for matrix in matrices {
            let lane = matrix.lane.as_ref()?;
            let first = *products.get_or_insert(&lane.products);
            if !Arc::ptr_eq(first, &lane.products) {
                return None;
            }
            rows.push(MatrixRows {
                number: lane.number,
                rows: 0..matrix.rows,
            });
        }
        Some((Arc::clone(products?), rows))
    }

    /// Number of weights that a lane multiplies for `n` tokens, for matrices with the same input; those that it multiplies for
    /// some of the tokens count in part.
    pub(crate) fn weights_beside<'a>(
        matrices: impl Iterator<Item = &'a Self> + Clone,
        n: usize,
    ) -> f64 {
        let cols = matrices.clone().next().map_or(0, Self::cols);
        Self::shared_rows(matrices).map_or(0.0, |(products, rows)| {
            products.taken(&rows, cols, n, false) * cols as f64
        })
    }

    /// Time spent waiting for the lane's products of these matrices.
    pub(crate) fn waited_beside<'a>(matrices: impl Iterator<Item = &'a Self>) -> Duration {
        let mut found: Vec<&Arc<dyn Products>> = Vec::new();
        for lane in matrices.filter_map(|matrix| matrix.lane.as_ref()) {
            if !found.iter().any(|known| Arc::ptr_eq(known, &lane.products)) {
                found.push(&lane.products);
            }
        }
        found.into_iter().map(|products| products.waited()).sum()
    }

    /// The lane's matrix.
    pub(crate) fn lane(&self) -> Option<&LaneMatrix> {
        self.lane.as_ref()
    }
}

impl HostMatrix for Matrix {
    fn shared(&self) -> SharedMatrix {
        SharedMatrix {
            dtype: self.dtype,
            rows: self.rows,
            cols: self.cols,
            bytes: match &self.stored {
                Stored::Held(bytes) => Arc::clone(bytes) as _,
                Stored::Streamed(_) => Arc::new([]),
            },
        }
    }

    fn multiply(
        &self,
        on: &Compute,
        input: Input<'_>,
        rows: Range<usize>,
        scratch: &mut [Vec<f32>],
        y: &mut [f32],
    ) {
        self.matmul_rows(on, input, rows, scratch, y);
    }

    fn set_lane(&mut self, lane: Option<LaneMatrix>) {
        self.lane = lane;
    }
}
