//! Log-probabilities of tokens, at temperature 1 and before truncation (top-k, top-p).

/// A token and the natural log of its probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogProb {
    /// The token.
    pub token: u32,
    /// ln p.
    pub log_prob: f32,
}

/// Log-probability of a token, and the most likely tokens at its position.
#[derive(Debug, Clone, PartialEq)]
pub struct LogProbs {
    /// The token.
    pub chosen: LogProb,
    /// The most likely tokens in descending order; ties by lower token number.
    pub top: Vec<LogProb>,
}

impl LogProbs {
    /// Log-probabilities of `token` among `logits`, with the `top` most likely tokens.
    pub fn of(logits: &[f32], token: u32, top: usize) -> Self {
        let norm = log_sum(logits);
        let log_prob = |token: u32, logit: f32| LogProb {
            token,
            log_prob: (f64::from(logit) - norm) as f32,
        };
        let mut likeliest: Vec<LogProb> = Vec::with_capacity(top + 1);
        for (&logit, token) in logits.iter().zip(0..) {
            let entry = log_prob(token, logit);
            let place = likeliest.partition_point(|other| other.log_prob >= entry.log_prob);
            if place < top {
                likeliest.insert(place, entry);
                likeliest.truncate(top);
            }
        }
        let logit = logits.get(token as usize).copied().unwrap_or(f32::MIN);
        Self {
            chosen: log_prob(token, logit),
            top: likeliest,
        }
    }
}

/// The token with the largest logit, the first of equal ones.
pub fn most_likely(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (&logit, token) in logits.iter().zip(0..) {
        if logit > best.0 {
            best = (logit, token);
        }
    }
    best.1
}

/// Natural log of the softmax probability of `token`.
pub fn log_probability(logits: &[f32], token: u32) -> f64 {
    let logit = logits.get(token as usize).copied().unwrap_or(f32::MIN);
    f64::from(logit) - log_sum(logits)
}

/// `ln Σ exp(logit)`
fn log_sum(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = (logits.iter())
        .map(|&l| f64::from(libm::expf(l - max)))
        .sum();
    f64::from(max) + libm::log(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, -3.0, 0.5, 80.0, 79.0];

    #[test]
    fn the_first_of_equal_logits_is_the_most_likely() {
        assert_eq!(most_likely(&[0.5, 2.0, f32::NAN, 2.0]), 1);
        assert_eq!(most_likely(&[f32::NAN]), 0);
    }

    #[test]
    fn probabilities_add_up_to_one() {
        let sum: f64 = (0..5).map(|t| libm::exp(log_probability(&LOGITS, t))).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert!(log_probability(&LOGITS, 3) > log_probability(&LOGITS, 4));
    }

    #[test]
    fn the_likeliest_come_first() {
        let found = LogProbs::of(&LOGITS, 1, 3);
        let tokens: Vec<u32> = found.top.iter().map(|entry| entry.token).collect();
        assert_eq!(tokens, [3, 4, 0]);
        assert_eq!(found.chosen.token, 1);
        let exact = log_probability(&LOGITS, 1);
        assert!((f64::from(found.chosen.log_prob) - exact).abs() < 1e-5);
        let ties = LogProbs::of(&[2.0, 2.0, 2.0], 0, 2);
        assert_eq!([ties.top[0].token, ties.top[1].token], [0, 1]);
        assert!(LogProbs::of(&LOGITS, 1, 0).top.is_empty());
    }
}
