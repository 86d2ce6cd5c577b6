//! Products of resident matrices that a lane and the compute threads share.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use emberflow_kernels::Compute;

use super::work::SharedMatrix;
use crate::input::Input;

/// Most matrices that are multiplied by the same input.
pub const MATRICES: usize = 4;

/// A matrix in which a lane takes part.
pub struct LaneMatrix {
    /// Those that multiply it.
    pub products: Arc<dyn Products>,
    /// Its number there.
    pub number: usize,
}

impl fmt::Debug for LaneMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LaneMatrix").field(&self.number).finish()
    }
}

impl Drop for LaneMatrix {
    fn drop(&mut self) {
        self.products.release(self.number);
    }
}

/// A resident matrix, of which a lane may multiply rows.
pub trait HostMatrix {
    /// The matrix for another owner of its bytes.
    fn shared(&self) -> SharedMatrix;

    /// Products of a range of rows with an input by the compute threads, in their place in `y [tokens × all rows]`.
    fn multiply(
        &self,
        on: &Compute,
        input: Input<'_>,
        rows: Range<usize>,
        scratch: &mut [Vec<f32>],
        y: &mut [f32],
    );

    /// Has a lane multiply some of the rows from now on, or none.
    fn set_lane(&mut self, lane: Option<LaneMatrix>);
}

/// Rows of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatrixRows {
    /// Number of the matrix.
    pub number: usize,
    /// The rows.
    pub rows: Range<usize>,
}

/// What a lane takes of a product: the last rows of each matrix, for the first tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProductShare {
    /// By matrix: where its rows begin. Those before are the CPU's.
    pub left: ArrayVec<usize, MATRICES>,
    /// Tokens: for those after, the CPU computes these rows too.
    pub tokens: usize,
}

/// Products of matrices with rows of one format and width. One is under way at a time.
pub trait Products: Send + Sync {
    /// Begins products of matrices with the same input. `None` if the CPU computes all of them. `whole`: for all tokens only.
    fn offer(&self, of: &[MatrixRows], input: Input<'_>, whole: bool) -> Option<ProductShare>;

    /// Waits for the products under way and hands them over: `[tokens × rows]` of each matrix, the last one first. False if
    /// they are missing because of a failure.
    fn collect(&self, then: &mut dyn FnMut(&[f32])) -> bool;

    /// Number of rows that the lane takes for `tokens` tokens; those for some of the tokens count in part.
    fn taken(&self, of: &[MatrixRows], cols: usize, tokens: usize, whole: bool) -> f64;

    /// Makes room for this many results.
    fn set_results(&self, results: usize);

    /// Time that its products were waited for.
    fn waited(&self) -> Duration;

    /// Forgets a matrix.
    fn release(&self, number: usize);

    /// Waits for the products under way and puts the rows of each matrix, `(all rows, y)`, in their place in its
    /// `y [tokens × all rows]`. False if they are missing.
    fn collect_into(&self, share: &ProductShare, out: &mut [(usize, &mut [f32])]) -> bool {
        self.collect(&mut |mut results| {
            for ((all, y), &left) in out.iter_mut().zip(&share.left).rev() {
                let rows = *all - left;
                let (block, rest) = results.split_at(rows * share.tokens);
                results = rest;
                if rows > 0 {
                    let into = y.chunks_exact_mut(*all).map(|y| &mut y[left..]);
                    for (y, block) in into.zip(block.chunks_exact(rows)) {
                        y.copy_from_slice(block);
                    }
                }
            }
        })
    }
}
