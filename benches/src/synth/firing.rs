//! From target statistics to parameters of the gates.
//!
//! A neuron's gate is `b + z`: its own bias, and a slowly changing standard normal process. It
//! fires with probability Φ(b). Biases are normal over neurons, `b = μ + κ·ξ`: μ determines the
//! mean share, κ the skew, and the correlation of `z` between consecutive tokens the persistence.

use std::str::FromStr;

use super::normal::{bisect, both_above, cdf, quantile};
use super::routing::RoutingTargets;
use emberflow::Failure;
use emberflow::profile::published::CURVES;
use emberflow::suggest::did_you_mean;

/// Probability that the up projection of a dReLU neuron is positive: Gate, Up and Down of a neuron
/// are co-active in 80 % of cases (PowerInfer-2).
pub const UP_POSITIVE: f64 = 0.8;

/// Points at which the distribution over neurons is evaluated.
const GRID: usize = 2048;

/// A published activation curve: the share of a layer's neurons that makes 80 % of its activations.
/// On the command line, a name or a number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Skew(pub f64);

impl FromStr for Skew {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((_, share)) = CURVES.iter().find(|(name, _)| *name == text) {
            return Ok(Self(*share));
        }
        match text.parse() {
            Ok(share) if share > 0.0 && share <= 0.8 => Ok(Self(share)),
            _ => Err(format!(
                "{text:?} is no curve; curves: {}; or the share of neurons that gives 80 % of \
                 activations, above 0 and at most 0.8{}",
                CURVES.map(|(name, _)| name).join(", "),
                did_you_mean(text, CURVES.map(|(name, _)| name))
            )),
        }
    }
}

/// Target statistics of the activations.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Targets {
    /// Mean share of neurons that fire per token.
    pub active: f64,
    /// Share of a layer's neurons that makes 80 % of its activations.
    pub hot_share: f64,
    /// Probability that a neuron that fires for a token fires again for the next.
    pub persistence: f64,
    /// Target statistics of routing, in a model with experts.
    #[serde(flatten)]
    pub routing: Option<RoutingTargets>,
}

/// Parameters of the gates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Firing {
    /// Mean μ of the gates' biases.
    mean: f64,
    /// Standard deviation κ of the biases.
    spread: f64,
    /// Bias of the up projections: above 0 for dReLU, where a neuron fires if both are positive.
    pub up_bias: f64,
    /// Correlation of a gate's `z` with that of the next token.
    pub correlation: f64,
}

impl Firing {
    /// Solves for the targets. `relu_on_up`: a neuron fires if gate and up are positive, not only
    /// the gate.
    ///
    /// # Errors
    /// If no parameters give the targets; names targets that are possible.
    pub fn solve(targets: &Targets, relu_on_up: bool) -> Result<Self, Failure> {
        let Targets {
            active, hot_share, ..
        } = *targets;
        let gate_active = if relu_on_up {
            active / UP_POSITIVE
        } else {
            active
        };
        if !(gate_active > 0.0 && gate_active < 1.0) {
            return Err(Failure::usage(format!(
                "--active {active}: expected above 0 and below {}",
                if relu_on_up { UP_POSITIVE } else { 1.0 }
            )));
        }
        // The extreme: all activations from neurons that always fire.
        let least = 0.8 * gate_active;
        if hot_share <= least * 1.05 {
            return Err(Failure::usage(format!(
                "--skew {hot_share} with --active {active}: 80 % of activations cannot come from \
                 less than {:.0} % of the neurons; take a lower --active or a flatter --skew",
                105.0 * least
            )));
        }
        let with_spread = |spread: f64| Self {
            mean: quantile(gate_active) * (1.0 + spread * spread).sqrt(),
            spread,
            up_bias: if relu_on_up {
                quantile(UP_POSITIVE)
            } else {
                0.0
            },
            correlation: 0.0,
        };
        let places = places(GRID);
        // Deviation 0 gives 0.8; larger ones give less.
        let spread = match hot_share {
            share if share > 0.799 => 0.0,
            share => bisect(0.0, 8.0, |s| share - with_spread(s).hot_share(&places)),
        };
        let mut firing = with_spread(spread);
        let persistence = |rho| firing.persistence(&places, rho);
        let (low, high) = (persistence(0.0), persistence(MAX_CORRELATION));
        if !(low..=high).contains(&targets.persistence) {
            return Err(Failure::usage(format!(
                "--persistence {}: with this --active and --skew it lies between {low:.2} \
                 (tokens independent) and {high:.2}",
                targets.persistence
            )));
        }
        firing.correlation = bisect(0.0, MAX_CORRELATION, |rho| {
            persistence(rho) - targets.persistence
        });
        Ok(firing)
    }

    /// Lowers the correlation to `most`; returns the persistence that it gives.
    pub fn loosen(&mut self, most: f64) -> f64 {
        self.correlation = self.correlation.min(most);
        self.persistence(&places(GRID), self.correlation)
    }

    /// Biases of `neurons` gates, ascending.
    pub fn biases(&self, neurons: usize) -> Vec<f64> {
        let at = |place: f64| self.bias(place);
        places(neurons).into_iter().map(at).collect()
    }

    /// How often each of `neurons` neurons fires, most often first.
    pub fn frequencies(&self, neurons: usize) -> Vec<f32> {
        let up = match self.up_bias {
            0.0 => 1.0,
            up => cdf(up),
        };
        let often = |bias: f64| (up * cdf(bias)) as f32;
        self.biases(neurons).into_iter().rev().map(often).collect()
    }

    fn bias(&self, place: f64) -> f64 {
        self.mean + self.spread * place
    }

    /// Mean and deviation of a gate over neurons and tokens.
    pub fn gate(&self) -> (f64, f64) {
        (self.mean, (1.0 + self.spread * self.spread).sqrt())
    }

    fn hot_share(&self, places: &[f64]) -> f64 {
        let p: Vec<f64> = places.iter().map(|x| cdf(self.bias(*x))).collect();
        let wanted = 0.8 * p.iter().sum::<f64>();
        let mut sum = 0.0;
        // Hottest first, with a fraction of the last neuron.
        for (i, p) in p.iter().rev().enumerate() {
            if sum + p >= wanted {
                return (i as f64 + (wanted - sum) / p) / places.len() as f64;
            }
            sum += p;
        }
        1.0
    }

    fn persistence(&self, places: &[f64], rho: f64) -> f64 {
        let (mut twice, mut once) = (0.0, 0.0);
        // Smooth in the place, so few points suffice.
        for place in places.iter().skip(4).step_by(8) {
            let b = self.bias(*place);
            twice += both_above(b, rho);
            once += cdf(b);
        }
        match self.up_bias {
            0.0 => twice / once,
            up => twice / once * both_above(up, rho) / cdf(up),
        }
    }
}

/// Standard normal quantiles of `count` neurons, ascending and evenly spaced in probability.
fn places(count: usize) -> Vec<f64> {
    let place = |i| quantile((i as f64 + 0.5) / count as f64);
    (0..count).map(place).collect()
}

/// Highest correlation: beyond it a run of any length sees a single context.
const MAX_CORRELATION: f64 = 0.995;

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(active: f64, hot_share: f64, persistence: f64) -> Targets {
        Targets {
            active,
            hot_share,
            persistence,
            routing: None,
        }
    }

    #[test]
    fn solutions_have_the_targets() {
        for t in [
            targets(0.1, 0.26, 0.83),
            targets(0.15, 0.67, 0.83),
            targets(0.33, 0.43, 0.7),
            targets(0.5, 0.69, 0.9),
            targets(0.1, 0.8, 0.5),
        ] {
            for relu_on_up in [false, true] {
                let f = Firing::solve(&t, relu_on_up).unwrap();
                let up = if relu_on_up { cdf(f.up_bias) } else { 1.0 };
                let active = f.biases(GRID).into_iter().map(cdf).sum::<f64>() / GRID as f64 * up;
                assert!((active - t.active).abs() < 2e-3, "{t:?}: {active}");
                assert!(
                    (f.hot_share(&places(GRID)) - t.hot_share).abs() < 2e-3,
                    "{t:?}"
                );
                let p = f.persistence(&places(GRID), f.correlation);
                assert!((p - t.persistence).abs() < 1e-3, "{t:?}: {p}");
            }
        }
    }

    #[test]
    fn bamboo_curve_is_the_one_it_is_named_after() {
        let share = "bamboo".parse::<Skew>().unwrap().0;
        let f = Firing::solve(&targets(0.15, share, 0.83), false).unwrap();
        let rare = |b: f64| (1.0 - cdf(b)).powi(128);
        let untouched = f.biases(GRID).into_iter().map(rare).sum::<f64>() / GRID as f64;
        assert!((0.5e-4..2e-4).contains(&untouched), "{untouched}");
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_way_out() {
        for (t, word) in [
            (targets(0.4, 0.26, 0.83), "lower --active"),
            (targets(0.1, 0.43, 0.05), "lies between"),
            (targets(1.5, 0.43, 0.8), "below 1"),
        ] {
            let message = Firing::solve(&t, false).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }
}
