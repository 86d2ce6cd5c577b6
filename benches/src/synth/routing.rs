//! From target statistics of routing to parameters of the router.
//!
//! An expert's score is `b + z`: its own bias and a slowly changing standard normal process, as a
//! neuron's gate (`firing.rs`). Biases are normal, `b = κ·ξ`: κ determines how unevenly experts are
//! chosen, and the correlation of `z` between consecutive tokens how many are visited again. The
//! highest of many scores have no closed form, so both parameters are found by simulation.

use emberflow_models::config::{Mixture, Scoring};

use super::normal::quantile;
use super::random::word;
use emberflow::Failure;

/// Share of the routes that defines popularity.
pub const COVERED: f64 = 0.9;

/// Scores drawn to evaluate one pair of parameters.
const DRAWN: usize = 1 << 18;

/// Highest correlation, as for gates.
const MAX_CORRELATION: f64 = 0.995;

/// Steps of a search; all use the same random bits.
const STEPS: usize = 24;

/// Target statistics of routing.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct RoutingTargets {
    /// Share of a layer's experts that receives 90 % of its routes.
    pub popular: f64,
    /// Share of a token's experts that the next token visits again.
    pub reuse: f64,
}

/// Parameters of the router.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// Biases of a layer's experts, ascending.
    pub biases: Vec<f32>,
    /// Correlation of a score with that of the next token.
    pub correlation: f64,
    /// Mean sum of the squared weights of a token: power of a sum of experts relative to one.
    pub power: f64,
}

/// Routing statistics counted over consecutive tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingSeen {
    /// Visits by expert.
    visits: Vec<f64>,
    again: f64,
    /// Visits after a first token.
    followed: f64,
}

impl RoutingSeen {
    /// For a layer of `experts` experts.
    pub fn new(experts: usize) -> Self {
        Self {
            visits: vec![0.0; experts],
            again: 0.0,
            followed: 0.0,
        }
    }

    /// Counts the experts of a token and those shared with the token before it (empty for a first
    /// token).
    pub fn see(&mut self, before: &[u32], now: &[u32]) {
        for expert in now {
            if let Some(visits) = self.visits.get_mut(*expert as usize) {
                *visits += 1.0;
            }
        }
        if !before.is_empty() {
            self.followed += now.len() as f64;
            self.again += now.iter().filter(|e| before.contains(e)).count() as f64;
        }
    }

    /// Both numbers of [`RoutingTargets`].
    pub fn statistics(&self) -> RoutingTargets {
        RoutingTargets {
            popular: popular(&self.visits),
            reuse: self.again / self.followed.max(1.0),
        }
    }
}

/// Share of the experts that receives [`COVERED`] of the visits, with a fraction of the last
/// expert.
fn popular(visits: &[f64]) -> f64 {
    let mut falling = visits.to_vec();
    falling.sort_unstable_by(|a, b| b.total_cmp(a));
    let wanted = COVERED * falling.iter().sum::<f64>();
    let mut sum = 0.0;
    for (i, v) in falling.iter().enumerate() {
        if sum + v >= wanted {
            return (i as f64 + (wanted - sum) / v.max(1e-300)) / falling.len() as f64;
        }
        sum += v;
    }
    1.0
}

impl Routing {
    /// Solves for the targets in layers of `experts` experts, mixed as in `mixture`.
    ///
    /// # Errors
    /// If no parameters give the targets; names targets that are possible.
    pub fn solve(
        targets: RoutingTargets,
        experts: usize,
        mixture: &Mixture,
    ) -> Result<Self, Failure> {
        let chosen = mixture.chosen as usize;
        let RoutingTargets { popular, reuse } = targets;
        // The extreme: the same experts for every token.
        let least = COVERED * chosen as f64 / experts as f64;
        if !(popular > least * 1.05 && popular <= COVERED) {
            return Err(Failure::usage(format!(
                "--popular {popular}: with {chosen} of {experts} experts for a token, 90 % of the \
                 routes go to between {:.0} % and {:.0} % of the experts",
                105.0 * least,
                100.0 * COVERED
            )));
        }
        let draws = Draws::new(experts, chosen);
        let search = |low: f64, high: f64, f: &dyn Fn(f64) -> f64| {
            let (mut low, mut high) = (low, high);
            for _ in 0..STEPS {
                let middle = 0.5 * (low + high);
                if f(middle) < 0.0 {
                    low = middle
                } else {
                    high = middle
                }
            }
            0.5 * (low + high)
        };
        let spread = match popular {
            // All alike; simulated counts never quite are.
            p if p > COVERED - 0.005 => 0.0,
            _ => search(0.0, 6.0, &|s| popular - draws.routed(s, 0.0).popular),
        };
        let reused = |rho| draws.routed(spread, rho).reuse;
        let (low, high) = (reused(0.0), reused(MAX_CORRELATION));
        if !(low..=high).contains(&reuse) {
            return Err(Failure::usage(format!(
                "--reuse {reuse}: with this --popular it lies between {low:.2} (tokens \
                 independent) and {high:.2}"
            )));
        }
        let correlation = search(0.0, MAX_CORRELATION, &|rho| reused(rho) - reuse);
        let biases = draws.biases(spread);
        Ok(Self {
            power: draws.power(&biases, mixture),
            biases: biases.into_iter().map(|b| b as f32).collect(),
            correlation,
        })
    }
}

/// Random scores of pairs of tokens.
struct Draws {
    chosen: usize,
    /// Standard normal quantiles of the experts, ascending and evenly spaced in probability.
    places: Vec<f64>,
    /// Standard normal values, `[pairs × 2 × experts]`.
    normal: Vec<f32>,
}

impl Draws {
    fn new(experts: usize, chosen: usize) -> Self {
        let place = |i| quantile((i as f64 + 0.5) / experts as f64);
        let pairs = (DRAWN / (2 * experts)).max(64);
        let table: Vec<f32> = (0..4096)
            .map(|i| quantile((f64::from(i) + 0.5) / 4096.0) as f32)
            .collect();
        let draw = |i: usize| table[(word(0, i as u64) >> 52) as usize];
        Self {
            chosen,
            places: (0..experts).map(place).collect(),
            normal: (0..pairs * 2 * experts).map(draw).collect(),
        }
    }

    fn biases(&self, spread: f64) -> Vec<f64> {
        self.places.iter().map(|place| spread * place).collect()
    }

    fn routed(&self, spread: f64, rho: f64) -> RoutingTargets {
        let (biases, experts) = (self.biases(spread), self.places.len());
        let mut seen = RoutingSeen::new(experts);
        let fresh = (1.0 - rho * rho).sqrt();
        let mut scores = vec![0.0; experts];
        let [mut first, mut second] = [(); 2].map(|()| Vec::with_capacity(experts));
        for pair in self.normal.chunks_exact(2 * experts) {
            let (a, b) = pair.split_at(experts);
            for ((score, bias), z) in scores.iter_mut().zip(&biases).zip(a) {
                *score = bias + f64::from(*z);
            }
            highest(&scores, self.chosen, &mut first);
            for (i, score) in scores.iter_mut().enumerate() {
                *score = biases[i] + rho * f64::from(a[i]) + fresh * f64::from(b[i]);
            }
            highest(&scores, self.chosen, &mut second);
            seen.see(&[], &first);
            seen.see(&first, &second);
        }
        seen.statistics()
    }

    /// Mean sum of squared weights of a token's experts.
    fn power(&self, biases: &[f64], mixture: &Mixture) -> f64 {
        let experts = biases.len();
        let (mut sum, mut count) = (0.0, 0.0);
        let mut picked = Vec::with_capacity(experts);
        for z in self.normal.chunks_exact(experts) {
            let scores: Vec<f64> = biases
                .iter()
                .zip(z)
                .map(|(b, z)| b + f64::from(*z))
                .collect();
            highest(&scores, self.chosen, &mut picked);
            let sigmoid = mixture.scoring == Scoring::Sigmoid;
            let weight = |e: &u32| match scores[*e as usize] {
                score if sigmoid => 1.0 / (1.0 + (-score).exp()),
                score => score.exp(),
            };
            let whole: f64 = if mixture.renormalise {
                picked.iter().map(weight).sum()
            } else if sigmoid {
                1.0
            } else {
                scores.iter().map(|s| s.exp()).sum()
            };
            sum += picked
                .iter()
                .map(|e| (weight(e) / whole).powi(2))
                .sum::<f64>();
            count += 1.0;
        }
        sum / f64::max(count, 1.0)
    }
}

/// Writes the indices of the `chosen` highest scores to `out`.
fn highest(scores: &[f64], chosen: usize, out: &mut Vec<u32>) {
    out.clear();
    out.extend(0..scores.len() as u32);
    if chosen < out.len() {
        let score = |e: &u32| scores[*e as usize];
        out.select_nth_unstable_by(chosen, |a, b| score(b).total_cmp(&score(a)));
        out.truncate(chosen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mixture(chosen: u32) -> Mixture {
        Mixture {
            chosen,
            renormalise: true,
            ..Mixture::default()
        }
    }

    #[test]
    fn solutions_have_the_targets() {
        for (experts, chosen, popular, reuse) in [
            (128, 8, 65.0 / 128.0, 0.433),
            (64, 8, 0.7, 0.435),
            (8, 2, 0.9, 0.435),
            (8, 2, 0.7, 0.6),
            (128, 8, 0.9, 0.08),
        ] {
            let targets = RoutingTargets { popular, reuse };
            let r = Routing::solve(targets, experts, &mixture(chosen as u32)).unwrap();
            let spread = f64::from(r.biases[experts - 1]) / quantile(1.0 - 0.5 / experts as f64);
            let found = Draws::new(experts, chosen).routed(spread, r.correlation);
            assert!((found.popular / popular - 1.0).abs() < 0.03, "{found:?}");
            assert!((found.reuse / reuse - 1.0).abs() < 0.03, "{found:?}");
            assert!(r.power > 0.9 / chosen as f64 && r.power < 1.0, "{r:?}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_way_out() {
        for (popular, reuse, word) in [
            (0.05, 0.4, "between 6 % and 90 %"),
            (0.95, 0.4, "between 6 % and 90 %"),
            (0.5, 0.02, "lies between"),
        ] {
            let message = Routing::solve(RoutingTargets { popular, reuse }, 128, &mixture(8))
                .unwrap_err()
                .to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn popularity_is_counted_to_the_fraction_of_an_expert() {
        assert!((popular(&[1.0; 10]) - 0.9).abs() < 1e-12);
        assert!((popular(&[0.0, 9.0, 1.0, 0.0]) - 0.25).abs() < 1e-12);
    }
}
