//! Tokens for products in half precision, whose rows are f16.
//!
//! A token `x` becomes halves `x · 2⁻ᵉ`, where `2ᵉ ≤ max |x| < 2ᵉ⁺¹`, so that none is too large; what a product is to be
//! multiplied by, `2ᵉ`, lies behind them. A product with a row is, as [`dot`] computes it: groups of 32 elements in half
//! precision, and their sums in floats.

use half::f16;

/// Elements of a group.
const GROUP: usize = 32;

/// Bytes of what lies behind a token's halves.
const BEHIND: usize = 16;

/// Bytes of a token of `d` elements.
pub(super) fn token_bytes(d: usize) -> usize {
    2 * d.next_multiple_of(GROUP) + BEHIND
}

/// `2ᵉ` of a token's elements; 0 if all are, NaN if one is not finite.
fn scale(x: &[f32]) -> f32 {
    let most = x.iter().fold(0u32, |most, v| most.max(v.abs().to_bits()));
    match f32::from_bits(most) {
        0.0 => 0.0,
        most if !most.is_finite() => f32::NAN,
        // The exponent alone, of normal numbers.
        most => f32::from_bits(most.to_bits() & 0x7f80_0000).max(f32::MIN_POSITIVE),
    }
}

/// Replaces `to` by tokens of `d` elements.
pub(super) fn tokens(x: &[f32], d: usize, to: &mut Vec<u8>) {
    let (len, halves) = (token_bytes(d), d.next_multiple_of(GROUP));
    to.clear();
    to.resize(x.len() / d * len, 0);
    for (x, to) in x.chunks_exact(d).zip(to.chunks_exact_mut(len)) {
        let scale = scale(x);
        let by = match scale {
            0.0 => 0.0,
            scale => 1.0 / scale,
        };
        let (elements, behind) = to.split_at_mut(2 * halves);
        for (y, x) in elements.as_chunks_mut().0.iter_mut().zip(x) {
            *y = f16::from_f32(x * by).to_le_bytes();
        }
        behind[..4].copy_from_slice(&scale.to_le_bytes());
    }
}

/// The reference of the kernels: a row times a token.
#[cfg(test)]
pub(super) mod reference {
    use super::*;

    /// 2⁻⁴⁸, of which all products of halves are multiples.
    fn exact(x: f16) -> i128 {
        (x.to_f64() * 2f64.powi(24)) as i128
    }

    /// The nearest half of a multiple of 2⁻⁴⁸; of two that are equally near the even one.
    fn nearest(x: i128) -> f16 {
        let (size, sign) = (x.unsigned_abs(), x.signum() as f64);
        // 11 bits are left, but none below 2⁻²⁴.
        let cut = (128 - size.leading_zeros()).saturating_sub(11).max(24);
        let (kept, rest, middle) = (size >> cut, size & ((1 << cut) - 1), 1 << (cut - 1));
        let up = rest > middle || rest == middle && kept % 2 == 1;
        let value = (kept + u128::from(up)) as f64 * 2f64.powi(cut as i32 - 48);
        f16::from_f64(sign * value)
    }

    fn times_plus(a: f16, b: f16, c: f16) -> f16 {
        nearest(exact(a) * exact(b) + (exact(c) << 24))
    }

    fn plus(a: f16, b: f16) -> f16 {
        nearest((exact(a) + exact(b)) << 24)
    }

    /// See the module. Rows and tokens are finite.
    pub fn dot(row: &[f16], x: &[f32]) -> f32 {
        let mut token = Vec::new();
        tokens(x, x.len(), &mut token);
        let (halves, behind) = token.split_at(token.len() - BEHIND);
        let halves: Vec<f16> = (halves.as_chunks().0.iter())
            .map(|bits| f16::from_le_bytes(*bits))
            .collect();
        let scale = f32::from_le_bytes([behind[0], behind[1], behind[2], behind[3]]);
        let mut chains = [0.0f32; 16];
        for (s, x) in halves.chunks_exact(GROUP).enumerate() {
            let w = |i: usize| row.get(s * GROUP + i).copied().unwrap_or(f16::ZERO);
            let lane = |lane: usize| {
                let products = (0..4).map(|k| 8 * k + lane);
                products.fold(f16::ZERO, |sum, i| times_plus(w(i), x[i], sum))
            };
            let two = |i: usize| {
                let four = |i: usize| plus(lane(i), lane(i + 4));
                plus(four(i), four(i + 2)).to_f32()
            };
            let chain = &mut chains[s % 16];
            *chain = (two(0) + two(1)).mul_add(scale, *chain);
        }
        for width in [8, 4, 2, 1] {
            for j in 0..width {
                chains[j] += chains[j + width];
            }
        }
        chains[0]
    }

    #[test]
    fn halves_are_rounded_as_their_crate_does() {
        for bits in 0..=0x7bff {
            let x = f16::from_bits(bits);
            assert_eq!(nearest(exact(x) << 24), x);
        }
        for (x, expected) in [
            (1.0 + 1.0 / 2048.0, 1.0),
            (1.0 + 3.0 / 2048.0, 1.0 + 2.0 / 1024.0),
        ] {
            assert_eq!(f16::from_f32(x).to_f32(), expected);
            assert_eq!(
                nearest((f64::from(x) * 2f64.powi(48)) as i128).to_f32(),
                expected
            );
        }
    }

    #[test]
    fn products_are_near_those_of_floats() {
        let x: Vec<f32> = (0..100).map(|i| 1e30 * (0.3 * i as f32).sin()).collect();
        let row: Vec<f16> = (0..100)
            .map(|i| f16::from_f32(0.1 * (0.7 * i as f32).cos()))
            .collect();
        let exact: f64 = x
            .iter()
            .zip(&row)
            .map(|(x, w)| f64::from(*x) * w.to_f64())
            .sum();
        let found = f64::from(dot(&row, &x));
        assert!(
            (found - exact).abs() < 1e27 && found != exact,
            "{found}, {exact}"
        );
        assert_eq!(dot(&row[..3], &[0.0; 3]), 0.0);
    }
}
