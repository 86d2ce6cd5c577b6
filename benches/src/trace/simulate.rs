//! `emberflow-lab trace simulate`: replays a trace on caches of several sizes and policies.

use std::io::Write as _;

use emberflow_engine::{CLUSTER, GATE_PIECES};
use emberflow_storage::io::{Merge, aligned_cover};
use emberflow_storage::limits::Limits;
use serde::Serialize;

use super::Trace;
use super::belady::{Belady, Future};
use super::eviction::{Cache, Lfu, Lru, S3Fifo};
use super::format::Header;
use super::shipped::{Shipped, ShippedExperts};
use crate::cli::{EvictionArg, TraceSimulateArgs};
use emberflow::chart::{Axes, Panel, panels};
use emberflow::{Failure, atomic, print_json, progress};

/// Output of the command. JSON keys are a contract.
#[derive(Debug, Serialize)]
struct Simulated {
    /// The trace.
    trace: String,
    /// Its model.
    model: String,
    /// `neurons` or `experts`.
    unit: &'static str,
    /// Counted tokens, after the warm-up.
    tokens: usize,
    /// Tokens that filled the caches first.
    warm_up: usize,
    /// Mean share needed per token.
    active_share: f64,
    /// Results by size and policy.
    results: Vec<SimulatedRow>,
}

/// Result of one size and policy. JSON keys are a contract.
#[derive(Debug, Serialize)]
struct SimulatedRow {
    /// Share of all neurons or experts that fits in the cache.
    cache: f64,
    /// Name of the policy.
    policy: &'static str,
    /// Misses per needed neuron or expert.
    miss_rate: f64,
    /// Miss rate relative to Belady's optimum with forced admission.
    #[serde(skip_serializing_if = "Option::is_none")]
    to_belady: Option<f64>,
    /// Neurons or experts read per token.
    misses_per_token: f64,
    /// Read commands per token, with neighbours merged as in the I/O engine.
    reads_per_token: f64,
    /// Bytes read per token, including gaps between merged neighbours.
    bytes_per_token: f64,
}

impl EvictionArg {
    fn name(self) -> &'static str {
        match self {
            Self::Shipped => "shipped",
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::S3fifo => "s3fifo",
            Self::Belady => "belady",
            Self::BeladyBypass => "belady-bypass",
        }
    }
}

/// Runs the command.
pub fn command(args: &TraceSimulateArgs) -> Result<(), Failure> {
    atomic::may_write_each([&args.svg], args.force, &[Some(&args.trace)])?;
    let trace = Trace::load(&args.trace)?;
    let warm_up = match args.warm_up {
        Some(n) => usize::try_from(n).unwrap_or(usize::MAX),
        None => trace.tokens / 10,
    };
    if warm_up >= trace.tokens {
        return Err(Failure::usage(format!(
            "a warm-up of {warm_up} tokens; the trace has {}",
            trace.tokens
        )));
    }
    let future = Future::of(&trace);
    let bar = progress::steps(
        "simulating",
        (args.cache.len() * args.policy.len() * trace.tokens) as u64,
    );
    let mut results = Vec::new();
    for &share in &args.cache {
        let capacity = ((share * trace.universe() as f64) as usize).max(1);
        let first = results.len();
        for &policy in &args.policy {
            let universe = trace.universe();
            let mut cache: Box<dyn Cache + '_> = match policy {
                EvictionArg::Shipped if trace.header.experts => {
                    Box::new(ShippedExperts::new(&trace.header, capacity)?)
                }
                EvictionArg::Shipped => Box::new(Shipped::new(&trace.header, capacity)?),
                EvictionArg::Lru => Box::new(Lru::new(universe, capacity)),
                EvictionArg::Lfu => Box::new(Lfu::new(universe, capacity)),
                EvictionArg::S3fifo => Box::new(S3Fifo::new(universe, capacity)),
                EvictionArg::Belady => Box::new(Belady::new(&future, universe, capacity, false)),
                EvictionArg::BeladyBypass => {
                    Box::new(Belady::new(&future, universe, capacity, true))
                }
            };
            let sums = replay(&trace, cache.as_mut(), warm_up);
            bar.inc(trace.tokens as u64);
            results.push(sums.row(share, policy.name(), trace.tokens - warm_up));
        }
        let optimum = results[first..].iter().find(|r| r.policy == "belady");
        if let Some(optimum) = optimum.map(|r| r.miss_rate) {
            for row in &mut results[first..] {
                row.to_belady = Some(row.miss_rate / optimum.max(f64::MIN_POSITIVE));
            }
        }
    }
    bar.finish_and_clear();
    let needed = trace.keys().len() as f64;
    let simulated = Simulated {
        trace: args.trace.display().to_string(),
        model: trace.header.model.clone(),
        unit: trace.header.unit(),
        tokens: trace.tokens - warm_up,
        warm_up,
        active_share: needed / (trace.tokens * trace.universe()).max(1) as f64,
        results,
    };
    if let Some(path) = &args.svg {
        atomic::write(path, svg(&simulated).as_bytes())?;
    }
    if args.json {
        return print_json(&simulated);
    }
    print(&simulated)
}

#[derive(Default)]
struct Sums {
    needed: u64,
    missed: u64,
    reads: u64,
    bytes: u64,
}

impl Sums {
    fn row(&self, cache: f64, policy: &'static str, tokens: usize) -> SimulatedRow {
        let per_token = |n: u64| n as f64 / tokens.max(1) as f64;
        SimulatedRow {
            cache,
            policy,
            miss_rate: self.missed as f64 / self.needed.max(1) as f64,
            to_belady: None,
            misses_per_token: per_token(self.missed),
            reads_per_token: per_token(self.reads),
            bytes_per_token: per_token(self.bytes),
        }
    }
}

fn replay(trace: &Trace, cache: &mut dyn Cache, warm_up: usize) -> Sums {
    let mut sums = Sums::default();
    let mut missing = Vec::new();
    let layers = trace.header.layers;
    for step in 0..trace.steps() {
        missing.clear();
        cache.step(step, trace.step(step), &mut missing);
        if step / layers < warm_up {
            continue;
        }
        sums.needed += trace.step(step).len() as u64;
        sums.missed += missing.len() as u64;
        let (reads, bytes) = reads(&trace.header, &mut missing);
        sums.reads += reads;
        sums.bytes += bytes;
    }
    sums
}

/// (Commands, bytes) for the missing neurons of one layer. The engine requests Up and Down of each,
/// one piece of the layer at a time; the I/O engine sorts a batch and merges neighbours.
///
/// An expert is read whole, with the longest possible commands.
fn reads(header: &Header, missing: &mut [u32]) -> (u64, u64) {
    if header.experts {
        let each = header.stride.div_ceil(Limits::PRODUCTION.block);
        let count = missing.len() as u64;
        return (count * u64::from(each), count * u64::from(header.stride));
    }
    missing.sort_unstable();
    let neurons = header.neurons as u32;
    let clusters = header.neurons.div_ceil(CLUSTER);
    let piece = (clusters.div_ceil(GATE_PIECES) * CLUSTER) as u32;
    let limits = Limits::PRODUCTION;
    let (mut reads, mut bytes) = (0, 0);
    for batch in missing.chunk_by(|a, b| a % neurons / piece == b % neurons / piece) {
        let mut open: Option<Merge> = None;
        for &key in batch {
            let bundle = header.offsets[(key / neurons) as usize]
                + u64::from(key % neurons) * u64::from(header.stride);
            let from = bundle + u64::from(header.rest_read);
            let len = u64::from(header.stride - header.rest_read);
            let unit = u64::from(header.sector);
            // A validated header's offsets and lengths cannot overflow.
            let Some((at, len, _)) = aligned_cover(from, len, unit) else {
                continue;
            };
            if let Some(command) = open
                && let Some(gap) = command.gap(at, len, unit, &limits)
            {
                open = Some(command.with(gap, len));
                bytes += gap + len;
                continue;
            }
            open = Some(Merge::new(at, len));
            reads += 1;
            bytes += len;
        }
    }
    (reads, bytes)
}

fn print(s: &Simulated) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{}: {} tokens of {} after {} to warm up, {:.1} % of {} needed per token",
        s.trace,
        s.tokens,
        s.model,
        s.warm_up,
        100.0 * s.active_share,
        s.unit
    )?;
    writeln!(
        out,
        "cache  policy         miss rate  / belady  misses/token  reads/token  KiB/token"
    )?;
    for r in &s.results {
        writeln!(
            out,
            "{:>4.0} %  {:<13} {:>8.2} %  {:>8}  {:>12.1}  {:>11.1}  {:>9.0}",
            100.0 * r.cache,
            r.policy,
            100.0 * r.miss_rate,
            r.to_belady.map_or("-".into(), |x| format!("{x:.2}")),
            r.misses_per_token,
            r.reads_per_token,
            r.bytes_per_token / 1024.0
        )?;
    }
    writeln!(
        out,
        "belady is the optimum among caches that keep what they read, as all others here do; \
         belady-bypass need not"
    )?;
    Ok(())
}

fn svg(s: &Simulated) -> String {
    let mut names: Vec<&str> = s.results.iter().map(|r| r.policy).collect();
    names.dedup();
    names.sort_unstable();
    names.dedup();
    let curve = |name: &&str| {
        let mut points: Vec<(f64, f64)> = (s.results.iter())
            .filter(|r| r.policy == *name)
            .map(|r| (r.cache, r.miss_rate))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        (name.to_string(), points)
    };
    let panel = Panel {
        title: format!("{}: {} tokens", s.model, s.tokens),
        x: match s.unit {
            "experts" => "share of experts in the cache",
            _ => "share of neurons in the cache",
        },
        y: "share of what is needed that must be read",
        curves: names.iter().map(curve).collect(),
    };
    panels("misses by cache size and policy", Axes::Shares, &[panel])
}
