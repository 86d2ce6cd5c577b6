//! The report in a few lines of text.

use super::report::{BestOf, EnergyReport, Expected, ReadAheadReport, Report, SampleReport};

/// Fewest tokens in the second half for which its speed is printed.
const SETTLED: usize = 16;

/// Longest line of several clauses, without the label.
const WIDTH: usize = 100;

/// Breaks a text after clauses so that lines are at most [`WIDTH`] long.
fn folded(text: &str) -> String {
    let mut out = String::new();
    let mut room = WIDTH;
    for clause in text.split_inclusive("; ") {
        let length = clause.trim_end().chars().count();
        if length > room && !out.is_empty() {
            out.truncate(out.trim_end().len());
            out.push_str("\n          ");
            room = WIDTH;
        }
        out.push_str(clause);
        room = room.saturating_sub(clause.chars().count());
    }
    out
}

impl Report {
    /// One line per topic; the last one ends with the hash of the logits.
    pub fn summary(&self) -> String {
        let mut lines = Vec::new();
        let mut line =
            |what: &str, text: String| lines.push(format!("{what:<10}{}", folded(&text)));
        if let Some(BestOf { best, samples }) = &self.best_of {
            let SampleReport { seed, score, .. } = &samples[*best];
            let n = samples.len();
            let best = format!("best of {n}: seed {seed}, mean log-probability {score:.3}");
            line("texts", best);
        }
        if let Some(sampling) = &self.sampling {
            line("sampling", sampling.summary());
        }
        if let Some(repetition) = &self.repetition {
            line("text", format!("ends in a loop: {repetition}"));
        }
        line("speed", self.speed());
        line("expected", self.plan.summary());
        for (profile, text) in self.plan.far() {
            line(profile, text);
        }
        if let Some(drafts) = &self.speculation {
            line("drafts", drafts.summary());
        }
        line("flash", self.flash());
        if let Some(ahead) = self.read_ahead.as_ref().filter(|ahead| ahead.clusters > 0) {
            line("ahead", ahead.summary());
        }
        if let Some(device) = &self.device {
            line("device", device.summary.clone());
        }
        line("memory", self.held());
        if let Some(EnergyReport {
            source,
            joules_per_token: Some(joules),
            ..
        }) = &self.energy
        {
            line("energy", format!("{joules:.3} J/token ({source})"));
        }
        let (isa, io) = (&self.isa, &self.io.engine);
        line(
            "kernels",
            format!("{isa}; I/O {io}; logits {}", self.logits_hash),
        );
        lines.join("\n")
    }

    fn speed(&self) -> String {
        let of = if self.best_of.is_some() {
            "pass"
        } else {
            "token"
        };
        let settled = match self.settled {
            Some(s) if s.tokens >= SETTLED => {
                format!(", {:.1} in the last {}", s.tokens_per_s, s.tokens)
            }
            _ => String::new(),
        };
        format!(
            "{:.1} tok/s{settled}; {:.2} ms/{of}; prompt {:.1} tok/s",
            self.decode_tokens_per_s, self.latency_ms.mean, self.prefill_tokens_per_s
        )
    }

    fn flash(&self) -> String {
        let drawn = self.best_of.as_ref().map(|b| &b.samples);
        let generated = drawn.map_or(self.generated_tokens, |samples| {
            samples.iter().map(|s| s.tokens.len()).sum()
        });
        let tokens = (self.prompt_tokens + generated).max(1) as f64;
        let reads = if self.io.reads > 0 {
            format!(
                "{:.1} KiB read/token at {:.2} GB/s, overlap {:.0} %, waited {:.1} %",
                self.io.bytes_read as f64 / 1024.0 / tokens,
                self.io.gb_per_s,
                100.0 * self.io.overlap,
                100.0 * self.io.wait_share,
            )
        } else {
            "nothing read".to_owned()
        };
        // Without lookups there is no hit rate.
        if self.io.reads > 0 || self.cache.cold_hit_rate > 0.0 {
            format!(
                "{reads}; cache hits {:.1} %",
                100.0 * self.cache.cold_hit_rate
            )
        } else {
            reads
        }
    }

    fn held(&self) -> String {
        let mib = |b: u64| b as f64 / f64::from(1 << 20);
        let peak = self.memory.peak_rss_bytes;
        format!(
            "peak {} of {:.1} MiB; FFN {:.0} % resident, {:.1} % of neurons fired",
            peak.map_or("unknown".into(), |b| format!("{:.1}", mib(b))),
            mib(self.memory.budget_bytes),
            100.0 * self.memory.ffn_resident_share,
            100.0 * self.sparsity.active_share,
        )
    }
}

impl ReadAheadReport {
    fn summary(&self) -> String {
        format!(
            "experts guessed a layer early: {:.0} % right, {} clusters read, {:.0} % of them used, in \
             {:.0} % of the passes",
            100.0 * self.precision,
            self.clusters,
            100.0 * self.used_share,
            100.0 * self.passes_share,
        )
    }
}

impl Expected {
    /// Expected speed and its bottleneck, or why both are unknown: an estimate that is off by a
    /// factor of ten would mislead.
    fn summary(&self) -> String {
        match self.doubt {
            None => format!(
                "{:.1} tok/s{}{}; limit: {}",
                self.expected_tokens_per_s,
                match self.by_first_tokens {
                    0 => String::new(),
                    n => format!(" by the first {n} tokens"),
                },
                // Without reads there is no cache to warm.
                if self.expected_bytes_per_token > 0.0 {
                    " once the cache is warm"
                } else {
                    ""
                },
                self.limit,
            ),
            Some(doubt) => format!("unknown: {doubt}"),
        }
    }

    /// Profiles that are far off, and what to do.
    fn far(&self) -> Vec<(&'static str, String)> {
        let mut out = Vec::new();
        if let Some(times) = self.disk_times.filter(|_| self.disk_far) {
            let text = format!(
                "a read stalls {times:.1} times as long as in its profile: `emberflow bench io` measures again"
            );
            out.push(("disk", text));
        }
        if let Some(times) = self.compute_times.filter(|_| self.machine_far) {
            let text = format!(
                "computing takes {times:.1} times as long as in its profile: other programs run, or `emberflow bench io` measures again"
            );
            out.push(("machine", text));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::Limit;

    /// The expected speed holds once the cache is warm; without reads there is none to warm.
    #[test]
    fn an_expectation_says_when_it_holds() {
        let expected = |bytes| Expected {
            expected_tokens_per_s: 12.34,
            expected_prefill_tokens_per_s: 0.0,
            expected_cold_hit_rate: 0.0,
            expected_bytes_per_token: bytes,
            expected_compute_ms: 0.0,
            expected_wait_ms: 0.0,
            limit: Limit::RandomReads,
            chunk: 16,
            measured: true,
            doubt: None,
            by_first_tokens: 0,
            disk_times: Some(2.25),
            compute_times: Some(1.0),
            disk_far: false,
            machine_far: false,
        };
        assert_eq!(
            expected(4096.0).summary(),
            "12.3 tok/s once the cache is warm; limit: random reads"
        );
        assert_eq!(expected(0.0).summary(), "12.3 tok/s; limit: random reads");
        let seen = Expected {
            by_first_tokens: 8,
            disk_far: true,
            ..expected(4096.0)
        };
        assert_eq!(
            seen.summary(),
            "12.3 tok/s by the first 8 tokens once the cache is warm; limit: random reads"
        );
        let [("disk", text)] = &seen.far()[..] else {
            panic!("{:?}", seen.far());
        };
        assert!(text.starts_with("a read stalls 2.2 times"), "{text}");
        assert!(expected(4096.0).far().is_empty());
        let doubted = Expected {
            doubt: Some("nobody measured"),
            ..expected(1.0)
        };
        assert_eq!(doubted.summary(), "unknown: nobody measured");
    }

    #[test]
    fn long_lines_go_on_below() {
        assert_eq!(folded("a; b"), "a; b");
        let clause = "x".repeat(60);
        let text = format!("{clause}; {clause}; y");
        let below = " ".repeat(10);
        assert_eq!(folded(&text), format!("{clause};\n{below}{clause}; y"));
        // A clause is never broken.
        let long = "z".repeat(200);
        assert_eq!(folded(&long), long);
    }
}
