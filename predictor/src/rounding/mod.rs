//! Rounds weights so that their products with a text's inputs change least.
//!
//! All of it works with the inputs' covariance ([`Covariance`]): element by element, the rounding
//! error is compensated in the elements not yet rounded, as far as inputs that vary together allow
//! (GPTQ, arXiv 2210.17323). Predictors round their rows this way (`rows.rs`), the packer whole
//! matrices ([`Rounder`]).

mod covariance;
mod factor;
mod gemm;
mod lines;
mod matrix;
mod rows;
mod scale;
#[cfg(test)]
mod tests;

pub use covariance::Covariance;
pub(crate) use factor::inverse_factor;
pub use gemm::Gemm;
pub(crate) use gemm::transpose;
pub use matrix::Rounder;
pub(crate) use rows::{Levels, Rows, round};
