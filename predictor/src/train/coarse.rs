//! Gate rows in two bits, rounded to minimise the change of their products with a text's inputs
//! (`rounding/`).

use emberflow_kernels::{TWO_BIT_GROUP, store_two_bit_row, two_bit_row_bytes};
use half::f16;

use crate::rounding::Levels;

/// Two bits per element and a scale per group.
pub(crate) const LEVELS: Levels = Levels {
    group: TWO_BIT_GROUP,
    scale: best_scale,
    nearest,
    bytes: two_bit_row_bytes,
    store: store_two_bit_row,
};

/// Candidates for a group's scale, in fractions of the scale that just reaches its largest element.
const SCALES: std::ops::RangeInclusive<u32> = 8..=21;

/// The quant nearest to `x`, and its value.
fn nearest(x: f32, scale: f32) -> (u8, f32) {
    if scale == 0.0 {
        return (1, 0.0);
    }
    // −3, −1, 1, 3 times the scale
    let quant = ((x / scale + 3.0) * 0.5).round().clamp(0.0, 3.0);
    (quant as u8, (2.0 * quant - 3.0) * scale)
}

/// The scale with the least squared error on `group`.
fn best_scale(group: &[f32]) -> f16 {
    let largest = group.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let error = |scale: f32| -> f32 {
        let square = |&x: &f32| (nearest(x, scale).1 - x).powi(2);
        group.iter().map(square).sum()
    };
    let candidates = SCALES.map(|k| f16::from_f32(largest / 3.0 * k as f32 / 20.0));
    candidates
        .min_by(|a, b| error(a.to_f32()).total_cmp(&error(b.to_f32())))
        .unwrap_or(f16::ZERO)
}

#[cfg(test)]
mod tests {
    use emberflow_kernels::{Compute, Row};

    use super::*;
    use crate::rounding::{Rows, round};

    #[test]
    fn values_that_two_bits_hold_stay_what_they_are() {
        let d = 70;
        let mut identity = vec![0.0; d * d];
        (0..d).for_each(|i| identity[i * d + i] = 1.0);
        let gate: Vec<f32> = (0..2 * d).map(|i| [-1.5, -0.5, 0.5, 1.5][i % 4]).collect();
        let on = Compute::new(1, None);
        let rows = round(&on, Rows { d, values: &gate }, &identity, &LEVELS);
        let mut wide = vec![0; 2 * emberflow_kernels::DType::Q4.row_bytes(d)];
        on.cpu.widen_two_bit(&rows, d, &mut wide);
        for (row, gate) in wide.chunks_exact(wide.len() / 2).zip(gate.chunks_exact(d)) {
            let mut values = vec![0.0; d];
            on.cpu.dequantize(
                Row::inline(emberflow_kernels::DType::Q4, d, row),
                &mut values,
            );
            for (value, gate) in values.iter().zip(gate) {
                assert!((value - gate).abs() < 1e-3, "{value} {gate}");
            }
        }
    }
}
