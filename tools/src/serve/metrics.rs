//! Totals of the server, and `/metrics`: Prometheus' text format.

use std::fmt::{Display, Write};
use std::time::Duration;

use emberflow_engine::Counters;

/// Upper bounds of the buckets, in seconds.
const BOUNDS: [f64; 12] = [
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
];

/// Totals since the start.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// Requests that ran.
    pub requests: u64,
    /// Texts whose client went away.
    pub cancelled: u64,
    /// Times that a text was set aside for another.
    pub preemptions: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens of prompts that were known.
    pub cached_tokens: u64,
    /// Generated tokens.
    pub predicted_tokens: u64,
    /// Texts that run now.
    pub processing: usize,
    /// Requests that wait now.
    pub waiting: usize,
    /// The engine's counters.
    pub counters: Counters,
    /// Time in passes.
    pub pass: Duration,
    /// Interactive requests.
    pub reactive: Class,
    /// Background requests.
    pub proactive: Class,
}

/// A class of requests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Class {
    /// Texts that run now.
    pub running: usize,
    /// Requests that wait now.
    pub waiting: usize,
    /// Texts that ended.
    pub ended: u64,
    /// From arrival to the start.
    pub queue: Histogram,
    /// From arrival to the first token.
    pub first: Histogram,
    /// Mean time of a text's further tokens.
    pub token: Histogram,
}

/// Counts of durations by length.
#[derive(Debug, Clone, Copy, Default)]
pub struct Histogram {
    /// By bucket, not cumulative; the last one has no bound.
    counts: [u64; BOUNDS.len() + 1],
    sum: f64,
}

impl Histogram {
    /// Counts a duration.
    pub fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.counts[BOUNDS.partition_point(|&bound| bound < seconds)] += 1;
        self.sum += seconds;
    }

    /// Mean in seconds; 0 if there is none.
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

/// One number.
struct Metric {
    name: &'static str,
    help: &'static str,
    value: fn(&Totals) -> u64,
}

const fn metric(name: &'static str, help: &'static str, value: fn(&Totals) -> u64) -> Metric {
    Metric { name, help, value }
}

/// Names that end in `_total` are counters, others gauges.
const METRICS: [Metric; 13] = [
    metric("requests_total", "Requests that ran.", |t| t.requests),
    metric(
        "requests_cancelled_total",
        "Texts whose client went away.",
        |t| t.cancelled,
    ),
    metric("requests_processing", "Texts that run now.", |t| {
        t.processing as u64
    }),
    metric("requests_deferred", "Requests that wait now.", |t| {
        t.waiting as u64
    }),
    metric(
        "preemptions_total",
        "Times that a text was set aside.",
        |t| t.preemptions,
    ),
    metric("prompt_tokens_total", "Prompt tokens computed.", |t| {
        t.prompt_tokens
    }),
    metric(
        "prompt_tokens_cached_total",
        "Prompt tokens known before.",
        |t| t.cached_tokens,
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
    metric(
        "cache_hits_total",
        "Needed neurons that were resident.",
        |t| t.counters.hits + t.counters.hot_hits,
    ),
    metric("cache_misses_total", "Needed neurons that were not.", |t| {
        t.counters.misses
    }),
    metric("peak_rss_bytes", "Largest resident memory.", |_| {
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
        help: "From arrival to the start.",
        of: |class| &class.queue,
    },
    Timing {
        name: "first_token_seconds",
        help: "From arrival to the first token.",
        of: |class| &class.first,
    },
    Timing {
        name: "token_seconds",
        help: "Mean time of a text's further tokens.",
        of: |class| &class.token,
    },
];

impl Totals {
    /// A class.
    pub fn class(&mut self, proactive: bool) -> &mut Class {
        match proactive {
            true => &mut self.proactive,
            false => &mut self.reactive,
        }
    }

    /// In Prometheus' text format.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for Metric { name, help, value } in &METRICS {
            let kind = match name.ends_with("_total") {
                true => "counter",
                false => "gauge",
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
    // Writing to a string cannot fail.
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
