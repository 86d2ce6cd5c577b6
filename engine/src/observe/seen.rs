//! The first tokens of a run compared with the plan's forecast: measured stalls and computation.

use crate::planner::Forecast;
use crate::run::Generation;

/// Fewest read commands for a stall measurement.
const COMMANDS: u64 = 64;

/// A profile is far off from this ratio to the measurement on.
const FAR: f64 = 1.5;
/// A forecast is corrected if the measurement changes a token's time by this ratio.
const OFF: f64 = 1.2;

/// Measurement of a generation's first tokens after the first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Seen {
    /// Number of tokens.
    pub tokens: usize,
    /// Stall per read command in milliseconds; `None` with too few reads.
    pub wait_ms: Option<f64>,
    /// Read commands per token.
    pub reads: f64,
    /// Computation per token, as a multiple of the forecast.
    pub compute: f64,
}

impl Seen {
    /// `None` if the generation ended too early.
    pub fn of(generation: &Generation, forecast: &Forecast) -> Option<Self> {
        let (tokens, counted) = generation.early?;
        let times = generation.latencies.get(..tokens)?;
        let ms = times.iter().map(|t| t.as_secs_f64() * 1e3).sum::<f64>();
        let waited = counted.wait_ns as f64 / 1e6;
        let computing = (ms - waited) / tokens.max(1) as f64;
        let known = counted.commands >= COMMANDS;
        let seen = Self {
            tokens,
            wait_ms: known.then(|| waited / counted.commands as f64),
            reads: counted.commands as f64 / tokens.max(1) as f64,
            compute: computing / forecast.compute_ms.max(1e-9),
        };
        (tokens > 0 && seen.compute > 0.0).then_some(seen)
    }

    /// The forecast corrected by the measurement: computation times the measured ratio, plus the
    /// measured stall for each expected read. A warm cache reads no more than the first tokens did.
    pub fn correct(&self, forecast: &Forecast) -> Forecast {
        let compute_ms = forecast.compute_ms * self.compute;
        let wait_ms = match self.wait_ms {
            Some(wait_ms) => wait_ms * forecast.reads.min(self.reads),
            None => forecast.wait_ms,
        };
        let ms = compute_ms + wait_ms;
        Forecast {
            tokens_per_s: 1e3 * forecast.tokens as f64 / ms.max(1e-9),
            ms,
            compute_ms,
            wait_ms,
            ..*forecast
        }
    }

    /// Stall per read as a multiple of the forecast; `None` without stalls.
    pub fn disk(&self, forecast: &Forecast) -> Option<f64> {
        let stalls = forecast.wait_ms > 0.0 && forecast.reads > 0.0;
        let wait_ms = self.wait_ms.filter(|_| stalls)?;
        Some(wait_ms * forecast.reads / forecast.wait_ms)
    }

    /// Whether stalls differ so much that a token's time changes by [`FAR`].
    pub fn disk_is_far(&self, forecast: &Forecast) -> bool {
        let seen = Self {
            compute: 1.0,
            ..*self
        };
        apart(seen.correct(forecast).ms, forecast.ms, FAR)
    }

    /// Whether computation differs from the forecast by [`FAR`].
    pub fn machine_is_far(&self) -> bool {
        apart(self.compute, 1.0, FAR)
    }

    /// Whether the correction changes a token's time by [`OFF`].
    pub fn is_off(&self, forecast: &Forecast) -> bool {
        apart(self.correct(forecast).ms, forecast.ms, OFF)
    }
}

fn apart(a: f64, b: f64, factor: f64) -> bool {
    !(b / factor..=b * factor).contains(&a)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::counters::Counters;
    use crate::drafts::DraftTotals;
    use crate::planner::Limit;
    use crate::run::Stop;

    fn forecast() -> Forecast {
        Forecast {
            tokens: 1,
            tokens_per_s: 100.0,
            limit: Limit::RandomReads,
            ms: 10.0,
            compute_ms: 6.0,
            io_ms: 8.0,
            wait_ms: 4.0,
            bytes_read: 1e6,
            reads: 80.0,
            cold_hit_rate: 0.9,
        }
    }

    /// Four tokens of 20 ms each, 8 ms of it stalled, with 160 commands each.
    fn generation() -> Generation {
        let counters = Counters {
            commands: 640,
            busy_ns: 128_000_000,
            wait_ns: 32_000_000,
            ..Counters::default()
        };
        Generation {
            tokens: vec![0; 6],
            prompt_tokens: 1,
            first_token: Duration::ZERO,
            latencies: vec![Duration::from_millis(20); 5],
            drafts: DraftTotals::default(),
            logits_hash: 0,
            stop: Stop::Length,
            counters,
            steps: Vec::new(),
            energy: None,
            settled: None,
            early: Some((4, counters)),
        }
    }

    #[test]
    fn the_first_tokens_tell_how_far_the_plan_is_off() {
        let seen = Seen::of(&generation(), &forecast()).unwrap();
        assert_eq!(seen.tokens, 4);
        // 0.05 ms per read for 80 reads, as forecast; 12 ms of computation instead of 6.
        assert!(
            (seen.disk(&forecast()).unwrap() - 1.0).abs() < 1e-9,
            "{seen:?}"
        );
        assert!((seen.compute - 2.0).abs() < 1e-9, "{seen:?}");
        assert!(seen.machine_is_far() && !seen.disk_is_far(&forecast()));
        let corrected = seen.correct(&forecast());
        assert!((corrected.ms - 16.0).abs() < 1e-9, "{corrected:?}");
        assert!(
            (corrected.tokens_per_s - 62.5).abs() < 1e-9,
            "{corrected:?}"
        );
        assert!(seen.is_off(&forecast()));
        let slow = Seen {
            wait_ms: Some(0.2),
            compute: 1.0,
            ..seen
        };
        assert!(slow.disk_is_far(&forecast()) && !slow.machine_is_far());
        let near = Seen {
            wait_ms: None,
            compute: 0.9,
            ..seen
        };
        assert!(!near.is_off(&forecast()) && near.disk(&forecast()).is_none());
        let short = Generation {
            early: None,
            ..generation()
        };
        assert_eq!(Seen::of(&short, &forecast()), None);
    }
}
