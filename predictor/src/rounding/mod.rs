//! Rounds weights such that their products with a text's inputs change least.
//!
//! The method (GPTQ, arXiv 2210.17323) uses the inputs' covariance ([`Covariance`]): weights are
//! rounded one after the other, and each rounding error is compensated by weights not yet rounded,
//! as far as their inputs are correlated. Predictors round rows this way (`rows.rs`), the packer
//! whole matrices ([`Rounder`], and [`ChannelRounder`] for rows with one scale).

mod channel;
mod covariance;
mod factor;
mod gemm;
mod inputs;
mod lines;
mod matrix;
mod rows;
mod scale;
#[cfg(test)]
mod tests;

pub use channel::ChannelRounder;
pub use covariance::Covariance;
pub(crate) use factor::inverse_factor;
pub use gemm::Gemm;
pub(crate) use gemm::transpose;
pub use inputs::Inputs;
pub use matrix::Rounder;
pub(crate) use rows::{Levels, Rows, round};
