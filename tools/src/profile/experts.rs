//! `emberflow profile` for mixtures of experts: records routing.

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use emberflow_engine::{Engine, FfnSeen, Logits, Model};
use emberflow_models::config::ModelConfig;
use emberflow_predictor::stats::ExpertStats;
use emberflow_predictor::stats::routing::{ExpertMisses, Routing, SIXTEENTHS};
use emberflow_predictor::{RouteRecorder, RouteTrace, RoutedSubject};
use emberflow_storage::cache::Key;
use serde::Serialize;

use super::Cut;
use crate::activity::original_ids;
use crate::cli::ProfileRunArgs;
use crate::cold::Cold;
use crate::model::open_routed;
use crate::tell::tell;
use crate::{Failure, atomic, interrupt, print_json, progress};

/// Memory limit of the route trace used to count cache misses.
const TRACE_BYTES: usize = 32 << 20;

/// Tokens that warm up a cache before misses are counted.
const WARM_UP: usize = 64;

/// Output of `profile --json`. Keys are a contract.
#[derive(Debug, Serialize)]
struct RoutingProfile {
    /// Path of the statistics.
    output: String,
    /// Tokens profiled.
    tokens: u64,
    /// Share of a layer's experts that receives 90 % of its routes, mean over layers.
    popular: f64,
    /// Share of a token's experts that the next token also visits, mean over layers.
    reuse: f64,
    /// Duration.
    seconds: f64,
}

/// Profiles `model`, a mixture of experts, on a text.
pub fn run(
    args: &ProfileRunArgs,
    model: Model,
    cut: &Cut,
    output: &Path,
    start: Instant,
) -> Result<(), Failure> {
    let subject = subject(&model, cut);
    let c = model.text().config().clone();
    let original = original_ids(model.container(), &c)?;
    let reserve = RouteRecorder::bytes_for(&subject);
    let mut engine = open_routed(model, &args.engine, cut.positions(), reserve, args.force)?;
    let mut recorder = RouteRecorder::new(subject);
    let fired = record(&mut engine, &mut recorder, cut, args.stop_after)?;
    drop(engine);
    let misses = misses(recorder.trace())?;
    let mut stats = recorder.stats(misses);
    let routing = stats.profile.as_mut().and_then(|p| p.routing.as_mut());
    if let Some(routing) = routing {
        add_neurons(routing, &c, &fired, &original);
    }
    atomic::write(output, &stats.to_bytes().map_err(Failure::stats(output))?)?;
    let profile = stats.profile.as_deref();
    let routing = profile.and_then(|p| p.routing.as_ref());
    let (popular, reuse) = match (profile, routing) {
        (Some(profile), Some(routing)) => means(routing, profile.pairs),
        _ => (0.0, 0.0),
    };
    let done = RoutingProfile {
        output: output.display().to_string(),
        tokens: stats.tokens,
        popular,
        reuse,
        seconds: start.elapsed().as_secs_f64(),
    };
    if args.json {
        return print_json(&done);
    }
    writeln!(
        std::io::stdout().lock(),
        "{}: {} tokens in windows of {}, {:.1} % of the experts receive 90 % of the routes, {:.1} % of a \
         token's experts are reused from the token before, {:.1} s",
        done.output,
        done.tokens,
        cut.window,
        100.0 * done.popular,
        100.0 * done.reuse,
        done.seconds
    )?;
    Ok(())
}

/// Popularity and reuse, means over layers with experts.
pub fn means(routing: &Routing, pairs: u64) -> (f64, f64) {
    let routed = || routing.layers.iter().filter(|l| !l.visits.is_empty());
    let count = routed().count().max(1) as f64;
    let popular = routed().map(|l| l.covering(0.9)).sum::<f64>();
    let reuse = routed()
        .map(|l| l.reuse(pairs, routing.chosen))
        .sum::<f64>();
    (popular / count, reuse / count)
}

fn subject(model: &Model, cut: &Cut) -> RoutedSubject {
    let c = model.text().config();
    let neurons = cut.subject(model.text().meta());
    let experts = |layer| c.mixture_of(layer).map_or(0, |_| c.experts);
    let chosen = c.mixture.as_ref().map_or(0, |m| m.chosen as usize);
    let row = 2 * (c.ffn_layers().count() * chosen).max(1);
    RoutedSubject {
        model: neurons.model,
        text: neurons.text,
        experts: c.ffn_layers().map(experts).collect(),
        chosen,
        window: neurons.window,
        stored: (TRACE_BYTES / row).min(cut.ids.len()),
    }
}

/// Adds activation counts of experts' neurons. `fired` holds counts by bank in packed order, `original` the original
/// numbers.
fn add_neurons(routing: &mut Routing, c: &ModelConfig, fired: &[Vec<u64>], original: &[Vec<u32>]) {
    for ((number, bank), fired) in c.banks().enumerate().zip(fired) {
        let layer = &mut routing.layers[bank.place as usize];
        // Shared experts and dense layers have no router.
        if bank.expert as usize >= layer.visits.len() {
            continue;
        }
        let mut counts = fired.clone();
        let ids = original.get(number).map_or(&[][..], |ids| ids);
        for (&id, &count) in ids.iter().zip(fired) {
            counts[id as usize] = count;
        }
        layer.neurons.push(ExpertStats {
            expert: bank.expert,
            counts,
            original: Vec::new(),
        });
    }
}

/// Runs all windows, at most `stop_after` of them. Returns activation counts per bank and neuron.
fn record(
    engine: &mut Engine,
    recorder: &mut RouteRecorder,
    cut: &Cut,
    stop_after: Option<u64>,
) -> Result<Vec<Vec<u64>>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    interrupt::on_ctrl_c(&stop);
    let bar = progress::steps("profiling", cut.ids.len() as u64);
    let mut sequence = engine.new_sequence()?;
    let mut fired: Vec<Vec<u64>> = Vec::new();
    for (passed, body) in (1..).zip(cut.ids.chunks(cut.window as usize)) {
        sequence.clear();
        // BOS is not part of the text.
        let chunk = engine.chunk();
        for piece in cut.start.chunks(chunk) {
            engine.forward(&mut sequence, piece, Logits::None)?;
            engine.take_fired();
        }
        for (at, piece) in (0..).step_by(chunk).zip(body.chunks(chunk)) {
            let mut see = |seen: &FfnSeen<'_>| {
                let experts = seen.choices.iter().map(|choice| choice.expert);
                recorder.see(seen.layer, at, 0, experts);
            };
            engine.forward_observed(&mut sequence, piece, Logits::None, &mut see)?;
        }
        recorder.end_window(body.len());
        add(&mut fired, engine.take_fired());
        bar.inc(body.len() as u64);
        if stop.load(Ordering::Relaxed) || stop_after == Some(passed) {
            bar.finish_and_clear();
            tell(format_args!(
                "stopped after {} of {} tokens; their statistics are lost (use --limit for fewer tokens)",
                recorder.tokens(),
                cut.ids.len()
            ));
            return Err(Failure::Interrupted);
        }
    }
    bar.finish_and_clear();
    Ok(fired)
}

/// Adds the counts of a window to the total.
fn add(all: &mut Vec<Vec<u64>>, window: Vec<Vec<u64>>) {
    if all.is_empty() {
        *all = window;
        return;
    }
    let counts = all.iter_mut().flatten().zip(window.iter().flatten());
    counts.for_each(|(all, count)| *all += count);
}

/// Miss rates of the engine's cache, filled with the most popular experts, for several sizes. Empty if the trace is
/// too short.
fn misses(trace: &RouteTrace) -> Result<ExpertMisses, Failure> {
    let mut misses = ExpertMisses::default();
    let layers = trace.visits().len();
    if trace.tokens() < 2 * WARM_UP {
        return Ok(misses);
    }
    let sizes: Vec<u32> = trace.visits().iter().map(|v| v.len() as u32).collect();
    let all = sizes.iter().map(|&n| u64::from(n)).sum::<u64>();
    for token in WARM_UP..trace.tokens() {
        let needed = (0..layers).map(|layer| trace.experts(token, layer).count() as u64);
        misses.needed += needed.sum::<u64>();
    }
    let tokens = trace.tokens() as f64;
    for (size, missed) in (1..=SIXTEENTHS as u64).zip(&mut misses.missed) {
        let slots = (all * size).div_ceil(SIXTEENTHS as u64 + 1);
        let mut cold = Cold::of_experts(slots, trace.visits(), tokens as u64)?;
        for token in 0..trace.tokens() {
            for layer in 0..layers {
                cold.begin_layer(layer as u32);
                for expert in trace.experts(token, layer) {
                    let there = cold.find(Key::new(layer as u32, expert));
                    *missed += u64::from(!there && token >= WARM_UP);
                }
                cold.end_layer();
            }
        }
    }
    Ok(misses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_caches_miss_less_and_popular_experts_stay() {
        let tokens = 400;
        let mut recorder = RouteRecorder::new(RoutedSubject {
            model: "m".into(),
            text: 1,
            experts: vec![16, 16],
            chosen: 2,
            window: tokens,
            stored: tokens,
        });
        for layer in 0..2 {
            // Every token visits expert 0, and one of the others in round robin.
            let experts = (0..tokens as u32).flat_map(|t| [0, 1 + t % 15]);
            recorder.see(layer, 0, 0, experts);
        }
        recorder.end_window(tokens);
        let misses = misses(recorder.trace()).unwrap();
        let rate = |size: usize| misses.rate(size as f64 / 16.0).unwrap();
        assert_eq!(misses.needed, 4 * (tokens - WARM_UP) as u64);
        // A cyclic scan misses every access until everything fits.
        assert!((rate(8) - 0.5).abs() < 0.3, "{}", rate(8));
        assert!((2..16).all(|size| rate(size) >= rate(size + 1)));
        assert_eq!(rate(16), 0.0);
    }
}
