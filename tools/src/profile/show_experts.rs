//! `emberflow profile show` for mixtures of experts.

use std::fmt::Write as _;

use emberflow_predictor::stats::routing::{Routing, SIXTEENTHS};
use emberflow_predictor::stats::{ActivationStats, Profile, hot_share};
use serde::Serialize;

use super::experts::means;
use crate::chart::{Labels, heat};

/// Output of `profile show --json`. Keys are a contract.
#[derive(Debug, Serialize)]
pub struct ShownExperts {
    /// Path of the statistics.
    file: String,
    /// Tokens profiled.
    tokens: u64,
    /// Model and checkpoint.
    model: String,
    /// Tokens per window.
    window: u32,
    /// Experts per layer.
    experts: u32,
    /// Experts per token.
    chosen: u32,
    /// Share of experts that receives 90 % of the routes, mean over layers.
    popular: f64,
    /// Share of a token's experts that the next token also visits, mean over layers.
    reuse: f64,
    /// Miss rates of the engine's cache by size; empty if not measured.
    misses: Vec<ExpertMiss>,
    /// Per layer.
    layers: Vec<LayerRoutes>,
}

/// Miss rate for one cache size. Keys are a contract.
#[derive(Debug, Serialize)]
struct ExpertMiss {
    /// Cache size as a share of all experts.
    cache: f64,
    /// Share of visits that miss.
    missed: f64,
}

/// One layer. Keys are a contract.
#[derive(Debug, Serialize)]
struct LayerRoutes {
    /// Layer number.
    layer: usize,
    /// Share of tokens that visit each expert.
    popularity: Vec<f64>,
    /// Share of routes to the most popular expert.
    top: f64,
    /// Share of experts that receives 50 % and 90 % of the routes.
    covering_50: f64,
    covering_90: f64,
    /// Share of a token's experts that the next token also visits.
    reuse: f64,
    /// Expected reuse if tokens were routed independently by popularity.
    reuse_by_popularity: f64,
    /// The pair of experts with the highest lift.
    together: Option<Pair>,
    /// Share of a visited expert's neurons that are active; absent if not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    active_share: Option<f64>,
    /// Share of the layer's neurons that accounts for 80 % of activations.
    #[serde(skip_serializing_if = "Option::is_none")]
    hot_share: Option<f64>,
}

/// A pair of experts. Keys are a contract.
#[derive(Debug, Serialize)]
struct Pair {
    /// Expert numbers.
    experts: [u32; 2],
    /// Share of tokens that visit both.
    share: f64,
    /// Frequency relative to independent routing.
    lift: f64,
}

/// Summarizes routing statistics.
pub fn shown(
    file: String,
    stats: &ActivationStats,
    profile: &Profile,
    routing: &Routing,
) -> ShownExperts {
    let tokens = stats.tokens;
    let routed = routing.layers.iter().enumerate();
    let routed = routed.filter(|(_, layer)| !layer.visits.is_empty());
    let layers = routed.map(|(number, layer)| {
        let popularity: Vec<f64> = layer.popularity(tokens).collect();
        let chosen = f64::from(routing.chosen);
        let firing = layer.firing();
        let mean = |f: Vec<f32>| f.iter().map(|&p| f64::from(p)).sum::<f64>() / f.len() as f64;
        let counts: Vec<u64> = layer
            .neurons
            .iter()
            .flat_map(|e| e.counts.clone())
            .collect();
        LayerRoutes {
            hot_share: firing.as_ref().map(|_| hot_share(&counts, 0.8)),
            active_share: firing.map(mean),
            layer: number,
            top: popularity.iter().copied().fold(0.0, f64::max) / chosen,
            covering_50: layer.covering(0.5),
            covering_90: layer.covering(0.9),
            reuse: layer.reuse(profile.pairs, routing.chosen),
            reuse_by_popularity: popularity.iter().map(|p| p * p).sum::<f64>() / chosen,
            together: layer.closest(tokens).map(|pair| Pair {
                experts: pair.experts,
                share: pair.tokens as f64 / tokens.max(1) as f64,
                lift: pair.lift,
            }),
            popularity,
        }
    });
    let sizes = (1..=SIXTEENTHS).map(|n| n as f64 / (SIXTEENTHS + 1) as f64);
    let miss = |cache| {
        let missed = routing.misses.rate(cache)?;
        Some(ExpertMiss { cache, missed })
    };
    let (popular, reuse) = means(routing, profile.pairs);
    ShownExperts {
        file,
        tokens,
        model: profile.model.clone(),
        window: profile.window,
        experts: routing.experts,
        chosen: routing.chosen,
        popular,
        reuse,
        misses: sizes.filter_map(miss).collect(),
        layers: layers.collect(),
    }
}

/// Formats the summary as text.
pub fn text(s: &ShownExperts) -> String {
    let percent = |v: f64| format!("{:.1} %", 100.0 * v);
    // Writing to a String cannot fail.
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{}: {} tokens of {}, {} of {} experts per token",
        s.file, s.tokens, s.model, s.chosen, s.experts
    );
    let _ = writeln!(
        out,
        "layer  top expert  50 % from  90 % from   reuse  by popularity  top pair"
    );
    for l in &s.layers {
        let pair = l.together.as_ref().map_or("-".into(), |p| {
            format!(
                "{} and {}: {}, {:.1} times chance",
                p.experts[0],
                p.experts[1],
                percent(p.share),
                p.lift
            )
        });
        let _ = writeln!(
            out,
            "{:>5} {:>11} {:>10} {:>10} {:>7} {:>14}  {pair}",
            l.layer,
            percent(l.top),
            percent(l.covering_50),
            percent(l.covering_90),
            percent(l.reuse),
            percent(l.reuse_by_popularity)
        );
    }
    let _ = writeln!(
        out,
        "all layers: {} of the experts receive 90 % of the routes, {} of a token's experts are reused",
        percent(s.popular),
        percent(s.reuse)
    );
    let known: Vec<f64> = s.layers.iter().filter_map(|l| l.active_share).collect();
    if !known.is_empty() {
        let hot: f64 = s.layers.iter().filter_map(|l| l.hot_share).sum();
        let of = known.len() as f64;
        let _ = writeln!(
            out,
            "neurons: {} of a visited expert's are active, {} of a layer's account for 80 % of activations",
            percent(known.iter().sum::<f64>() / of),
            percent(hot / of)
        );
    }
    let cut = s.misses.iter().filter(|m| (m.cache * 8.0).fract() == 0.0);
    let misses: Vec<String> = cut
        .map(|m| format!("{:.0} %: {}", 100.0 * m.cache, percent(m.missed)))
        .collect();
    if !misses.is_empty() {
        let _ = writeln!(
            out,
            "cache misses by cache size (share of all experts): {}",
            misses.join("  ")
        );
    }
    out
}

/// Heat map of popularity: one row per layer, most popular expert first.
pub fn svg(s: &ShownExperts) -> String {
    let rows: Vec<(String, Vec<f64>)> = (s.layers.iter())
        .map(|l| {
            let mut falling = l.popularity.clone();
            falling.sort_by(|a, b| b.total_cmp(a));
            (l.layer.to_string(), falling)
        })
        .collect();
    let title = format!("{}: which experts {} tokens visit", s.model, s.tokens);
    let facts = format!(
        "{} of {} experts per token; {:.0} % of the experts receive 90 % of the routes, {:.0} % of a \
         token's experts are reused",
        s.chosen,
        s.experts,
        100.0 * s.popular,
        100.0 * s.reuse
    );
    let labels = Labels {
        title: &title,
        facts: &facts,
        x: "experts of a layer, most popular first",
        y: "layer",
    };
    heat(&labels, "share of the tokens", &rows)
}
