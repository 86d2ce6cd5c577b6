//! The normal distribution: pre-activations of a random network follow it.

/// Φ(x), the probability that a standard normal variable is below `x`.
pub fn cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x / std::f64::consts::SQRT_2)
}

/// φ(x), the density.
pub fn density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// Φ⁻¹(p) for `p` in (0, 1).
pub fn quantile(p: f64) -> f64 {
    bisect(-9.0, 9.0, |x| cdf(x) - p)
}

/// Probability that two standard normal variables with correlation `rho` (0 to 1) are both above
/// `-b`: a neuron with bias `b` fires twice.
pub fn both_above(b: f64, rho: f64) -> f64 {
    // Its derivative by ρ is the bivariate density at (-b, -b); ρ = sin θ removes the singularity
    // at 1. Simpson's rule on a smooth function.
    const STEPS: usize = 64;
    let end = rho.clamp(0.0, 1.0).asin();
    let f = |theta: f64| (-b * b / (1.0 + theta.sin())).exp();
    let h = end / STEPS as f64;
    let sum: f64 = (0..=STEPS)
        .map(|i| {
            let weight = match i {
                0 | STEPS => 1.0,
                i if i % 2 == 1 => 4.0,
                _ => 2.0,
            };
            weight * f(h * i as f64)
        })
        .sum();
    cdf(b).powi(2) + sum * h / 3.0 / (2.0 * std::f64::consts::PI)
}

/// E[f(g)] for g ~ N(mean, deviation²).
pub fn expect(mean: f64, deviation: f64, f: impl Fn(f64) -> f64) -> f64 {
    const STEPS: i32 = 400;
    const REACH: f64 = 8.0;
    let h = REACH / f64::from(STEPS);
    (-STEPS..=STEPS)
        .map(|i| f64::from(i) * h)
        .map(|z| h * density(z) * f(mean + deviation * z))
        .sum()
}

/// Root of the increasing function `f` between `low` and `high`; the nearer end if the sign does
/// not change.
pub fn bisect(mut low: f64, mut high: f64, f: impl Fn(f64) -> f64) -> f64 {
    for _ in 0..80 {
        let middle = 0.5 * (low + high);
        if f(middle) < 0.0 {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert!((cdf(1.0) - 0.841_344_746).abs() < 1e-9);
        assert!((quantile(0.9) - 1.281_551_566).abs() < 1e-8);
        // Sheppard: at 0 the probability is 1/4 + asin(ρ)/2π.
        for rho in [0.0, 0.5, 0.95, 1.0f64] {
            let exact = 0.25 + rho.asin() / std::f64::consts::TAU;
            assert!((both_above(0.0, rho) - exact).abs() < 1e-9, "{rho}");
        }
        // Fully correlated: firing twice is firing once.
        assert!((both_above(-1.5, 1.0) - cdf(-1.5)).abs() < 1e-6);
        // E[max(g, 0)²] = (μ² + 1)Φ(μ) + μφ(μ) for unit variance.
        let mu = -0.7f64;
        let exact = (mu * mu + 1.0) * cdf(mu) + mu * density(mu);
        assert!((expect(mu, 1.0, |g| g.max(0.0).powi(2)) - exact).abs() < 1e-4);
    }
}
