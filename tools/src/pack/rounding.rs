//! Rounding errors of packed matrices, on a sample of rows spread over each matrix.

use std::collections::BTreeMap;
use std::io::Write;

use emberflow_kernels::{Cpu, DType, Row};
use serde::Serialize;

/// Rows of a matrix that are sampled.
const ROWS: usize = 64;

/// Distance of the sampled rows of a matrix.
pub(super) fn step(rows: usize) -> usize {
    rows.div_ceil(ROWS).max(1)
}

/// Rounding error of the matrices in one format. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct RoundingError {
    /// The format.
    pub format: String,
    /// Σ(w − ŵ)² / Σw² over the sampled rows; 0 if they have the source's values.
    pub relative_squared: f64,
}

/// Sums over sampled rows, by format: of squared errors, and of squares.
#[derive(Default)]
pub(super) struct RoundingErrors {
    sums: BTreeMap<&'static str, [f64; 2]>,
    rounded: Vec<f32>,
}

impl RoundingErrors {
    /// Adds a row of the source, as it is stored.
    pub fn add(&mut self, cpu: Cpu, source: &[f32], stored: Row<'_>) {
        // These formats are not rounded to.
        if matches!(stored.dtype(), DType::F32 | DType::Mxfp4) {
            return;
        }
        self.rounded.resize(source.len(), 0.0);
        cpu.dequantize(stored, &mut self.rounded);
        let [errors, squares] = self.sums.entry(stored.dtype().name()).or_default();
        for (&w, &r) in source.iter().zip(&self.rounded) {
            let (w, r) = (f64::from(w), f64::from(r));
            *errors += (w - r) * (w - r);
            *squares += w * w;
        }
    }

    /// The relative errors.
    pub fn report(&self) -> Vec<RoundingError> {
        let of = |(name, [errors, squares]): (&&str, &[f64; 2])| RoundingError {
            format: (*name).to_owned(),
            relative_squared: errors / squares.max(f64::MIN_POSITIVE),
        };
        self.sums.iter().map(of).collect()
    }
}

/// Prints the errors; `complete` if this run has written the whole container.
pub(super) fn tell(
    errors: &[RoundingError],
    complete: bool,
    out: &mut impl Write,
) -> std::io::Result<()> {
    let errors = errors.iter().filter(|of| of.relative_squared > 0.0);
    let errors: Vec<String> = errors
        .map(|of| format!("{:.2e} in {}", of.relative_squared, of.format))
        .collect();
    match (errors.is_empty(), complete) {
        (true, false) => Ok(()),
        (true, true) => writeln!(out, "no sampled weight was rounded"),
        (false, _) => writeln!(
            out,
            "rounding error Σ(w − ŵ)² / Σw² of sampled rows: {}",
            errors.join(", ")
        ),
    }
}
