//! The scale of a group that minimises the weighted rounding error.

use emberflow_kernels::DType;
use half::f16;

/// Candidates, in twentieths of the scale that exactly reaches the largest element.
const CANDIDATES: std::ops::RangeInclusive<u32> = 11..=21;

/// Adding and subtracting this rounds to the nearest integer, ties to even: fast on build targets
/// without a rounding instruction.
const ROUNDS: f32 = 12_582_912.0; // 1.5 · 2^23

/// Range of the integers that a block format multiplies by a scale (minus a minimum, in some
/// formats).
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    low: f32,
    high: f32,
}

impl Grid {
    /// The integers from `low` to `high`.
    pub const fn new(low: f32, high: f32) -> Self {
        Self { low, high }
    }

    /// Range of a grouped format; `None` for formats without scales.
    pub fn of(dtype: DType) -> Option<Self> {
        let (low, high) = match dtype {
            DType::Q4 => (-8.0, 7.0),
            DType::Q4k => (0.0, 15.0),
            DType::Q8 => (-127.0, 127.0),
            _ => return None,
        };
        Some(Self { low, high })
    }

    /// The integer nearest to `x / scale`, given `inverse` = `1 / scale`; 0 for scale 0, whose
    /// inverse is 0.
    pub fn nearest(self, x: f32, inverse: f32) -> f32 {
        let clamped = (x * inverse).clamp(self.low, self.high);
        (clamped + ROUNDS) - ROUNDS
    }

    /// Sum of the weighted squared errors of `group` with `scale`.
    fn error(self, group: &[f32], weights: &[f32], scale: f32) -> f32 {
        let inverse = inverse_of(scale);
        let mut sums = [0.0f32; 8];
        for (xs, ws) in group.chunks(8).zip(weights.chunks(8)) {
            for ((x, w), sum) in xs.iter().zip(ws).zip(&mut sums) {
                let e = self.nearest(*x, inverse) * scale - x;
                *sum += w * e * e;
            }
        }
        sums.iter().sum()
    }

    /// The f16 scale with the smallest weighted squared error on `group`.
    pub fn best_scale(self, group: &[f32], weights: &[f32]) -> f16 {
        let stored = |scale| f16::from_f32(scale).to_f32();
        f16::from_f32(self.best(group, weights, stored))
    }

    /// The scale with the smallest weighted squared error on `group`, of those that `stored` makes of candidates.
    pub fn best(self, group: &[f32], weights: &[f32], stored: impl Fn(f32) -> f32) -> f32 {
        let largest = group
            .iter()
            .fold(0.0f32, |m, &x| if x.abs() > m.abs() { x } else { m });
        let mut best = (f32::INFINITY, 0.0);
        let mut take = |scale: f32| {
            let scale = stored(scale);
            if scale.is_finite() {
                let error = self.error(group, weights, scale);
                if error < best.0 {
                    best = (error, scale);
                }
            }
        };
        // The largest element at the wide end of the range, then at the narrow end.
        for end in [self.low, self.high] {
            CANDIDATES.for_each(|k| take(largest / end * k as f32 / 20.0));
            if self.low == -self.high {
                break;
            }
        }
        best.1
    }
}

/// `1 / scale`, or 0 if that is not finite.
pub(super) fn inverse_of(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}
