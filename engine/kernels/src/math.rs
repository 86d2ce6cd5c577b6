//! Scalar functions with a fixed operation order, the same on every machine.
//!
//! The slice kernels apply exactly these functions, so a value computed alone has the same bits as
//! one in a slice.

use std::f32::consts::{FRAC_1_SQRT_2, LOG2_E};

/// Adding this to a small f32 leaves its nearest integer in the low mantissa bits.
const ROUND: f32 = 12_582_912.0; // 1.5 × 2^23

// ln 2 in two parts, so that x − n·ln 2 keeps its low bits.
const LN2_HIGH: f32 = std::f32::consts::LN_2;
const LN2_LOW: f32 = (std::f64::consts::LN_2 - LN2_HIGH as f64) as f32;

// Outside this range the true result rounds to 0 or to infinity, and so does ours.
const EXP_MIN: f32 = -104.0;
const EXP_MAX: f32 = 89.0;

/// `e^x`, within one unit in the last place; subnormal results included, NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Comparisons that are false for NaN, so that NaN passes through.
    let x = if x < EXP_MIN { EXP_MIN } else { x };
    let x = if x > EXP_MAX { EXP_MAX } else { x };
    let (n, r) = reduced(x);
    let p = r.mul_add(taylor(r), 1.0);
    // 2^n in two normal factors: the second multiplication rounds once, even if the result is
    // subnormal or infinite.
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n - half)
}

/// `(n, r)` with `x = n·ln 2 + r` and `|r| ≤ ln 2 / 2`.
#[inline(always)]
fn reduced(x: f32) -> (i32, f32) {
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    (shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32, r)
}

/// `(e^r − 1) / r`: the Taylor polynomial of degree 6, whose remainder for `|r| ≤ ln 2 / 2` is below a
/// tenth of a unit in the last place of `e^r`.
#[inline(always)]
fn taylor(r: f32) -> f32 {
    let p = 1.0 / 5040.0;
    let p = r.mul_add(p, 1.0 / 720.0);
    let p = r.mul_add(p, 1.0 / 120.0);
    let p = r.mul_add(p, 1.0 / 24.0);
    let p = r.mul_add(p, 1.0 / 6.0);
    let p = r.mul_add(p, 0.5);
    r.mul_add(p, 1.0)
}

/// `tanh x`, within a few units in the last place; NaN stays NaN.
///
/// `tanh |x| = m / (m + 2)` with `m = e^2|x| − 1`.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    /// From here on the result is 1.
    const ONE: f32 = 20.0;
    let y = 2.0 * x.abs();
    let m = exp_m1(if y > ONE { ONE } else { y });
    (m / (m + 2.0)).copysign(x)
}

/// `e^x − 1` for `x` from −80 to 80: `2^n·(e^r − 1) + (2^n − 1)`, which cancels nothing where `x` is small.
#[inline(always)]
fn exp_m1(x: f32) -> f32 {
    let (n, r) = reduced(x);
    let scale = power_of_two(n);
    (r * taylor(r)).mul_add(scale, scale - 1.0)
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `x / (1 + e^−x)`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `x · Φ(x)` with the error function: Hugging Face's `gelu`.
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + libm::erff(x * FRAC_1_SQRT_2))
}

/// The tanh form of GELU: Hugging Face's `gelu_pytorch_tanh`.
///
/// `0.5·x·(1 + tanh u)` equals `x / (1 + e^−2u)`, which needs one exponential and avoids
/// cancellation near `tanh u` = −1.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    const SQRT_8_OVER_PI: f32 = 1.595_769; // 2 · sqrt(2 / π)
    let cubic = (0.044715 * x * x).mul_add(x, x);
    x / (1.0 + exp(-SQRT_8_OVER_PI * cubic))
}

/// Parameters of [`xielu`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Xielu {
    /// Factor of the square of positive values.
    pub positive: f32,
    /// Factor of the exponential part of others.
    pub negative: f32,
    /// Factor of the linear part.
    pub beta: f32,
    /// Largest exponent.
    pub eps: f32,
}

/// xIELU (arXiv 2411.13010): `positive · x² + beta · x` above 0, `negative · (e^min(x, eps) − 1 − x) + beta · x`
/// elsewhere; NaN stays NaN.
#[inline(always)]
pub fn xielu(x: f32, of: Xielu) -> f32 {
    /// Below, `e^x − 1` is −1.
    const MINUS_ONE: f32 = -20.0;
    let square = of.positive * x * x;
    let exponent = if x > of.eps { of.eps } else { x };
    let exponent = if exponent < MINUS_ONE {
        MINUS_ONE
    } else {
        exponent
    };
    let curved = (exp_m1(exponent) - x) * of.negative;
    let part = if x > 0.0 { square } else { curved };
    part + of.beta * x
}

/// Index of the largest value, the first one of equals; skips NaN. `None` without a value.
pub fn argmax(x: &[f32]) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (i, &value) in x.iter().enumerate() {
        if !value.is_nan() && best.is_none_or(|(_, largest)| value > largest) {
            best = Some((i, value));
        }
    }
    best.map(|(i, _)| i)
}

/// An f16 as f32, exact; NaN stays NaN.
#[inline(always)]
pub(crate) fn f16_to_f32(half: u16) -> f32 {
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23); // 2^112, 127 - 15 = 112
    let sign = u32::from(half & 0x8000) << 16;
    let rest = u32::from(half & 0x7fff) << 13;
    // Also correct for subnormals: the multiplication normalises them, exactly.
    let finite = (f32::from_bits(rest) * REBIAS).to_bits();
    let special = rest | 0x7f80_0000;
    let magnitude = if half & 0x7c00 == 0x7c00 {
        special
    } else {
        finite
    };
    f32::from_bits(sign | magnitude)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_conversion_is_exact() {
        for bits in 0..=u16::MAX {
            let (got, expected) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32_const());
            assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan());
        }
    }
}
