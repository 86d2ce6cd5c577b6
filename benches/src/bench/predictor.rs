//! `emberflow-lab predictor`: time to predict the active neurons of each layer, compared with a
//! plain read of the predictor's weights by the same threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use emberflow_engine::compute;
use emberflow_engine::meta::ContainerMeta;
use emberflow_kernels::{Activations, Compute, read_bandwidth};
use emberflow_models::config::ModelConfig;
use emberflow_predictor::{Features, Predictor, Shared, SharedShape, predict_all};
use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::container::Container;
use serde::Serialize;

use crate::cli::PredictorArgs;
use emberflow::bench::facts::Facts;
use emberflow::bench::output::{Results, Rows, Table, may_write, percent};
use emberflow::chart::{Labels, bars};
use emberflow::inspect_predictors::{BankPredictor, predictors, section};
use emberflow::model::open_bundles;
use emberflow::stats::Range;
use emberflow::{Failure, progress};

/// Tokens per round; the median of each layer counts.
const TOKENS: usize = 32;

/// One bank, or all of them.
#[derive(Debug, Serialize)]
struct PredictorRow {
    /// Layer; `null` for all together.
    layer: Option<usize>,
    /// Expert; absent in dense models.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert: Option<u32>,
    kind: &'static str,
    /// Bytes of weights read per token.
    bytes: u64,
    /// Microseconds per token.
    us: Range,
    /// 10^9 bytes of weights per second, at the median.
    gb_per_s: f64,
    /// Bound: microseconds in which the same threads read as many bytes of the weights.
    bound_us: f64,
    /// Time relative to the bound.
    of_bound: Range,
    /// Share of the firing neurons that are predicted, as recorded in the model.
    recall: f64,
    /// Share of the predicted neurons that fire, as recorded in the model.
    precision: f64,
    /// Share of all neurons that are predicted.
    predicted_share: f64,
}

/// The predictors of a model, and the compute threads.
struct Lab {
    layers: Vec<Box<dyn Predictor>>,
    on: Compute,
    d: usize,
    /// Neurons by layer.
    neurons: Vec<usize>,
}

/// Runs the command.
pub fn command(args: &PredictorArgs) -> Result<(), Failure> {
    let repeat = &args.repeat;
    may_write(&repeat.output, "predictor", Some(&args.model), None)?;
    let (container, facts) = (open_bundles(&args.model)?, Facts::of(&args.model)?);
    let meta = ContainerMeta::parse(container.meta(), container.path())?;
    let threads = match args.threads {
        Some(n) => usize::from(n),
        None => facts.machine.cores as usize,
    };
    let (known, weights, lab) = open(&container, &meta.config, threads)?;
    let rounds = repeat.rounds();
    let time = Duration::from_millis(if repeat.quick { 10 } else { 200 });
    let (mut speed, mut us) = (0f64, vec![Vec::new(); known.len() + 1]);
    let bar = progress::steps("selecting", u64::from(rounds));
    for _ in 0..rounds {
        // The best round is the bound, since others may have been disturbed.
        let weights = (*weights).as_ref();
        speed = speed.max(read_bandwidth(&lab.on, &[weights], time));
        for (all, us) in us.iter_mut().zip(lab.round()) {
            all.push(us);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let rows = rows(&known, us, speed);
    let name = meta.config.name;
    Results {
        bench: "predictor",
        svg: chart(&name, &facts.line(), &rows),
        table: table(&rows),
        csv: csv(&rows),
        model: Some(name),
        agreement: None,
        facts,
        how: format!(
            "selecting the neurons of a token, {threads} threads, {rounds} rounds of {TOKENS} made-up tokens"
        ),
        body: Rows { rows: &rows },
        notes: vec![format!(
            "bound: the bytes / {:.1} GB/s, at which the same threads read the predictors' weights in this run; \
             recall and precision are those that were recorded when the predictors were made",
            speed / 1e9
        )],
    }
    .finish(&repeat.output)
}

type Weights = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Weights on huge pages, as in the engine.
struct Held(Slot);

impl Held {
    fn of(bytes: &[u8]) -> Result<Self, Failure> {
        let huge = ArenaOptions {
            huge_pages: true,
            ..ArenaOptions::default()
        };
        let no_memory = emberflow_storage::Error::from;
        let mut arena = Arena::new(1, bytes.len(), 1, huge).map_err(no_memory)?;
        let mut slot = arena
            .take()
            .ok_or_else(|| Failure::usage("no predictors"))?;
        slot.as_mut_slice().copy_from_slice(bytes);
        Ok(Self(slot))
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

/// The predictors, their weights, and what measures them.
fn open(
    container: &Container,
    c: &ModelConfig,
    threads: usize,
) -> Result<(Vec<BankPredictor>, Weights, Lab), Failure> {
    let none = || {
        Failure::usage(format!(
            "{} has no predictors that name neurons; make a model that has some with emberflow \
             train-predictor",
            container.path().display()
        ))
    };
    let (bytes, directory) = section(container, c)?.ok_or_else(none)?;
    let weights: Weights = Arc::new(Held::of(&bytes)?);
    let mut known = predictors(container, c)?.ok_or_else(none)?.layers;
    let all = (0..known.len()).filter_map(|bank| directory.predictor(bank, &weights));
    let layers: Vec<Box<dyn Predictor>> = all.collect();
    let mut entries = directory.banks.iter();
    known.retain(|_| entries.next().is_some_and(|entry| entry.kind.predicts()));
    let lab = Lab {
        layers,
        on: compute(container, c, threads, None),
        d: c.bundle_width() as usize,
        neurons: known.iter().map(|bank| bank.neurons).collect(),
    };
    if lab.layers.is_empty() {
        return Err(none());
    }
    Ok((known, weights, lab))
}

impl Lab {
    /// Microseconds of each layer and of all together: medians over some tokens. Layers run in
    /// model order, as in decode, so that weights are as likely to be in a cache.
    fn round(&self) -> Vec<f64> {
        let shapes = self.layers.iter().map(|p| p.shape());
        let shape = shapes.fold(SharedShape::default(), SharedShape::max);
        let mut shared = Shared::new(shape, 1);
        let most = self.neurons.iter().max();
        let mut wanted = vec![0.0; most.copied().unwrap_or(0)];
        let mut quantized = Activations::default();
        let mut times = vec![Vec::with_capacity(TOKENS); self.layers.len() + 1];
        let mut state = 1u32;
        let inputs: Vec<f32> = (0..(TOKENS + 1) * self.d)
            .map(|_| random(&mut state))
            .collect();
        // The first token warms up.
        for (token, x) in inputs.chunks_exact(self.d).enumerate() {
            let mut sum = 0.0;
            let layers = self.layers.iter().zip(&self.neurons);
            for (layer, (predictor, &neurons)) in layers.enumerate() {
                self.on.cpu.quantize_activations(x, 1, &mut quantized);
                let input = Features {
                    normed: x,
                    quantized: quantized.all(),
                    residual: x,
                };
                let (predictor, on) = (predictor.as_ref(), &self.on);
                let start = Instant::now();
                predict_all(predictor, on, input, &mut shared, &mut wanted[..neurons]);
                let us = start.elapsed().as_secs_f64() * 1e6;
                sum += us;
                if token > 0 {
                    times[layer].push(us);
                }
            }
            if token > 0 {
                times[self.layers.len()].push(sum);
            }
        }
        let medians = times.iter_mut().map(|times| Range::of(times).median);
        medians.collect()
    }
}

/// Approximately standard normal, as inputs after a norm.
fn random(state: &mut u32) -> f32 {
    let mut sum = 0.0;
    for _ in 0..3 {
        *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        sum += (*state >> 8) as f32 / (1 << 23) as f32 - 1.0;
    }
    sum
}

fn rows(known: &[BankPredictor], us: Vec<Vec<f64>>, speed: f64) -> Vec<PredictorRow> {
    let row = |layer: Option<&BankPredictor>, mut us: Vec<f64>| {
        let sum = |of: fn(&BankPredictor) -> f64| known.iter().map(of).sum::<f64>();
        // Recall of all together is weighted by firing neurons, precision by predicted ones.
        let hit: f64 = known.iter().map(|l| l.recall * l.active_share).sum();
        let bytes = layer.map_or_else(|| known.iter().map(|l| l.bytes).sum(), |l| l.bytes);
        let bound_us = bytes as f64 / speed.max(1.0) * 1e6;
        let us = Range::of(&mut us);
        PredictorRow {
            layer: layer.map(|l| l.layer),
            expert: layer.and_then(|l| l.expert),
            kind: layer.map_or("all", |l| l.kind),
            bytes,
            us,
            gb_per_s: bytes as f64 / us.median.max(1e-3) / 1e3,
            bound_us,
            of_bound: us.map(|us| us / bound_us.max(1e-9)),
            recall: layer.map_or_else(|| hit / sum(|l| l.active_share).max(1e-9), |l| l.recall),
            precision: layer.map_or_else(
                || hit / sum(|l| l.predicted_share).max(1e-9),
                |l| l.precision,
            ),
            predicted_share: layer.map_or_else(
                || sum(|l| l.predicted_share) / known.len().max(1) as f64,
                |l| l.predicted_share,
            ),
        }
    };
    let layers = known.iter().map(Some).chain([None]);
    layers.zip(us).map(|(layer, us)| row(layer, us)).collect()
}

impl PredictorRow {
    fn name(&self) -> String {
        match (self.layer, self.expert) {
            (None, _) => "all".into(),
            (Some(layer), None) => layer.to_string(),
            (Some(layer), Some(expert)) => format!("{layer}.{expert}"),
        }
    }
}

fn table(rows: &[PredictorRow]) -> Table {
    let mut table = Table::new(
        "layer | kind | bytes | us/token | GB/s | bound, us | of bound | recall | \
         precision | names",
    );
    for r in rows {
        let mut cells = vec![r.name(), r.kind.into(), r.bytes.to_string(), r.us.show(1)];
        cells.extend([format!("{:.1}", r.gb_per_s), format!("{:.1}", r.bound_us)]);
        cells.push(r.of_bound.show(2));
        cells.extend([r.recall, r.precision, r.predicted_share].map(percent));
        table.rows.push(cells);
    }
    table
}

fn csv(rows: &[PredictorRow]) -> Table {
    let mut table = Table::new(
        "layer | kind | bytes | us | us_min | us_max | gb_per_s | bound_us | of_bound | \
         recall | precision | predicted_share",
    );
    for r in rows {
        let mut cells = vec![r.name(), r.kind.into(), r.bytes.to_string()];
        let times = [r.us.median, r.us.min, r.us.max, r.gb_per_s, r.bound_us];
        let shares = [r.of_bound.median, r.recall, r.precision, r.predicted_share];
        cells.extend(times.iter().chain(&shares).map(|v| format!("{v:.4}")));
        table.rows.push(cells);
    }
    table
}

fn chart(model: &str, facts: &str, rows: &[PredictorRow]) -> String {
    let names = ["selecting", "bytes / speed of memory"].map(str::to_owned);
    let groups: Vec<(String, Vec<f64>)> = (rows.iter())
        .filter(|r| r.layer.is_some())
        .map(|r| (r.name(), vec![r.us.median, r.bound_us]))
        .collect();
    let labels = Labels {
        title: &format!("{model}: selecting the neurons of a token"),
        facts,
        x: "layer",
        y: "microseconds of a token, medians",
    };
    bars(&labels, &names, &groups)
}
