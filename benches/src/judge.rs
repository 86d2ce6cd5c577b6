//! `emberflow-lab judge`: a container's predictors compared with the true gates of a text.

use std::io::Write;

use emberflow::cli::{PerplexityArgs, SparsityArg};
use emberflow::model::{open_engine, open_model, open_observed};
use emberflow::perplexity::{Perplexity, WINDOW, measure};
use emberflow::text::{self, Tokens};
use emberflow::{Failure, budget, print_json, progress, size};
use emberflow_engine::{FfnSeen, Judge, Model};
use emberflow_predictor::Quality;
use serde::Serialize;

/// Output of the command. JSON keys are a contract.
#[derive(Debug, Clone, Serialize)]
struct JudgeReport {
    /// Perplexity without the predictors.
    #[serde(flatten)]
    perplexity: Perplexity,
    predictors: Judged,
}

/// Quality of a container's predictors on a text. JSON keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct Judged {
    /// Perplexity with the predictors.
    pub perplexity: f64,
    /// Bytes of the predictors.
    pub bytes: u64,
    /// Share of the container's bytes.
    pub share: f64,
    /// Over all layers.
    pub all: Named,
    /// By layer.
    pub layers: Vec<Named>,
}

/// Quality over (neuron, token) pairs.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Named {
    /// Share of the pairs that fire.
    pub active_share: f64,
    /// Share of the pairs that were predicted.
    pub looked_at_share: f64,
    /// Share of the firing pairs that were predicted.
    pub recall: f64,
    /// Share of the predicted pairs that fire.
    pub precision: f64,
    /// Predicted pairs per firing pair.
    pub overhead: f64,
}

impl From<Quality> for Named {
    fn from(q: Quality) -> Self {
        Self {
            active_share: q.active_share(),
            looked_at_share: q.predicted_share(),
            recall: q.recall(),
            precision: q.precision(),
            overhead: q.overhead(),
        }
    }
}

/// Tokens per pass.
const CHUNK: usize = 128;

/// Runs the command.
pub fn command(args: &PerplexityArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine, args.force)?;
    let model = open_model(&args.model)?;
    let window = text::window(args.window, WINDOW, model.text().config().max_context)?;
    let text = model.text().clone();
    let ids = Tokens::open(&text, &args.file, args.limit)?.rest()?;
    let report = judged(args, model, &ids, window as usize)?;
    if args.json {
        return print_json(&report);
    }
    let mut out = std::io::stdout().lock();
    report.perplexity.print(&mut out)?;
    Ok((report.predictors).print(&mut out, report.perplexity.perplexity)?)
}

/// Runs the text twice: without the predictors, to compare them with the gates, and with them.
fn judged(
    args: &PerplexityArgs,
    model: Model,
    ids: &[u32],
    window: usize,
) -> Result<JudgeReport, Failure> {
    let sparse = model.text().config().has_zeros();
    let mut engine_args = args.engine.clone();
    engine_args.sparsity = if sparse {
        SparsityArg::Exact
    } else {
        SparsityArg::Dense
    };
    let threads = args.engine.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, |n| n.get()),
        usize::from,
    );
    let chunk = match engine_args.lab.chunk {
        0 => CHUNK,
        given => given,
    };
    engine_args.lab.chunk = chunk;
    let Some(mut judge) = Judge::open(&model, chunk, threads)? else {
        return Err(Failure::usage(
            "this container has no predictors to judge; add some with emberflow train-predictor",
        ));
    };
    let file_len = model.container().file_len();
    let mut engine = open_observed(model, &engine_args, window, 0, args.force)?;
    let mut see = |seen: &FfnSeen<'_>| judge.see(seen);
    let perplexity = measure(&mut engine, &mut windows_of(ids), window, Some(&mut see))?;
    drop(engine);
    engine_args.sparsity = SparsityArg::Predicted;
    let mut engine = open_engine(open_model(&args.model)?, &engine_args, window, args.force)?;
    let with = measure(&mut engine, &mut windows_of(ids), window, None)?;
    let mut all = Quality::default();
    judge.layers().iter().for_each(|q| all += *q);
    let predictors = Judged {
        perplexity: with.perplexity,
        bytes: judge.bytes(),
        share: judge.bytes() as f64 / file_len.max(1) as f64,
        all: all.into(),
        layers: judge.layers().iter().map(|&q| q.into()).collect(),
    };
    Ok(JudgeReport {
        perplexity,
        predictors,
    })
}

impl Judged {
    fn print(&self, out: &mut impl Write, without: f64) -> std::io::Result<()> {
        writeln!(
            out,
            "layer   active  looked at   recall  precision  per active"
        )?;
        let layers = self.layers.iter().enumerate();
        let rows = layers.map(|(l, named)| (l.to_string(), named));
        for (name, n) in rows.chain([("all".into(), &self.all)]) {
            writeln!(
                out,
                "{name:>5} {:>6.1} % {:>8.1} % {:>6.2} % {:>10.3} {:>11.2}",
                100.0 * n.active_share,
                100.0 * n.looked_at_share,
                100.0 * n.recall,
                n.precision,
                n.overhead
            )?;
        }
        writeln!(
            out,
            "perplexity with predictors {:.4} ({:+.2} %); they take {} ({:.2} % of the container)",
            self.perplexity,
            100.0 * (self.perplexity / without - 1.0),
            size::show(self.bytes),
            100.0 * self.share
        )
    }
}

/// Yields `ids` in pieces.
fn windows_of(ids: &[u32]) -> impl FnMut(usize) -> Result<Vec<u32>, Failure> {
    let bar = progress::steps("perplexity", ids.len() as u64);
    let mut left = ids;
    move |most| {
        let (next, rest) = left.split_at(most.min(left.len()));
        left = rest;
        bar.inc(next.len() as u64);
        if next.is_empty() {
            bar.finish_and_clear();
        }
        Ok(next.to_vec())
    }
}
