//! A load: arrivals, and when they were served.

use std::time::Duration;

/// Tokens per prompt, in both classes, and per answer.
pub const PROMPT: usize = 128;
pub const ANSWER: usize = 32;
/// Texts at once.
pub const PARALLEL: usize = 8;

/// A request of the load.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    pub at: Duration,
    pub proactive: bool,
    /// Makes the prompt differ from others.
    pub number: u32,
}

/// Times of a request: arrival, start, end.
#[derive(Debug, Clone, Copy)]
pub struct Served {
    pub proactive: bool,
    pub arrived: Duration,
    pub began: Duration,
    pub ended: Duration,
}

/// Poisson arrivals of both classes.
pub struct Load {
    /// Requests per scaled minute.
    pub reactive: f64,
    pub proactive: f64,
    /// The scaled minute.
    pub minute: Duration,
    pub minutes: f64,
}

impl Load {
    /// All arrivals in order. Background requests do not depend on the rate of the others.
    pub fn arrivals(&self, seed: u64) -> Vec<Arrival> {
        let mut all = Vec::new();
        for (proactive, rate) in [(true, self.proactive), (false, self.reactive)] {
            let mut random = fastrand::Rng::with_seed(2 * seed + u64::from(proactive));
            let mut at = 0.0;
            loop {
                at -= (1.0 - random.f64()).ln() / rate.max(1e-9);
                if at >= self.minutes {
                    break;
                }
                all.push(Arrival {
                    at: self.minute.mul_f64(at),
                    proactive,
                    number: random.u32(..),
                });
            }
        }
        all.sort_by_key(|arrival| arrival.at);
        all
    }
}
