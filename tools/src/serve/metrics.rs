//! Server totals, and `/metrics` in Prometheus' text format.

use std::fmt::{Display, Write};
use std::time::Duration;

use emberflow_engine::Counters;

/// Upper bounds of the histogram buckets, in seconds.
const BOUNDS: [f64; 12] = [
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
];

/// Totals since the start.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// Requests started.
    pub requests: u64,
    /// Texts whose client disconnected.
    pub cancelled: u64,
    /// Texts that ended in a loop.
    pub looping: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Prompt tokens computed.
    pub prompt_tokens: u64,
    /// Prompt tokens reused from the KV cache.
    pub cached_tokens: u64,
    /// Those of them whose state was read from disk.
    pub restored_tokens: u64,
    /// Passes while saved state was being read.
    pub passes_while_reading: u64,
    /// Generated tokens.
    pub predicted_tokens: u64,
    /// Texts running.
    pub processing: usize,
    /// Requests waiting.
    pub waiting: usize,
    /// The engine's counters.
    pub counters: Counters,
    /// Total time of passes.
    pub pass: Duration,
    /// Interactive requests.
    pub reactive: Class,
    /// Background requests.
    pub proactive: Class,
}

/// Totals of one class of requests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Class {
    /// Texts running.
    pub running: usize,
    /// Requests waiting.
    pub waiting: usize,
    /// Texts finished.
    pub ended: u64,
    /// Time from arrival to start.
    pub queue: Histogram,
    /// Time to first token.
    pub first: Histogram,
    /// Mean time per further token of a text.
    pub token: Histogram,
}

/// A histogram of durations.
#[derive(Debug, Clone, Copy, Default)]
pub struct Histogram {
    /// Per bucket, not cumulative; the last bucket is unbounded.
    counts: [u64; BOUNDS.len() + 1],
    sum: f64,
}

impl Histogram {
    /// Records a duration.
    pub fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.counts[BOUNDS.partition_point(|&bound| bound < seconds)] += 1;
        self.sum += seconds;
    }

    /// Mean in seconds; 0 if empty.
    pub fn mean(&self) -> f64 {
        self.sum / self.counts.iter().sum::<u64>().max(1) as f64
    }

    fn write(&self, out: &mut String, name: &str, class: &str) {
        let mut count = 0;
        let bounds = BOUNDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, n) in bounds.zip(self.counts) {
            count += n;
            line(
                out,
                &format!("{name}_bucket{{class=\"{class}\",le=\"{bound}\"}}"),
                count,
            );
        }
        line(out, &format!("{name}_sum{{class=\"{class}\"}}"), self.sum);
        line(out, &format!("{name}_count{{class=\"{class}\"}}"), count);
    }
}

/// A single value.
struct Metric {
    name: &'static str,
    help: &'static str,
    value: fn(&Totals) -> u64,
}

const fn metric(name: &'static str, help: &'static str, value: fn(&Totals) -> u64) -> Metric {
    Metric { name, help, value }
}

/// Names ending in `_total` are counters, the others gauges.
const METRICS: [Metric; 16] = [
    metric("requests_total", "Requests started.", |t| t.requests),
    metric(
        "requests_cancelled_total",
        "Texts whose client disconnected.",
        |t| t.cancelled,
    ),
    metric("requests_processing", "Texts running.", |t| {
        t.processing as u64
    }),
    metric("requests_deferred", "Requests waiting.", |t| {
        t.waiting as u64
    }),
    metric("texts_looping_total", "Texts that ended in a loop.", |t| {
        t.looping
    }),
    metric("preemptions_total", "Preemptions.", |t| t.preemptions),
    metric("prompt_tokens_total", "Prompt tokens computed.", |t| {
        t.prompt_tokens
    }),
    metric(
        "prompt_tokens_cached_total",
        "Prompt tokens reused from the KV cache.",
        |t| t.cached_tokens,
    ),
    metric(
        "prompt_tokens_restored_total",
        "Prompt tokens whose state was read from disk.",
        |t| t.restored_tokens,
    ),
    metric(
        "passes_while_reading_state_total",
        "Passes of other texts while saved state was being read.",
        |t| t.passes_while_reading,
    ),
    metric("tokens_predicted_total", "Tokens generated.", |t| {
        t.predicted_tokens
    }),
    metric("bytes_read_total", "Bytes read from the device.", |t| {
        t.counters.bytes_read
    }),
    metric("io_wait_nanoseconds_total", "Time stalled on reads.", |t| {
        t.counters.wait_ns
    }),
    metric("cache_hits_total", "Needed neurons found in memory.", |t| {
        t.counters.hits + t.counters.hot_hits
    }),
    metric(
        "cache_misses_total",
        "Needed neurons read from the device.",
        |t| t.counters.misses,
    ),
    metric("peak_rss_bytes", "Peak resident set size.", |_| {
        emberflow_storage::mem::peak_rss().unwrap_or(0)
    }),
];

/// A duration of both classes.
struct Timing {
    name: &'static str,
    help: &'static str,
    of: fn(&Class) -> &Histogram,
}

const TIMINGS: [Timing; 3] = [
    Timing {
        name: "queue_seconds",
        help: "Time from arrival to start.",
        of: |class| &class.queue,
    },
    Timing {
        name: "first_token_seconds",
        help: "Time to first token.",
        of: |class| &class.first,
    },
    Timing {
        name: "token_seconds",
        help: "Mean time per further token of a text.",
        of: |class| &class.token,
    },
];

impl Totals {
    /// Totals of a class.
    pub fn class(&mut self, proactive: bool) -> &mut Class {
        if proactive {
            &mut self.proactive
        } else {
            &mut self.reactive
        }
    }

    /// Formats the totals for Prometheus.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for Metric { name, help, value } in &METRICS {
            let kind = if name.ends_with("_total") {
                "counter"
            } else {
                "gauge"
            };
            head(&mut out, name, help, kind);
            line(&mut out, name, value(self));
        }
        for Timing { name, help, of } in &TIMINGS {
            head(&mut out, name, help, "histogram");
            of(&self.reactive).write(&mut out, name, "reactive");
            of(&self.proactive).write(&mut out, name, "proactive");
        }
        out
    }
}

fn head(out: &mut String, name: &str, help: &str, kind: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "# HELP emberflow_{name} {help}");
    let _ = writeln!(out, "# TYPE emberflow_{name} {kind}");
}

fn line(out: &mut String, name: &str, value: impl Display) {
    let _ = writeln!(out, "emberflow_{name} {value}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative() {
        let mut totals = Totals::default();
        for ms in [5, 10, 11, 90_000] {
            totals.proactive.first.add(Duration::from_millis(ms));
        }
        let text = totals.text();
        let has = |line: &str| {
            let line = format!("emberflow_first_token_seconds{line}");
            assert!(text.lines().any(|l| l == line), "{line} in {text}");
        };
        has("_bucket{class=\"proactive\",le=\"0.01\"} 2");
        has("_bucket{class=\"proactive\",le=\"0.025\"} 3");
        has("_bucket{class=\"proactive\",le=\"60\"} 3");
        has("_bucket{class=\"proactive\",le=\"+Inf\"} 4");
        has("_count{class=\"proactive\"} 4");
        has("_count{class=\"reactive\"} 0");
    }
}
