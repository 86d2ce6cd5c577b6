//! Statistics of the generated model, measured by decoding with the engine.
//!
//! The model continues its start token greedily from a temporary container. The inputs of the FFNs
//! are stored; then Gate and Up are applied to all tokens at once, an expert's to the tokens that
//! visit it.

use std::path::{Path, PathBuf};

use emberflow_engine::{Engine, FfnSeen, Logits, Model, Options};
use emberflow_kernels::{Cpu, DType, Workers, argmax};
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Role, TensorId};
use emberflow_models::{Checkpoint, Encoding};
use emberflow_predictor::stats::hot_share;
use emberflow_storage::container::Container;
use serde::Serialize;

use super::routing::{RoutingSeen, RoutingTargets};
use super::vocab::{BOS, SPECIAL, successor};
use emberflow::interrupt::{Unfinished, with_suffix};
use emberflow::pack::{PackOptions, pack};
use emberflow::{Failure, progress};

/// Most bytes of stored FFN inputs. If all layers need more, evenly spaced ones are measured.
const INPUT_BYTES: usize = 256 << 20;
/// Rows that a thread applies to each token.
const ROWS: usize = 16;

/// Measured statistics. JSON keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// Counted tokens, after the warm-up.
    pub tokens: u32,
    /// Counted layers.
    pub layers: u32,
    /// Mean share of neurons that fired per token, among those of its experts.
    pub active: f64,
    /// Share of a layer's neurons that made 80 % of its activations, mean over layers. With few
    /// tokens it appears smaller, since chance is uneven too.
    pub hot_share: f64,
    /// Share of the firing neurons that fired again for the next token; of an expert, if both visit
    /// it.
    pub persistence: f64,
    /// Routing statistics, mean over layers, in a model with experts; without the first layer if
    /// the router reads a layer's input.
    #[serde(flatten)]
    pub routing: Option<RoutingTargets>,
    /// Share of gates that fired, as counted by the engine over all layers and tokens.
    pub engine_active: f64,
    /// Share of tokens that were the walk's next one; 1 if decoding is correct.
    pub walk: f64,
}

/// A file that is deleted on drop.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // Nothing depends on success.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Decodes `tokens` tokens after `warm_up` uncounted ones, with the checkpoint at `path`.
///
/// # Errors
/// No space for a container next to it, or an engine error.
pub fn measure(
    path: &Path,
    encoding: Encoding,
    tokens: usize,
    warm_up: usize,
) -> Result<Measured, Failure> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".measure.ember");
    let temporary = Temporary(path.with_file_name(name));
    // An interrupted pack could be resumed, but not of a temporary file.
    let endings = ["", ".partial", ".partial.journal"];
    let _unfinished = endings.map(|ending| Unfinished::at(&with_suffix(&temporary.0, ending)));
    let dtype = match encoding {
        Encoding::Q4_0 | Encoding::Mxfp4 => DType::Q4,
        Encoding::Q8_0 => DType::Q8,
        Encoding::F16 | Encoding::F32 => DType::F16,
    };
    let mut options = PackOptions::new(dtype);
    // Same format as in the file.
    options.embedding = dtype;
    options.force = true;
    let bar = progress::bytes("packing", 0);
    let packed = pack(path, &temporary.0, &options, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    packed?;
    let model = Model::open(Container::open(&temporary.0)?)?;
    let mut engine = Engine::open(
        model,
        Options {
            context: warm_up + tokens,
            ..Options::default()
        },
    )?;
    let inputs = decode(&mut engine, tokens, warm_up)?;
    drop(engine);
    drop(temporary);
    let source = emberflow_models::open(path)?;
    tally(source.as_ref(), &inputs)
}

/// Inputs of the FFNs of some layers, token by token.
struct Inputs {
    layers: Vec<u32>,
    /// By layer, `[tokens × d_model]`.
    x: Vec<Vec<f32>>,
    /// By layer, `[tokens × chosen]`; empty for dense FFNs.
    experts: Vec<Vec<u32>>,
    engine_active: f64,
    walk: f64,
}

/// Whether the FFN of a layer is counted: in a model with experts, those that choose some.
fn is_counted(c: &ModelConfig, layer: u32) -> bool {
    c.mixture.is_none() || c.mixture_of(layer).is_some()
}

fn decode(engine: &mut Engine, tokens: usize, warm_up: usize) -> Result<Inputs, Failure> {
    let c = engine.config();
    let (vocab, d) = (c.vocab, c.d_model as usize);
    let all: Vec<u32> = c
        .ffn_layers()
        .filter(|&layer| is_counted(c, layer))
        .collect();
    let count = (INPUT_BYTES / (4 * d * tokens)).clamp(1, all.len().max(1));
    let layers: Vec<u32> = (0..count)
        .filter_map(|i| all.get(i * all.len() / count).copied())
        .collect();
    let places: Vec<usize> = layers.iter().map(|&layer| c.ffn_place(layer)).collect();
    let mut x: Vec<Vec<f32>> = vec![Vec::with_capacity(tokens * d); count];
    let mut experts: Vec<Vec<u32>> = vec![Vec::new(); count];
    let mut sequence = engine.new_sequence()?;
    let (mut token, mut kept_to_walk) = (BOS, 0);
    let mut before = engine.counters();
    let bar = progress::steps("decoding", (warm_up + tokens) as u64);
    for at in 0..warm_up + tokens {
        if at == warm_up {
            before = engine.counters();
        }
        let mut keep = |seen: &FfnSeen<'_>| {
            if at >= warm_up
                && let Ok(place) = places.binary_search(&seen.layer)
            {
                x[place].extend_from_slice(seen.x);
                experts[place].extend(seen.choices.iter().map(|choice| choice.expert));
            }
        };
        engine.forward_observed(&mut sequence, &[token], Logits::Last, &mut keep)?;
        let logits = engine.logits();
        if logits.iter().any(|l| !l.is_finite()) {
            return Err(Failure::Engine(emberflow_engine::Error::NotFinite {
                position: at,
            }));
        }
        let next = argmax(logits).unwrap_or_default() as u32;
        if at >= warm_up && next == successor(token, vocab) {
            kept_to_walk += 1;
        }
        // The start token has no successor; the walk may begin anywhere.
        token = if at == 0 { SPECIAL } else { next };
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(Inputs {
        layers,
        x,
        experts,
        engine_active: engine.counters().since(before).active_share(),
        walk: f64::from(kept_to_walk) / tokens as f64,
    })
}

/// Counts over neurons.
#[derive(Default)]
struct Counts {
    fired: u64,
    possible: u64,
    stayed: u64,
    could_stay: u64,
    hot: f64,
    banks: f64,
}

/// Applies Gate (and, for dReLU, Up) to every token and counts.
fn tally(source: &dyn Checkpoint, inputs: &Inputs) -> Result<Measured, Failure> {
    let c = source.config();
    let (d, experts) = (c.d_model as usize, c.experts as usize);
    let workers = Workers::new(
        std::thread::available_parallelism().map_or(1, |n| n.get()),
        None,
    );
    let bar = progress::steps("counting", (inputs.layers.len() * experts) as u64);
    let tokens = inputs.x.first().map_or(0, |x| x.len() / d);
    let chosen = c.mixture.as_ref().map_or(0, |m| m.chosen as usize);
    let mut counts = Counts::default();
    let mut routing = Vec::new();
    for ((&layer, x), visits) in inputs.layers.iter().zip(&inputs.x).zip(&inputs.experts) {
        let mut seen = RoutingSeen::new(experts);
        let mut before: &[u32] = &[];
        for now in visits.chunks_exact(chosen.max(1)) {
            seen.see(before, now);
            before = now;
        }
        // An early router of the first layer has no lasting input.
        let lasts = layer > 0 || c.mixture.as_ref().is_none_or(|m| !m.early_router);
        if !visits.is_empty() && lasts {
            routing.push(seen.statistics());
        }
        for expert in 0..experts as u32 {
            let visited: Vec<usize> = if visits.is_empty() {
                (0..tokens).collect()
            } else {
                visits
                    .chunks_exact(chosen.max(1))
                    .enumerate()
                    .filter(|(_, chosen)| chosen.contains(&expert))
                    .map(|(token, _)| token)
                    .collect()
            };
            let bank = Visited {
                layer,
                expert,
                tokens: visited,
            };
            bank.count(source, &workers, x, &mut counts)?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let mean = |of: fn(&RoutingTargets) -> f64| {
        routing.iter().map(of).sum::<f64>() / routing.len().max(1) as f64
    };
    Ok(Measured {
        tokens: tokens as u32,
        layers: inputs.layers.len() as u32,
        active: counts.fired as f64 / counts.possible.max(1) as f64,
        hot_share: counts.hot / counts.banks.max(1.0),
        persistence: counts.stayed as f64 / counts.could_stay.max(1) as f64,
        routing: (!routing.is_empty()).then(|| RoutingTargets {
            popular: mean(|r| r.popular),
            reuse: mean(|r| r.reuse),
        }),
        engine_active: inputs.engine_active,
        walk: inputs.walk,
    })
}

/// An FFN and the tokens that visit it, ascending.
struct Visited {
    layer: u32,
    expert: u32,
    tokens: Vec<usize>,
}

impl Visited {
    /// Adds the counts of its neurons for these tokens; `x` has the inputs of all tokens.
    fn count(
        &self,
        source: &dyn Checkpoint,
        workers: &Workers,
        x: &[f32],
        counts: &mut Counts,
    ) -> Result<(), Failure> {
        let c = source.config();
        let (d, ffn, tokens) = (c.d_model as usize, c.ffn as usize, self.tokens.len());
        if tokens == 0 {
            return Ok(());
        }
        let of = |token: &usize| &x[token * d..][..d];
        let x: Vec<f32> = self.tokens.iter().flat_map(of).copied().collect();
        let id = |role| TensorId {
            role,
            layer: self.layer,
            expert: self.expert,
        };
        // Enough rows for every thread.
        let batch = (ROWS * workers.threads() * 4).min(ffn);
        let mut rows = vec![0.0; batch * d];
        let [mut gates, mut ups] = [(); 2].map(|()| vec![0.0; batch * tokens]);
        let mut fired = Vec::with_capacity(ffn);
        for first in (0..ffn).step_by(batch) {
            let count = batch.min(ffn - first);
            let rows = &mut rows[..count * d];
            source.read_rows(id(Role::Gate), first, count, rows)?;
            apply(workers, rows, &x, d, &mut gates);
            if c.ffn_kind.relu_on_up {
                source.read_rows(id(Role::Up), first, count, rows)?;
                apply(workers, rows, &x, d, &mut ups);
            } else {
                ups.fill(1.0);
            }
            let both = gates.chunks_exact(tokens).zip(ups.chunks_exact(tokens));
            for (gate, up) in both.take(count) {
                let fires = |t: usize| gate[t] > 0.0 && up[t] > 0.0;
                fired.push((0..tokens).filter(|&t| fires(t)).count() as u64);
                for (t, pair) in self.tokens.windows(2).enumerate() {
                    let next = pair[1] == pair[0] + 1 && fires(t);
                    counts.could_stay += u64::from(next);
                    counts.stayed += u64::from(next && fires(t + 1));
                }
            }
        }
        counts.fired += fired.iter().sum::<u64>();
        counts.possible += (ffn * tokens) as u64;
        // Weighted by visits, since counts of few tokens are uneven by chance.
        counts.hot += hot_share(&fired, 0.8) * tokens as f64;
        counts.banks += tokens as f64;
        Ok(())
    }
}

/// `out[row][token] = rows[row] · x[token]`.
fn apply(workers: &Workers, rows: &[f32], x: &[f32], d: usize, out: &mut [f32]) {
    let cpu = Cpu::detect();
    let tokens = x.len() / d;
    let out = &mut out[..rows.len() / d * tokens];
    workers.for_each_chunk_mut(out, ROWS * tokens, &|_, piece, out| {
        let rows = &rows[piece * ROWS * d..];
        for (t, x) in x.chunks_exact(d).enumerate() {
            for (row, out) in rows.chunks_exact(d).zip(out.chunks_exact_mut(tokens)) {
                out[t] = cpu.dot_f32(row, x);
            }
        }
    });
}
