//! Threshold calibration.
//!
//! For each neuron, a logistic curve fitted on a text maps the score to the probability that the
//! gate fires. A single probability per layer then decides for all its neurons. So a poor score
//! automatically gets a wider margin, and a rarely firing neuron needs a higher score.

use emberflow_kernels::math;

/// Newton steps. Four give three digits; separable data would never converge.
const STEPS: usize = 12;

/// Histogram of a neuron's scores in steps of an eighth of their standard deviation, up to eight
/// deviations from the mean: as good as the scores for fitting two parameters, and far smaller.
struct Bins {
    /// [tokens, tokens for which the gate fires] per bin.
    counts: [[f32; 2]; 128],
}

impl Bins {
    fn count(scores: &[f32], mean: f32, deviation: f32, fires: impl Fn(usize) -> bool) -> Self {
        let mut counts = [[0.0; 2]; 128];
        for (i, score) in scores.iter().enumerate() {
            let at = ((score - mean) / deviation * 8.0 + 64.0).clamp(0.0, 127.0);
            let bin = &mut counts[at as usize];
            bin[0] += 1.0;
            bin[1] += f32::from(u8::from(fires(i)));
        }
        Self { counts }
    }

    /// (Standardised score, tokens, tokens for which the gate fires) of each bin.
    fn iter(&self) -> impl Iterator<Item = (f32, f32, f32)> + '_ {
        let middle = |i: usize| (i as f32 + 0.5 - 64.0) / 8.0;
        let bins = self.counts.iter().enumerate();
        bins.filter(|(_, bin)| bin[0] > 0.0)
            .map(move |(i, bin)| (middle(i), bin[0], bin[1]))
    }
}

/// A neuron's curve: `logit(score) = slope × (score − mean) / deviation + offset`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Curve {
    mean: f32,
    deviation: f32,
    slope: f32,
    offset: f32,
}

impl Curve {
    /// Fits a neuron's scores to `fires`.
    pub fn fit(scores: &[f32], fires: impl Fn(usize) -> bool) -> Self {
        let n = scores.len().max(1) as f64;
        let mean = scores.iter().map(|&s| f64::from(s)).sum::<f64>() / n;
        let square = |s: &f32| (f64::from(*s) - mean).powi(2);
        let deviation = (scores.iter().map(square).sum::<f64>() / n)
            .sqrt()
            .max(1e-20);
        let (mean, deviation) = (mean as f32, deviation as f32);
        let bins = Bins::count(scores, mean, deviation, fires);
        let (mut slope, mut offset) = (1.0f32, 0.0f32);
        for _ in 0..STEPS {
            let mut g = [0.0f64; 2];
            let mut h = [0.0f64; 3];
            for (s, count, fired) in bins.iter() {
                let p = 1.0 / (1.0 + math::exp(-(slope * s + offset)));
                let error = p * count - fired;
                let weight = (p * (1.0 - p)).max(1e-9) * count;
                g[0] += f64::from(error * s);
                g[1] += f64::from(error);
                h[0] += f64::from(weight * s * s);
                h[1] += f64::from(weight * s);
                h[2] += f64::from(weight);
            }
            // A weak prior of slope 1 keeps neurons that never fire finite.
            let pull = 1e-4 * n;
            g[0] += pull * f64::from(slope - 1.0);
            h[0] += pull;
            h[2] += 1e-6 * n;
            let det = h[0] * h[2] - h[1] * h[1];
            if det <= 0.0 {
                break;
            }
            let step = [
                (h[2] * g[0] - h[1] * g[1]) / det,
                (h[0] * g[1] - h[1] * g[0]) / det,
            ];
            slope = (slope - step[0].clamp(-1.0, 1.0) as f32).max(0.05);
            offset -= step[1].clamp(-2.0, 2.0) as f32;
            if step[0].abs() + step[1].abs() < 1e-3 {
                break;
            }
        }
        Self {
            mean,
            deviation,
            slope,
            offset,
        }
    }

    /// The logit of the probability that the neuron fires.
    pub fn logit(&self, score: f32) -> f32 {
        self.slope * (score - self.mean) / self.deviation + self.offset
    }

    /// The score whose logit is `logit`.
    pub fn score(&self, logit: f32) -> f32 {
        self.mean + self.deviation * (logit - self.offset) / self.slope
    }
}

/// The largest value such that at least a `recall` share of `values` reaches it; −∞ if empty.
pub(crate) fn cut_for(values: &mut [f32], recall: f64) -> f32 {
    let lost = ((1.0 - recall) * values.len() as f64).floor() as usize;
    let at = lost.min(values.len().saturating_sub(1));
    match values.get(at) {
        None => f32::NEG_INFINITY,
        Some(_) => *values.select_nth_unstable_by(at, f32::total_cmp).1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_keeps_the_recall_that_is_asked_for() {
        let mut values: Vec<f32> = (0..100).map(|v| v as f32).collect();
        assert_eq!(cut_for(&mut values, 0.98), 2.0);
        assert_eq!(cut_for(&mut values, 1.0), 0.0);
        assert_eq!(cut_for(&mut [3.0], 0.5), 3.0);
        assert_eq!(cut_for(&mut [], 0.98), f32::NEG_INFINITY);
    }

    #[test]
    fn a_curve_finds_where_a_neuron_begins_to_fire() {
        // Fires above 5, with score errors of up to 1.
        let truth: Vec<f32> = (0..1000).map(|i| (i % 100) as f32 / 10.0).collect();
        let noise = |i: usize| ((i * 7919) % 1000) as f32 / 500.0 - 1.0;
        let scores: Vec<f32> = truth
            .iter()
            .enumerate()
            .map(|(i, t)| t + noise(i))
            .collect();
        let curve = Curve::fit(&scores, |i| truth[i] > 5.0);
        assert!((curve.score(0.0) - 5.0).abs() < 0.2, "{curve:?}");
        assert!((curve.logit(curve.score(1.5)) - 1.5).abs() < 1e-3);
        let never = Curve::fit(&scores, |_| false);
        assert!(never.score(0.0).is_finite() && never.score(0.0) > 9.0);
    }
}
