//! How processors share a product of matrices: HeteroInfer's partitions by weights and by activations (§4.2). The solver chooses
//! between two of them, on the paper's grid or the finest one; among several the second is all others together.
//!
//! ```text
//! T(p₁ … pₖ) = min over r, s of max(p₁(the rest), T(p₂ … pₖ, r rows × s tokens))      T(p₁) = p₁(rows × n)
//! ```

mod curve;
mod solver;
#[cfg(test)]
mod tests;
mod together;

pub use curve::{Curve, Linear, Product};
pub use solver::{Forms, Pair, Partition, Solution, Space, pieces_of_second};
pub use together::{MOST, Rectangle, Rectangles, Shares, Together, seconds, shares};
