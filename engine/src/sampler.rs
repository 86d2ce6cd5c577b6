//! Sampling: greedy, or temperature with top-k, top-p, min-p and a repetition penalty.
//! Deterministic: the same logits and seed give the same token.

mod filters;

use std::fmt;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Serialize, Serializer};

use std::sync::Arc;

use emberflow_models::TextRules;

use crate::constraint::Constraint;
use filters::{drop_likely, keep_typical, keep_within_sigma, sort_descending};

/// Sampling parameters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sampling {
    /// Softmax temperature; 0 = greedy.
    #[serde(serialize_with = "as_written")]
    pub temperature: f32,
    /// Keep only the `k` most likely tokens; 0 = all.
    pub top_k: usize,
    /// Keep the smallest set of most likely tokens with at least this probability mass (nucleus); 1
    /// = all, 0 = the most likely one.
    #[serde(serialize_with = "as_written")]
    pub top_p: f32,
    /// Drop tokens whose probability is below this share of the largest; 0 = none.
    #[serde(serialize_with = "as_written")]
    pub min_p: f32,
    /// Keep the tokens whose surprise is closest to its mean (the entropy) up to this probability
    /// mass; 1 = all. Applied after the filters above (locally typical sampling, arXiv 2202.00666).
    pub typical_p: f32,
    /// Drop tokens whose logit is more than this many standard deviations below the largest
    /// (top-nσ, arXiv 2411.07641); 0 or less = none.
    pub top_n_sigma: f32,
    /// With this probability, drop all tokens of at least probability `xtc_threshold` except the least
    /// likely of them (exclude top choices); 0 = never. Applied after all other filters.
    pub xtc_probability: f32,
    /// Probability threshold of XTC; above 0.5 it has no effect.
    pub xtc_threshold: f32,
    /// Divide positive and multiply negative logits of recent tokens by this; 1 = off.
    #[serde(serialize_with = "as_written")]
    pub repetition_penalty: f32,
    /// Number of recent tokens to which `repetition_penalty` applies.
    pub penalty_window: usize,
    /// Subtract this from the logits of tokens generated before; 0 = off.
    #[serde(serialize_with = "as_written")]
    pub presence_penalty: f32,
    /// Subtract this from a token's logit for each time it was generated; 0 = off.
    #[serde(serialize_with = "as_written")]
    pub frequency_penalty: f32,
    /// Seed of the random number generator.
    pub seed: u64,
}

/// Writes 0.7 as 0.7 and not as the f64 value of its f32, 0.699999988.
fn as_written<S: Serializer>(value: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    let shortest = value.to_string().parse::<f64>();
    serializer.serialize_f64(shortest.unwrap_or(f64::from(*value)))
}

impl Default for Sampling {
    /// Greedy.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            top_n_sigma: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            repetition_penalty: 1.0,
            penalty_window: PENALTY_WINDOW,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl fmt::Display for Sampling {
    /// The parameters that differ from greedy sampling, as text.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let off = Self::default();
        match self.temperature {
            0.0 => f.write_str("greedy")?,
            t => write!(f, "temperature {t}")?,
        }
        let draws = self.temperature > 0.0;
        if draws && self.top_k != off.top_k {
            write!(f, ", top-k {}", self.top_k)?;
        }
        for (name, value, off) in [
            ("top-p", self.top_p, off.top_p),
            ("min-p", self.min_p, off.min_p),
        ] {
            if draws && value != off {
                write!(f, ", {name} {value}")?;
            }
        }
        for (name, value, off) in [
            (
                "repetition penalty",
                self.repetition_penalty,
                off.repetition_penalty,
            ),
            (
                "presence penalty",
                self.presence_penalty,
                off.presence_penalty,
            ),
            (
                "frequency penalty",
                self.frequency_penalty,
                off.frequency_penalty,
            ),
        ] {
            if value != off {
                write!(f, ", {name} {value}")?;
            }
        }
        if draws {
            write!(f, ", seed {}", self.seed)?;
        }
        Ok(())
    }
}

/// An invalid sampling parameter.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{what} is {value}, expected {expected}")]
pub struct BadSampling {
    /// Name of the parameter.
    pub what: &'static str,
    /// Its value.
    pub value: f32,
    /// Valid range.
    pub expected: &'static str,
}

impl Sampling {
    /// Validates the parameters.
    ///
    /// # Errors
    /// The first invalid one.
    pub fn validate(&self) -> Result<(), BadSampling> {
        let check = |ok: bool, what, value, expected| {
            if ok {
                Ok(())
            } else {
                Err(BadSampling {
                    what,
                    value,
                    expected,
                })
            }
        };
        let t = self.temperature;
        check(t.is_finite() && t >= 0.0, "temperature", t, "0 or more")?;
        let p = self.top_p;
        check((0.0..=1.0).contains(&p), "top-p", p, "between 0 and 1")?;
        let m = self.min_p;
        check((0.0..=1.0).contains(&m), "min-p", m, "between 0 and 1")?;
        let p = self.typical_p;
        check(p > 0.0 && p <= 1.0, "typical-p", p, "above 0 and at most 1")?;
        let n = self.top_n_sigma;
        check(n.is_finite(), "top-n-sigma", n, "a number (0 = off)")?;
        let x = self.xtc_probability;
        check(
            (0.0..=1.0).contains(&x),
            "XTC's probability",
            x,
            "between 0 and 1",
        )?;
        let x = self.xtc_threshold;
        check(
            (0.0..=1.0).contains(&x),
            "XTC's threshold",
            x,
            "between 0 and 1",
        )?;
        let r = self.repetition_penalty;
        check(
            r.is_finite() && r > 0.0,
            "repetition penalty",
            r,
            "above 0 (1 = off)",
        )?;
        let f = self.presence_penalty;
        check(f.is_finite(), "presence penalty", f, "a number (0 = off)")?;
        let f = self.frequency_penalty;
        check(f.is_finite(), "frequency penalty", f, "a number (0 = off)")
    }
}

/// Default window of the repetition penalty in tokens, as in llama.cpp.
const PENALTY_WINDOW: usize = 64;

/// An additive change of a token's logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bias {
    /// The token.
    pub token: u32,
    /// Added to its logit.
    pub add: f32,
}

/// A token and the number of times it was drawn.
#[derive(Debug, Clone, Copy)]
struct Drawn {
    token: u32,
    times: u32,
}

/// A seeded sampler. Allocates once for its vocabulary, and for the tokens counted by the presence
/// and frequency penalties.
#[derive(Debug)]
pub struct Sampler {
    settings: Sampling,
    rng: ChaCha8Rng,
    candidates: Vec<(f32, u32)>,
    /// The candidates that a constraint allows, before rules are applied.
    allowed: Vec<(f32, u32)>,
    /// Scratch for sorting; empty without a temperature.
    spare: Vec<(f32, u32)>,
    bias: Vec<Bias>,
    /// In the order of token numbers.
    drawn: Vec<Drawn>,
    rules: Arc<TextRules>,
    /// Whether a token was drawn.
    begun: bool,
    /// Tokens to penalise.
    recent: Vec<u32>,
}

impl Sampler {
    /// A sampler over `vocab` tokens.
    pub fn new(settings: Sampling, vocab: usize) -> Self {
        Self {
            settings,
            rng: ChaCha8Rng::seed_from_u64(settings.seed),
            candidates: Vec::with_capacity(vocab),
            spare: if settings.temperature > 0.0 && settings.top_k == 0 {
                Vec::with_capacity(vocab)
            } else {
                Vec::new()
            },
            allowed: Vec::new(),
            bias: Vec::new(),
            drawn: Vec::new(),
            rules: Arc::default(),
            begun: false,
            recent: Vec::with_capacity(settings.penalty_window.min(PENALTY_WINDOW)),
        }
    }

    /// Restricts tokens by `rules`.
    #[must_use]
    pub fn with_rules(mut self, rules: Arc<TextRules>) -> Self {
        self.rules = rules;
        self
    }

    /// Adds `bias` to the logits before anything else.
    #[must_use]
    pub fn with_bias(mut self, bias: Vec<Bias>) -> Self {
        self.bias = bias;
        self
    }

    /// Samples the next token. `history`: all tokens of the sequence. NaN logits are never chosen;
    /// if all are NaN, the result is token 0.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> u32 {
        self.sample_under(logits, history, None)
    }

    /// Like [`sample`](Self::sample), among the tokens that a prepared constraint allows.
    pub fn sample_under(
        &mut self,
        logits: &[f32],
        history: &[u32],
        constraint: Option<&dyn Constraint>,
    ) -> u32 {
        self.candidates.clear();
        let numbers = logits.iter().zip(0u32..).filter(|(l, _)| !l.is_nan());
        self.candidates.extend(numbers.map(|(&l, id)| (l, id)));
        let begins = !std::mem::replace(&mut self.begun, true);
        if let Some(constraint) = constraint {
            self.candidates.retain(|c| constraint.allows(c.1));
            self.allowed.clone_from(&self.candidates);
        }
        (self.rules).hold(&mut self.candidates, |c| c.1, history, begins);
        // The constraint takes precedence: rules that leave none of its tokens are ignored.
        if self.candidates.is_empty() && constraint.is_some() {
            std::mem::swap(&mut self.candidates, &mut self.allowed);
        }
        let token = self.draw(history);
        let s = self.settings;
        if s.presence_penalty != 0.0 || s.frequency_penalty != 0.0 {
            match self.drawn.binary_search_by_key(&token, |d| d.token) {
                Ok(at) => self.drawn[at].times += 1,
                Err(at) => self.drawn.insert(at, Drawn { token, times: 1 }),
            }
        }
        token
    }

    /// Draws one of the candidates.
    fn draw(&mut self, history: &[u32]) -> u32 {
        let s = self.settings;
        for bias in &self.bias {
            add(&mut self.candidates, bias.token, bias.add);
        }
        for drawn in &self.drawn {
            let penalty = s.presence_penalty + s.frequency_penalty * drawn.times as f32;
            add(&mut self.candidates, drawn.token, -penalty);
        }
        if s.repetition_penalty != 1.0 {
            self.penalise_recent(history);
        }
        if s.temperature == 0.0 {
            // Argmax; the first of equal ones.
            return self
                .candidates
                .iter()
                .fold(None, |best: Option<(f32, u32)>, &c| match best {
                    Some(b) if b.0 >= c.0 => Some(b),
                    _ => Some(c),
                })
                .map_or(0, |b| b.1);
        }
        if s.top_n_sigma > 0.0 {
            keep_within_sigma(&mut self.candidates, s.top_n_sigma);
        }
        self.keep_likeliest();
        let Some(&(max, first)) = self.candidates.first() else {
            return 0;
        };
        // Unnormalised softmax, most likely token first.
        let mut sum = 0.0f32;
        for c in &mut self.candidates {
            c.0 = libm::expf((c.0 - max) / s.temperature);
            sum += c.0;
        }
        let mut kept = 0;
        let mut mass = 0.0f32;
        for c in &self.candidates {
            if kept > 0 && (mass >= s.top_p * sum || c.0 < s.min_p) {
                break;
            }
            mass += c.0;
            kept += 1;
        }
        self.candidates.truncate(kept);
        if s.typical_p < 1.0 {
            keep_typical(&mut self.candidates, s.typical_p);
        }
        if s.xtc_probability > 0.0 && self.share() < s.xtc_probability {
            drop_likely(&mut self.candidates, s.xtc_threshold);
        }
        if s.typical_p < 1.0 || s.xtc_probability > 0.0 {
            mass = self.candidates.iter().map(|c| c.0).sum();
        }
        let mut rest = self.share() * mass;
        let first = self.candidates.first().map_or(first, |c| c.1);
        for c in &self.candidates {
            if rest < c.0 {
                return c.1;
            }
            rest -= c.0;
        }
        first
    }

    /// Applies the repetition penalty, once per distinct recent token.
    fn penalise_recent(&mut self, history: &[u32]) {
        self.recent.clear();
        let window = history.len().saturating_sub(self.settings.penalty_window);
        self.recent.extend_from_slice(&history[window..]);
        self.recent.sort_unstable();
        self.recent.dedup();
        for id in &self.recent {
            if let Ok(at) = self.candidates.binary_search_by_key(id, |c| c.1) {
                let logit = &mut self.candidates[at].0;
                *logit = penalise(*logit, self.settings.repetition_penalty);
            }
        }
    }

    /// A uniform random number in [0, 1).
    fn share(&mut self) -> f32 {
        (self.rng.next_u32() >> 8) as f32 / (1u32 << 24) as f32
    }

    /// Sorts candidates by descending logit, ties by token number, and truncates to top-k.
    fn keep_likeliest(&mut self) {
        let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let k = self.settings.top_k;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, order);
            self.candidates.truncate(k);
            self.candidates.sort_unstable_by(order);
            return;
        }
        sort_descending(&mut self.candidates, &mut self.spare);
    }
}

/// Adds `add` to the logit of `token` if it is among `candidates`, which are sorted by token.
fn add(candidates: &mut [(f32, u32)], token: u32, add: f32) {
    if let Ok(at) = candidates.binary_search_by_key(&token, |c| c.1) {
        candidates[at].0 += add;
    }
}

fn penalise(logit: f32, penalty: f32) -> f32 {
    if logit > 0.0 {
        logit / penalty
    } else {
        logit * penalty
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rules_hold_the_first_token_and_every_other() {
        let rules = TextRules {
            suppress_tokens: vec![3],
            begin_suppress_tokens: vec![2],
            no_repeat_ngram_size: 2,
            ..TextRules::default()
        };
        let mut s = Sampler::new(Sampling::default(), 4).with_rules(Arc::new(rules));
        let logits = [0.0, 1.0, 2.0, 3.0];
        assert_eq!(s.sample(&logits, &[0, 0]), 1);
        assert_eq!(s.sample(&logits, &[0, 0, 1]), 2);
        assert_eq!(s.sample(&logits, &[0, 0, 1, 2, 1]), 1);
    }

    fn with(f: impl FnOnce(&mut Sampling)) -> Sampling {
        let mut s = Sampling {
            temperature: 1.0,
            ..Sampling::default()
        };
        f(&mut s);
        s
    }

    #[test]
    fn a_sampling_says_what_it_does() {
        let shown = |f: fn(&mut Sampling)| with(f).to_string();
        assert_eq!(Sampling::default().to_string(), "greedy");
        assert_eq!(shown(|_| ()), "temperature 1, seed 0");
        let text = shown(|s| {
            (s.top_k, s.top_p, s.min_p, s.seed) = (40, 0.95, 0.05, 7);
            s.repetition_penalty = 1.1;
        });
        let wanted =
            "temperature 1, top-k 40, top-p 0.95, min-p 0.05, repetition penalty 1.1, seed 7";
        assert_eq!(text, wanted);
        // Parameters without effect are omitted.
        let greedy = shown(|s| (s.temperature, s.top_p) = (0.0, 0.5));
        assert_eq!(greedy, "greedy");
    }

    #[test]
    fn what_was_drawn_is_less_likely_and_a_bias_counts() {
        let logits = [1.0, 3.0, 2.5];
        let greedy = |presence_penalty, frequency_penalty| Sampling {
            presence_penalty,
            frequency_penalty,
            ..Sampling::default()
        };
        let draw = |mut sampler: Sampler| [0; 4].map(|_| sampler.sample(&logits, &[]));
        assert_eq!(draw(Sampler::new(greedy(0.0, 0.0), 3)), [1, 1, 1, 1]);
        assert_eq!(draw(Sampler::new(greedy(0.6, 0.0), 3)), [1, 2, 1, 1]);
        assert_eq!(draw(Sampler::new(greedy(0.0, 0.6), 3)), [1, 2, 1, 2]);
        let bias = vec![
            Bias {
                token: 0,
                add: 100.0,
            },
            Bias {
                token: 99,
                add: 1.0,
            },
        ];
        let biased = Sampler::new(greedy(0.0, 0.0), 3).with_bias(bias);
        assert_eq!(draw(biased), [0; 4]);
    }

    #[test]
    fn the_penalty_has_a_window() {
        let greedy = |penalty_window| Sampling {
            repetition_penalty: 2.0,
            penalty_window,
            ..Sampling::default()
        };
        let draw = |window| Sampler::new(greedy(window), 3).sample(&[1.0, 1.5, 0.0], &[1, 2, 2]);
        assert_eq!([draw(0), draw(2), draw(3), draw(usize::MAX)], [1, 1, 0, 0]);
    }

    #[test]
    fn greedy_takes_the_first_maximum_and_ignores_nan() {
        let mut s = Sampler::new(Sampling::default(), 4);
        assert_eq!(s.sample(&[1.0, 3.0, 3.0, f32::NAN], &[]), 1);
        assert_eq!(s.sample(&[f32::NAN; 4], &[]), 0);
    }

    #[test]
    fn the_penalty_moves_greedy_off_a_repeated_token() {
        let mut s = Sampler::new(
            Sampling {
                repetition_penalty: 2.0,
                ..Sampling::default()
            },
            3,
        );
        assert_eq!(s.sample(&[1.0, 1.5, 0.0], &[1]), 0);
        assert_eq!(s.sample(&[1.0, 1.5, 0.0], &[2]), 1);
    }

    /// The smallest set of tokens whose mass is at least `top_p`: exactly its tokens are drawn.
    #[test]
    fn the_nucleus_is_drawn_whole() {
        let logits = [0.5f32, 0.3, 0.2].map(libm::logf);
        for (top_p, size) in [(0.0, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3)] {
            assert!(with(|s| s.top_p = top_p).validate().is_ok());
            let mut s = Sampler::new(with(|s| (s.top_p, s.seed) = (top_p, 3)), 3);
            let drawn = (0..400).map(|_| s.sample(&logits, &[]));
            let drawn: std::collections::BTreeSet<u32> = drawn.collect();
            assert_eq!(drawn.len(), size, "{top_p}: {drawn:?}");
        }
    }

    #[test]
    fn frequencies_follow_the_distribution() {
        let logits = [0.0f32, libm::logf(3.0), f32::NEG_INFINITY];
        let mut s = Sampler::new(with(|s| s.seed = 7), 3);
        let mut counts = [0; 3];
        for _ in 0..8000 {
            counts[s.sample(&logits, &[]) as usize] += 1;
        }
        assert_eq!(counts[2], 0);
        assert!(
            (counts[1] as f64 / 8000.0 - 0.75).abs() < 0.02,
            "{counts:?}"
        );
    }

    proptest! {
        #[test]
        fn filters_bound_the_choice(
            logits in prop::collection::vec(-5f32..5.0, 1..60),
            k in 1usize..8, p in 0.05f32..1.0, m in 0.0f32..1.0, seed: u64,
        ) {
            let mut sorted: Vec<u32> = (0..logits.len() as u32).collect();
            sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
            let exp = |i: u32| f64::from(logits[i as usize] - logits[sorted[0] as usize]).exp();

            let top_k = Sampler::new(with(|s| { s.top_k = k; s.seed = seed }), 60).sample(&logits, &[]);
            prop_assert!(sorted[..k.min(sorted.len())].contains(&top_k));

            let min_p = Sampler::new(with(|s| { s.min_p = m; s.seed = seed }), 60).sample(&logits, &[]);
            prop_assert!(min_p == sorted[0] || exp(min_p) >= f64::from(m) * 0.999);

            let top_p = Sampler::new(with(|s| { s.top_p = p; s.seed = seed }), 60).sample(&logits, &[]);
            let sum: f64 = sorted.iter().map(|&i| exp(i)).sum();
            let before: f64 = sorted.iter().take_while(|&&i| i != top_p).map(|&i| exp(i)).sum();
            prop_assert!(before <= f64::from(p) * sum * 1.001);

            let again = Sampler::new(with(|s| { s.top_p = p; s.seed = seed }), 60).sample(&logits, &[]);
            prop_assert_eq!(top_p, again);
        }
    }
}
