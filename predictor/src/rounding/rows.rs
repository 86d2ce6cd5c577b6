//! Rounds a predictor's rows, each on its own, to a predictor format.

use emberflow_kernels::{Compute, Cpu, Row};
use half::f16;

use super::factor::{DAMPING, inverse_factor};

/// Rows per thread and step.
const ROWS: usize = 16;

/// A quantisation format.
pub(crate) struct Levels {
    /// Elements per scale.
    pub group: usize,
    /// The scale for a group.
    pub scale: fn(&[f32]) -> f16,
    /// The nearest quant of an element and its value, given a scale.
    pub nearest: fn(f32, f32) -> (u8, f32),
    /// Bytes of a row with this many elements.
    pub bytes: fn(usize) -> usize,
    /// Stores the quants and the bits of the groups' scales.
    pub store: fn(&[u8], &[u16], &mut [u8]),
}

/// Rows of `d` elements.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub d: usize,
    /// `[rows × d]`.
    pub values: &'a [f32],
}

/// Rounds rows for inputs with this covariance, `[d × d]`; returns the stored rows.
pub(crate) fn round(on: &Compute, rows: Rows<'_>, covariance: &[f32], levels: &Levels) -> Vec<u8> {
    let Rows { d, values } = rows;
    let u = inverse_factor(on, d, covariance, DAMPING);
    let bytes = (levels.bytes)(d);
    let mut out = vec![0; values.len() / d * bytes];
    on.workers
        .for_each_chunk_mut(&mut out, ROWS * bytes, &|_, chunk, out| {
            let first = chunk * ROWS;
            let (mut row, mut quants) = (vec![0.0; d], vec![0; d]);
            for (r, out) in out.chunks_exact_mut(bytes).enumerate() {
                row.copy_from_slice(&values[(first + r) * d..(first + r + 1) * d]);
                let scales = round_row(on.cpu, &mut row, &u, levels, &mut quants);
                (levels.store)(&quants, &scales, out);
            }
        });
    out
}

/// Rounds one row in place; `u` is the [`inverse_factor`] of the inputs' covariance. Returns the
/// f16 bits of the groups' scales.
fn round_row(cpu: Cpu, row: &mut [f32], u: &[f32], levels: &Levels, quants: &mut [u8]) -> Vec<u16> {
    let d = row.len();
    let mut scales = Vec::with_capacity(d.div_ceil(levels.group));
    let mut scale = 0.0;
    for i in 0..d {
        if i % levels.group == 0 {
            let bits = (levels.scale)(&row[i..(i + levels.group).min(d)]);
            scale = bits.to_f32();
            scales.push(bits.to_bits());
        }
        let (quant, value) = (levels.nearest)(row[i], scale);
        quants[i] = quant;
        let diagonal = u[i * d + i];
        let error = (row[i] - value) / diagonal;
        cpu.axpy(-error, Row::f32(&u[i * d + i..(i + 1) * d]), &mut row[i..]);
    }
    scales
}
