//! Gate rows in two or three bits, rounded to minimise the change of their products with a text's
//! inputs (`rounding/`).

use emberflow_kernels::{NARROW_GROUP, Narrow};
use half::f16;

use crate::rounding::Levels;

/// Format with `narrow` bits per element and a scale per group.
pub(crate) const fn levels(narrow: Narrow) -> Levels {
    match narrow {
        Narrow::Two => Levels {
            group: NARROW_GROUP,
            scale: best_scale::<3>,
            nearest: nearest::<3>,
            bytes: |n| Narrow::Two.row_bytes(n),
            store: |quants, scales, out| Narrow::Two.store(quants, scales, out),
        },
        Narrow::Three => Levels {
            group: NARROW_GROUP,
            scale: best_scale::<7>,
            nearest: nearest::<7>,
            bytes: |n| Narrow::Three.row_bytes(n),
            store: |quants, scales, out| Narrow::Three.store(quants, scales, out),
        },
    }
}

/// Candidates for a group's scale, in fractions of the scale that exactly reaches its largest
/// element.
const SCALES: std::ops::RangeInclusive<u32> = 8..=21;

/// The quant from 0 to `MOST` nearest to `x`, and its value.
fn nearest<const MOST: u8>(x: f32, scale: f32) -> (u8, f32) {
    if scale == 0.0 {
        return (MOST / 2, 0.0);
    }
    // Values are odd multiples of the scale.
    let most = f32::from(MOST);
    let quant = ((x / scale + most) * 0.5).round().clamp(0.0, most);
    (quant as u8, (2.0 * quant - most) * scale)
}

/// The scale with the least squared error on `group`.
fn best_scale<const MOST: u8>(group: &[f32]) -> f16 {
    let largest = group.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let error = |scale: f32| -> f32 {
        let square = |&x: &f32| (nearest::<MOST>(x, scale).1 - x).powi(2);
        group.iter().map(square).sum()
    };
    let candidates = SCALES.map(|k| f16::from_f32(largest / f32::from(MOST) * k as f32 / 20.0));
    candidates
        .min_by(|a, b| error(a.to_f32()).total_cmp(&error(b.to_f32())))
        .unwrap_or(f16::ZERO)
}

#[cfg(test)]
mod tests {
    use emberflow_kernels::{Compute, DType, Row};

    use super::*;
    use crate::rounding::{Rows, round};

    #[test]
    fn values_that_few_bits_hold_stay_what_they_are() {
        let d = 70;
        let mut identity = vec![0.0; d * d];
        (0..d).for_each(|i| identity[i * d + i] = 1.0);
        let on = Compute::new(1, None);
        for narrow in [Narrow::Two, Narrow::Three] {
            let most = usize::from(narrow.most());
            let value = |i: usize| 0.5 * (2 * (i % (most + 1))) as f32 - 0.5 * most as f32;
            let gate: Vec<f32> = (0..2 * d).map(value).collect();
            let rows = Rows { d, values: &gate };
            let rows = round(&on, rows, &identity, &levels(narrow));
            let mut wide = vec![0; 2 * DType::Q4.row_bytes(d)];
            on.cpu.widen(narrow, &rows, d, &mut wide);
            for (row, gate) in wide.chunks_exact(wide.len() / 2).zip(gate.chunks_exact(d)) {
                let mut values = vec![0.0; d];
                (on.cpu).dequantize(Row::inline(DType::Q4, d, row), &mut values);
                for (value, gate) in values.iter().zip(gate) {
                    assert!((value - gate).abs() < 1e-3, "{value} {gate}");
                }
            }
        }
    }
}
