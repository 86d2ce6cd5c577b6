//! Down vectors in mxfp4. The blocks of the published Down matrices run along the neurons, so 32
//! consecutive neurons share the exponents of all their elements.
//!
//! ```text
//! neuron i of 32    quants: its d nibbles, as in any row
//!                   scales: the exponents of elements i·d/32 to (i + 1)·d/32 of all 32 neurons
//! ```
//!
//! A neuron's Down has as many bytes as any mxfp4 row and loses no bit, but the 32 neurons must be
//! summed together. That costs nothing if every neuron is needed.

use emberflow_kernels::{Cpu, DType, GROUP, QuantizeError, Row, mxfp4_group, mxfp4_scale};

/// Most tokens that share a decoded row.
const TOKENS: usize = 12;

/// Neurons that share exponents.
pub const NEURONS: usize = GROUP;

/// Longest vector.
pub(super) const MOST: usize = GROUP * ONES.len();

/// Exponents for which the values of a row are its doubled nibbles.
static ONES: [u8; 4096] = [128; 4096];

/// Encodes the vectors of 32 neurons, `rows [32 × d]`, and appends them as mxfp4 rows.
///
/// # Errors
/// [`QuantizeError::NotExact`] for an element without a common exponent for all 32.
pub fn encode(rows: &[f32], d: usize, out: &mut Vec<u8>) -> Result<(), QuantizeError> {
    let (dtype, of_row) = (DType::Mxfp4, DType::Mxfp4.row_bytes(d));
    let (quants, share) = (dtype.quants_bytes(d), d / NEURONS);
    let first = out.len();
    out.resize(first + NEURONS * of_row, 0);
    let out = &mut out[first..];
    for index in 0..d {
        let values: [f32; NEURONS] = std::array::from_fn(|i| rows[i * d + index]);
        let (e, nibbles) = mxfp4_group(&values).ok_or(QuantizeError::NotExact { index, dtype })?;
        out[index / share * of_row + quants + index % share] = e;
        let (group, place) = (index / GROUP, index % GROUP);
        let (byte, high) = (group * GROUP / 2 + place % (GROUP / 2), place / (GROUP / 2));
        for (i, nibble) in nibbles.into_iter().enumerate() {
            out[i * of_row + byte] |= nibble << (4 * high);
        }
    }
    Ok(())
}

/// Decodes the vectors of 32 neurons, `out [32 × d]`.
pub fn decode(cpu: Cpu, rows: &[Row<'_>], out: &mut [f32]) {
    let d = rows.first().map_or(1, |row| row.len());
    let mut scales = vec![0.0; d];
    fill_scales(rows, &mut scales);
    for (row, out) in rows.iter().zip(out.chunks_exact_mut(d)) {
        cpu.dequantize(doubled(*row), out);
        out.iter_mut().zip(&scales).for_each(|(v, s)| *v *= s);
    }
}

/// `out[t] = Σ_i factors[i × tokens + t] · row i` for whole groups of 32 rows; `out [tokens × d]`.
/// Products of a group are summed before the exponents are applied. `memory` has at least `2 · d`
/// floats; each further `d`, up to [`TOKENS`], lets one more token share a decoded row.
pub(crate) fn sum(
    cpu: Cpu,
    factors: &[f32],
    rows: &[Row<'_>],
    tokens: usize,
    memory: &mut [f32],
    out: &mut [f32],
) {
    out.fill(0.0);
    let Some(d) = rows.first().map(|row| row.len()) else {
        return;
    };
    let (scales, memory) = memory.split_at_mut(d);
    let tile = (memory.len() / d).min(TOKENS);
    let mut of_tile = [0.0; NEURONS * TOKENS];
    let groups = factors.chunks_exact(NEURONS * tokens);
    // An incomplete group has damaged neurons, which end the pass.
    for (factors, rows) in groups.zip(rows.chunks_exact(NEURONS)) {
        fill_scales(rows, scales);
        let rows: [Row<'_>; NEURONS] = std::array::from_fn(|i| doubled(rows[i]));
        for (first, out) in (0..tokens).step_by(tile).zip(out.chunks_mut(tile * d)) {
            let count = out.len() / d;
            let sums = &mut memory[..out.len()];
            let of_tile = &mut of_tile[..NEURONS * count];
            let of_rows = factors.chunks_exact(tokens);
            for (to, from) in of_tile.chunks_exact_mut(count).zip(of_rows) {
                to.copy_from_slice(&from[first..first + count]);
            }
            if count == 1 {
                cpu.sum_rows(of_tile, &rows, sums);
            } else {
                cpu.sum_rows_tokens(of_tile, &rows, count, sums);
            }
            let of_tokens = out.chunks_exact_mut(d).zip(sums.chunks_exact(d));
            for (out, sums) in of_tokens {
                for ((y, sum), scale) in out.iter_mut().zip(sums).zip(&*scales) {
                    *y += sum * scale;
                }
            }
        }
    }
}

/// A row with exponents replaced by 1: its doubled nibbles.
fn doubled(row: Row<'_>) -> Row<'_> {
    let ones = &ONES[..DType::Mxfp4.scales_bytes(row.len())];
    Row::split(DType::Mxfp4, row.len(), row.quants(), ones)
}

/// Scale factors of all elements, from each neuron's part of the exponents.
fn fill_scales(rows: &[Row<'_>], scales: &mut [f32]) {
    let exponents = rows.iter().flat_map(|row| row.scales());
    for (scale, &e) in scales.iter_mut().zip(exponents) {
        *scale = mxfp4_scale(e);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_across_neurons_come_back_and_are_summed() {
        let (d, cpu) = (96, Cpu::detect());
        let steps = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let value = |i: usize, c: usize| {
            let sign = if (i + c).is_multiple_of(3) { -1.0 } else { 1.0 };
            sign * steps[(i * 7 + c * 3) % 8] * ((c % 11) as f32 - 5.0).exp2()
        };
        let numbers: Vec<f32> = (0..2 * NEURONS * d)
            .map(|at| value(at / d, at % d))
            .collect();
        let mut bytes = Vec::new();
        for group in numbers.chunks_exact(NEURONS * d) {
            encode(group, d, &mut bytes).unwrap();
        }
        let row_bytes = DType::Mxfp4.row_bytes(d);
        let rows = bytes.chunks_exact(row_bytes);
        let rows: Vec<_> = rows.map(|row| Row::inline(DType::Mxfp4, d, row)).collect();
        let mut found = vec![f32::NAN; numbers.len()];
        let groups = rows.chunks_exact(NEURONS);
        for (rows, found) in groups.zip(found.chunks_exact_mut(NEURONS * d)) {
            decode(cpu, rows, found);
        }
        assert_eq!(found, numbers);

        let tokens = 3;
        let factors: Vec<f32> = (0..2 * NEURONS * tokens)
            .map(|i| i as f32 * 0.01 - 0.7)
            .collect();
        let (mut memory, mut out) = (vec![f32::NAN; 2 * d], vec![f32::NAN; tokens * d]);
        sum(cpu, &factors, &rows, tokens, &mut memory, &mut out);
        for (at, &sum) in out.iter().enumerate() {
            let (t, c) = (at / d, at % d);
            let exact = |i: usize| f64::from(factors[i * tokens + t]) * f64::from(value(i, c));
            let expected: f64 = (0..2 * NEURONS).map(exact).sum();
            assert!((f64::from(sum) - expected).abs() <= 1e-4 * (1.0 + expected.abs()));
        }
        // Every instruction set gives the same bits.
        for cpu in Cpu::all() {
            let mut again = vec![0.0; tokens * d];
            sum(cpu, &factors, &rows, tokens, &mut memory, &mut again);
            assert_eq!(again, out, "{}", cpu.name());
        }
        let inexact = vec![0.3; NEURONS * d];
        assert!(encode(&inexact, d, &mut Vec::new()).is_err());
    }
}
