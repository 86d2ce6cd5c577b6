//! Making predictors from a layer's inputs and gate rows.

mod gemm;
