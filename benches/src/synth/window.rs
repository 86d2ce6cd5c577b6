//! An attention pattern that depends on distance only: it averages the last tokens, so its output
//! changes slowly for any tokens.
//!
//! Query and key are constant vectors of length `a_j` in rotary pair j, the key rotated by `c θ_j`
//! against the query. The score at distance Δ is `Σ a_j² cos(θ_j (Δ − c)) / √head_dim`: highest at
//! `c`, and lower the more frequencies are out of phase. Omitting high frequencies widens the
//! window. A window that rises smoothly from the newest token changes more slowly than one of equal
//! width with a sharp edge there.

use super::normal::bisect;

/// A softmax weight decays about as Δ^−DECAY: fast enough that thousands of far tokens have no
/// weight. A larger exponent would make scores larger, and more sensitive to the residual stream's
/// changing norm.
const DECAY: f64 = 5.0;

/// Frequencies weaker than the strongest by this factor are omitted.
const NEGLIGIBLE: f64 = 1e-3;

/// Largest distance considered.
const REACH: usize = 4096;

/// Constant queries and keys, and the resulting average.
#[derive(Debug, Clone)]
pub struct Window {
    /// The query: (`a_j`, 0) in each rotary pair.
    pub query: Vec<f64>,
    /// The key: both elements of each rotary pair.
    pub key: Vec<[f64; 2]>,
    /// Σw² of the softmax weights: remaining share of a value's variance.
    pub energy: f64,
    /// Correlation of the average with that at the next token.
    pub correlation: f64,
    /// Tokens with 99.9 % of the weight; earlier averages are over fewer tokens and larger.
    pub warm_up: usize,
}

impl Window {
    /// The window whose average has this correlation, as nearly as the frequencies allow of heads with
    /// `dims` rotated elements, whose scores are divided by `divisor`.
    pub fn new(theta: f64, dims: usize, divisor: f64, correlation: f64) -> Self {
        let mut window = Self::of_unit(theta, dims, correlation);
        let amplitude = divisor.sqrt();
        window.query.iter_mut().for_each(|a| *a *= amplitude);
        window
            .key
            .iter_mut()
            .flatten()
            .for_each(|a| *a *= amplitude);
        window
    }

    /// The same, where scores are not divided.
    fn of_unit(theta: f64, head_dim: usize, correlation: f64) -> Self {
        let angles: Vec<f64> = (0..head_dim / 2)
            .map(|j| theta.powf(-2.0 * j as f64 / head_dim as f64))
            .collect();
        let per_e_fold = angles.len() as f64 / theta.ln();
        let strength = DECAY / per_e_fold;
        let narrowest = Self::with(&angles, strength, f64::INFINITY);
        if narrowest.correlation > correlation {
            let excess = |log: f64| Self::with(&angles, strength * log.exp(), f64::INFINITY);
            // Larger strengths are narrower.
            let log = bisect(0.0, 4.0, |log| correlation - excess(log).correlation);
            return excess(log);
        }
        let at = |log_cutoff: f64| Self::with(&angles, strength, (-log_cutoff).exp());
        // A lower cutoff is wider.
        at(bisect(-3.0, theta.ln(), |c| {
            at(c).correlation - correlation
        }))
    }

    /// All frequencies up to about `cutoff`, with equal strength.
    fn with(angles: &[f64], strength: f64, cutoff: f64) -> Self {
        let strengths: Vec<f64> = angles
            .iter()
            .map(|angle| (-(angle / cutoff).powi(2)).exp())
            .map(|s| if s < NEGLIGIBLE { 0.0 } else { strength * s })
            .collect();
        let square_sum = |(angle, s): (&f64, &f64)| s * angle * angle;
        let curvature: f64 = angles.iter().zip(&strengths).map(square_sum).sum();
        // Two deviations of the bell curve that the top of the pattern resembles.
        let centre = (2.0 / curvature.sqrt() - 1.0).max(0.0);
        let mut weights = Vec::new();
        for distance in 0..REACH {
            let from_centre = distance as f64 - centre;
            let score: f64 = angles
                .iter()
                .zip(&strengths)
                .map(|(angle, s)| s * ((angle * from_centre).cos() - 1.0))
                .sum();
            weights.push(score.exp());
            // Everything beyond is the tail of a fast decay.
            if score < -20.0 && from_centre > 0.0 {
                break;
            }
        }
        let total: f64 = weights.iter().sum();
        let square = weights.iter().map(|w| w * w).sum::<f64>();
        let next: f64 = weights.windows(2).map(|w| w[0] * w[1]).sum();
        let mut sum = 0.0;
        let warm_up = weights
            .iter()
            .position(|w| {
                sum += w;
                sum >= 0.999 * total
            })
            .unwrap_or(weights.len());
        let query: Vec<f64> = strengths.iter().map(|s| s.sqrt()).collect();
        let turned = |(angle, a): (&f64, &f64)| {
            let (sin, cos) = (angle * centre).sin_cos();
            [a * cos, a * sin]
        };
        Self {
            key: angles.iter().zip(&query).map(turned).collect(),
            query,
            energy: square / (total * total),
            correlation: next / square,
            warm_up: warm_up + 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_have_the_correlation() {
        for (theta, head_dim) in [(1e4, 64), (1e4, 128), (1e6, 128)] {
            for wanted in [0.1, 0.3, 0.8, 0.95, 0.99] {
                let w = Window::new(theta, head_dim, (head_dim as f64).sqrt(), wanted);
                assert!(
                    (w.correlation - wanted).abs() < 0.01,
                    "{theta} {wanted} {w:?}"
                );
                assert!(w.energy > 0.0 && w.energy <= 1.0);
                assert!(w.warm_up < 400, "{}", w.warm_up);
            }
        }
    }
}
