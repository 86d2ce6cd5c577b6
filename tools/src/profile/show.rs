//! `emberflow profile show`: prints and plots statistics.

use std::fmt::Write as _;
use std::io::Write as _;

use emberflow_predictor::stats::misses::SIZES;
use emberflow_predictor::stats::{ActivationStats, BATCHES, Misses, Profile, hot_share};
use serde::Serialize;

use super::published::CURVES;
use super::show_experts;
use crate::chart::{Axes, Panel, panels};
use crate::cli::ProfileShowArgs;
use crate::{Failure, atomic, print_json};

/// Shares of steps above which a neuron counts as hot, and as nearly always active.
const HOT: [f64; 2] = [0.5, 0.9];

/// Output of `profile show --json`. Keys are a contract.
#[derive(Debug, Serialize)]
struct Shown {
    /// Path of the statistics.
    file: String,
    /// Tokens profiled.
    tokens: u64,
    /// Model and checkpoint; absent in files with counts only.
    model: Option<String>,
    /// Tokens per window; absent in files with counts only. A batch of n takes n windows.
    window: Option<u32>,
    /// Tokens sampled with all their active neurons.
    sampled: usize,
    /// Miss rates by cache size; empty if not measured.
    misses: Vec<NeuronMiss>,
    /// Per layer.
    layers: Vec<LayerSummary>,
    /// Share of neurons that accounts for 80 % of activations in published models (PowerInfer, figure 4; bamboo from
    /// PowerInfer-2).
    published_hot_share_80: Vec<(&'static str, f64)>,
}

/// Miss rate for one cache size. Keys are a contract.
#[derive(Debug, Serialize)]
struct NeuronMiss {
    /// Cache size as a share of the neurons.
    cache: f64,
    /// Share of needed neurons that miss.
    missed: f64,
}

/// One layer. Keys are a contract.
#[derive(Debug, Serialize)]
struct LayerSummary {
    /// Layer number.
    layer: u32,
    /// Mean share of active neurons per token.
    active_share: f64,
    /// Share of neurons that accounts for 80 % of activations.
    hot_share_80: f64,
    /// Share of activations with a nonzero hidden value; less than 1 if Up has a ReLU.
    contributing: Option<f64>,
    /// Probability that a neuron active for a token is also active for the next.
    persistence: Option<f64>,
    /// The same 8, 32 and 128 tokens later; empty in older files.
    persistence_later: Vec<f64>,
    /// By batch size.
    batches: Vec<Batch>,
    /// 10, 25, 50, 75, 90 and 99 % quantiles of nonzero |hidden|.
    hidden_quantiles: Vec<f32>,
}

/// One batch size. Keys are a contract.
#[derive(Debug, Serialize)]
struct Batch {
    /// Tokens per batch.
    size: usize,
    /// Batches recorded.
    steps: u64,
    /// Mean share of neurons active for at least one token of the batch.
    active_share: f64,
    /// Share of neurons active in at least half of the batches.
    hot_50: f64,
    /// Share of neurons active in at least 90 % of the batches.
    hot_90: f64,
}

/// Runs the command.
pub fn command(args: &ProfileShowArgs) -> Result<(), Failure> {
    atomic::may_write_each([&args.svg], args.force, &[Some(&args.stats)])?;
    let bytes = std::fs::read(&args.stats).map_err(Failure::file(&args.stats))?;
    let stats = ActivationStats::read(&bytes).map_err(Failure::stats(&args.stats))?;
    let file = args.stats.display().to_string();
    let profile = stats.profile.as_deref();
    if let Some((profile, routing)) = profile.and_then(|p| Some((p, p.routing.as_ref()?))) {
        let shown = show_experts::shown(file, &stats, profile, routing);
        if let Some(path) = &args.svg {
            atomic::write(path, show_experts::svg(&shown).as_bytes())?;
        }
        if args.json {
            return print_json(&shown);
        }
        let text = show_experts::text(&shown);
        return Ok(std::io::stdout().lock().write_all(text.as_bytes())?);
    }
    let shown = shown(file, &stats);
    if let Some(path) = &args.svg {
        atomic::write(path, svg(&stats, &shown).as_bytes())?;
    }
    if args.json {
        return print_json(&shown);
    }
    Ok(std::io::stdout()
        .lock()
        .write_all(text(&shown).as_bytes())?)
}

fn shown(file: String, stats: &ActivationStats) -> Shown {
    let profile = stats.profile.as_deref();
    let shares = stats.active_share();
    let experts = stats
        .layers
        .iter()
        .flat_map(|l| l.experts.iter().map(|e| (l.layer, e)));
    let layers = experts.enumerate().map(|(b, (layer, expert))| {
        let fired: f64 = expert.counts.iter().map(|&c| c as f64).sum();
        let part = |list: &[u64]| list.iter().map(|&c| c as f64).sum::<f64>() / fired.max(1.0);
        let bank = profile.and_then(|p| p.banks.get(b));
        LayerSummary {
            layer,
            active_share: shares.get(layer as usize).copied().unwrap_or(0.0),
            hot_share_80: hot_share(&expert.counts, 0.8),
            contributing: bank.map(|b| part(&b.contributed)),
            persistence: bank.map(|b| part(&b.stayed)),
            persistence_later: bank.map_or(Vec::new(), |b| {
                b.later.iter().filter_map(|l| l.share()).collect()
            }),
            batches: profile.map_or(Vec::new(), |p| batches(p, &expert.counts, b)),
            hidden_quantiles: bank.map_or(Vec::new(), |b| {
                let at = [0.1, 0.25, 0.5, 0.75, 0.9, 0.99];
                at.iter().filter_map(|&q| b.hidden.quantile(q, 0)).collect()
            }),
        }
    });
    Shown {
        file,
        tokens: stats.tokens,
        model: profile.map(|p| p.model.clone()),
        window: profile.map(|p| p.window),
        sampled: profile.map_or(0, |p| p.sample.tokens().len()),
        misses: profile.map_or(Vec::new(), |p| misses(&p.misses)),
        layers: layers.collect(),
        published_hot_share_80: CURVES.to_vec(),
    }
}

fn batches(profile: &Profile, counts: &[u64], bank: usize) -> Vec<Batch> {
    let of = |(i, size): (usize, &usize)| {
        let steps = profile.steps[i];
        let list = profile.union(counts, bank, i).filter(|_| steps > 0)?;
        let n = list.len().max(1) as f64;
        let share = |c: u64| c as f64 / steps as f64;
        let above = |limit: f64| list.iter().filter(|&&c| share(c) >= limit).count() as f64 / n;
        Some(Batch {
            size: *size,
            steps,
            active_share: list.iter().map(|&c| share(c)).sum::<f64>() / n,
            hot_50: above(HOT[0]),
            hot_90: above(HOT[1]),
        })
    };
    BATCHES.iter().enumerate().filter_map(of).collect()
}

fn misses(counted: &Misses) -> Vec<NeuronMiss> {
    if counted.is_empty() {
        return Vec::new();
    }
    let of = |(size, &cache): (usize, &f64)| NeuronMiss {
        cache,
        missed: counted.rate(size),
    };
    SIZES.iter().enumerate().map(of).collect()
}

fn text(s: &Shown) -> String {
    let mut out = format!("{}: {} tokens", s.file, s.tokens);
    // Writing to a String cannot fail.
    let _ = match &s.model {
        Some(model) => writeln!(out, " of {model}, {} sampled", s.sampled),
        None => writeln!(out, "; counts only (profile the model for more)"),
    };
    let _ = writeln!(
        out,
        "layer  active  80 % from  reuse after 1, 8, 32, 128  contributing  |hidden| at 10 50 90 %"
    );
    s.layers.iter().for_each(|l| layer_line(&mut out, l));
    batch_lines(&mut out, s);
    if !s.misses.is_empty() {
        let percent =
            |m: &NeuronMiss| format!("{:.0} %: {:.1} %", 100.0 * m.cache, 100.0 * m.missed);
        let misses: Vec<String> = s.misses.iter().map(percent).collect();
        let _ = writeln!(
            out,
            "cache misses by cache size (share of all neurons): {}",
            misses.join("  ")
        );
    }
    let published: Vec<String> = (s.published_hot_share_80.iter())
        .map(|(name, share)| format!("{name} {:.0} %", 100.0 * share))
        .collect();
    let _ = writeln!(
        out,
        "neurons for 80 % of activations, published: {}",
        published.join(", ")
    );
    out
}

fn layer_line(out: &mut String, l: &LayerSummary) {
    let percent = |v: Option<f64>| v.map_or("-".into(), |v| format!("{:.1} %", 100.0 * v));
    let q = |i: usize| {
        l.hidden_quantiles
            .get(i)
            .map_or("-".into(), |q| format!("{q:.2e}"))
    };
    let _ = writeln!(
        out,
        "{:>5} {:>7} {:>10} {:>8} {:>6} {:>6} {:>6} {:>12}  {} {} {}",
        l.layer,
        percent(Some(l.active_share)),
        percent(Some(l.hot_share_80)),
        percent(l.persistence),
        percent(l.persistence_later.first().copied()),
        percent(l.persistence_later.get(1).copied()),
        percent(l.persistence_later.get(2).copied()),
        percent(l.contributing),
        q(0),
        q(2),
        q(4)
    );
}

fn batch_lines(out: &mut String, s: &Shown) {
    if s.layers.iter().any(|l| !l.batches.is_empty()) {
        let _ = writeln!(
            out,
            "neurons active in a batch of 1, 2 … (in 50 % of the batches; in 90 %):"
        );
    }
    for l in s.layers.iter().filter(|l| !l.batches.is_empty()) {
        let _ = write!(out, "{:>5}", l.layer);
        for b in &l.batches {
            let [a, h, n] = [b.active_share, b.hot_50, b.hot_90].map(|v| 100.0 * v);
            let _ = write!(out, "  {}: {a:.0} % ({h:.0}; {n:.0})", b.size);
        }
        out.push('\n');
    }
    if let (Some(window), Some(layer)) = (s.window, s.layers.first()) {
        let seen = |size: &usize| layer.batches.iter().any(|b| b.size == *size);
        for size in BATCHES.iter().filter(|size| !seen(size)) {
            let _ = writeln!(
                out,
                "no batch of {size} was recorded: it needs {size} windows of {window} tokens, a text of {} \
                 tokens",
                *size as u64 * u64::from(window)
            );
        }
    }
}

/// Plots skew, activity by batch size, and persistence.
fn svg(stats: &ActivationStats, s: &Shown) -> String {
    let experts = || stats.layers.iter().flat_map(|l| &l.experts);
    let name = |l: &LayerSummary| format!("layer {}", l.layer);
    let mut skew: Vec<(String, Vec<(f64, f64)>)> = s
        .layers
        .iter()
        .zip(experts())
        .map(|(l, e)| (name(l), cumulative(&e.counts)))
        .collect();
    // A published value is one point of a curve.
    skew.extend(s.published_hot_share_80.iter().map(|&(name, share)| {
        let mark = vec![(share, 0.77), (share, 0.83)];
        (format!("{name} (published)"), mark)
    }));
    let mut charts = vec![Panel {
        title: "skew: share of activations from the hottest neurons".into(),
        x: "share of neurons, hottest first",
        y: "share of activations",
        curves: skew,
    }];
    if let Some(p) = stats.profile.as_deref() {
        let curves = BATCHES.iter().enumerate().filter(|&(i, _)| p.steps[i] > 0);
        let curves = curves.map(|(i, size)| (format!("batch {size}"), frequency(stats, p, i)));
        charts.push(Panel {
            title: "activity by batch size, mean over layers".into(),
            x: "share of neurons, most active first",
            y: "share of batches in which they are active",
            curves: curves.collect(),
        });
        let curves = s
            .layers
            .iter()
            .zip(experts())
            .zip(&p.banks)
            .map(|((l, e), bank)| (name(l), persistence(&e.counts, &bank.stayed)));
        charts.push(Panel {
            title: "persistence: active again for the next token".into(),
            x: "share of neurons, hottest first",
            y: "probability of being active again",
            curves: curves.collect(),
        });
    }
    let title = s.model.as_deref().unwrap_or("activation statistics");
    panels(
        &format!("{title}: {} tokens", s.tokens),
        Axes::Shares,
        &charts,
    )
}

fn falling(list: &[u64]) -> Vec<u64> {
    let mut sorted = list.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    sorted
}

/// Maximum points of a curve.
const POINTS: usize = 128;

/// At most [`POINTS`] evenly spaced entries of a list, with their relative positions.
fn thin<T: Copy>(list: &[T]) -> impl Iterator<Item = (f64, T)> {
    let step = list.len().div_ceil(POINTS).max(1);
    let n = list.len().max(1) as f64;
    let places = list.iter().enumerate().step_by(step);
    places.map(move |(i, v)| ((i as f64 + 1.0) / n, *v))
}

fn cumulative(counts: &[u64]) -> Vec<(f64, f64)> {
    let all: f64 = counts.iter().map(|&c| c as f64).sum();
    let sums = falling(counts).into_iter().scan(0.0, |sum, c| {
        *sum += c as f64;
        Some(*sum / all.max(1.0))
    });
    thin(&sums.collect::<Vec<_>>()).collect()
}

fn frequency(stats: &ActivationStats, profile: &Profile, size: usize) -> Vec<(f64, f64)> {
    let experts = stats.layers.iter().flat_map(|l| &l.experts);
    let mut mean: Vec<f64> = Vec::new();
    for (bank, expert) in experts.enumerate() {
        let list = profile
            .union(&expert.counts, bank, size)
            .unwrap_or_default();
        mean.resize(list.len(), 0.0);
        for (m, c) in mean.iter_mut().zip(falling(list)) {
            let steps = profile.steps[size] as f64 * profile.banks.len() as f64;
            *m += c as f64 / steps.max(1.0);
        }
    }
    thin(&mean).collect()
}

/// Persistence by temperature, averaged over neighbours to reduce noise.
fn persistence(counts: &[u64], stayed: &[u64]) -> Vec<(f64, f64)> {
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(counts[i]));
    let n = order.len().max(1) as f64;
    let group = order.len().div_ceil(32).max(1);
    let points = order.chunks(group).enumerate().map(|(g, ids)| {
        let sum = |list: &[u64]| ids.iter().map(|&i| list[i] as f64).sum::<f64>();
        let x = (g * group) as f64 + ids.len() as f64 / 2.0;
        (x / n, sum(stayed) / sum(counts).max(1.0))
    });
    points.collect()
}
