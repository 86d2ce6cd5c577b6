//! `emberflow perplexity`: how well a model predicts a text.

use std::io::Write;

use emberflow_engine::{Engine, FfnObserver, FfnSeen, Judge, Logits, Model, log_probability};
use emberflow_predictor::Quality;
use emberflow_storage::mem;
use serde::Serialize;

use crate::cli::{PerplexityArgs, SparsityArg};
use crate::model::{open_engine, open_model, open_observed};
use crate::text::{self, Tokens};
use crate::{Failure, budget, print_json, progress, size};

/// The result. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct Perplexity {
    /// Name of the model.
    pub model: String,
    /// exp of the mean negative log-likelihood per scored token.
    pub perplexity: f64,
    /// The same in bits per byte of text.
    pub bits_per_byte: f64,
    /// Tokens that were scored.
    pub tokens: u64,
    /// Bytes of the scored tokens' text.
    pub bytes: u64,
    /// Tokens per window.
    pub window: u32,
    /// Share of (neuron, token) pairs that fired.
    pub active_share: f64,
    /// Highest resident set of the process (VmHWM).
    pub peak_rss_bytes: Option<u64>,
    /// The budget.
    pub budget_bytes: u64,
    /// What the predictors are worth on this text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predictors: Option<Judged>,
}

/// The container's predictors on a text. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct Judged {
    /// Perplexity with them.
    pub perplexity: f64,
    /// Their bytes.
    pub bytes: u64,
    /// As a share of the container.
    pub share: f64,
    /// Over all layers.
    pub all: Named,
    /// By layer.
    pub layers: Vec<Named>,
}

/// Pairs of a neuron and a token, those that were named and those that fire.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Named {
    /// Share of the pairs that fire.
    pub active_share: f64,
    /// Share of the pairs that were named.
    pub looked_at_share: f64,
    /// Share of those that fire that were named.
    pub recall: f64,
    /// Share of those named that fire.
    pub precision: f64,
    /// Pairs named per pair that fires.
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

/// Tokens per window when none is given.
const WINDOW: u32 = 512;

/// Tokens computed at once while predictors are judged.
const JUDGED_CHUNK: u16 = 128;

/// Runs the command.
pub fn command(args: &PerplexityArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine, args.force)?;
    let model = open_model(&args.model)?;
    let window = text::window(args.window, WINDOW, model.text().config().max_context)?;
    let text = model.text().clone();
    let mut tokens = Tokens::open(&text, &args.file, args.limit)?;
    let result = if args.judge {
        judged(args, model, &tokens.rest()?, window as usize)?
    } else {
        let mut engine = open_engine(model, &args.engine, window as usize, args.force)?;
        let bar = progress::bytes("perplexity", tokens.bytes());
        let mut next = |most: usize| {
            bar.set_position(tokens.bytes_read());
            tokens.next(most)
        };
        let result = measure(&mut engine, &mut next, window as usize, None)?;
        bar.finish_and_clear();
        result
    };
    if args.json {
        return print_json(&result);
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "perplexity {:.4} ({:.4} bits/byte) over {} tokens in windows of {}; \
         {:.1} % of neurons fired",
        result.perplexity,
        result.bits_per_byte,
        result.tokens,
        result.window,
        100.0 * result.active_share
    )?;
    if let Some(p) = &result.predictors {
        p.print(&mut out, result.perplexity)?;
    }
    Ok(())
}

/// Runs the text without the predictors, holding them against it, then with them.
fn judged(
    args: &PerplexityArgs,
    model: Model,
    ids: &[u32],
    window: usize,
) -> Result<Perplexity, Failure> {
    let sparse = model.text().config().has_zeros();
    let mut engine_args = args.engine.clone();
    engine_args.sparsity = match sparse {
        true => SparsityArg::Exact,
        false => SparsityArg::Dense,
    };
    let threads = args.engine.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, |n| n.get()),
        usize::from,
    );
    let chunk = usize::from(args.engine.chunk.unwrap_or(JUDGED_CHUNK));
    engine_args.chunk = Some(chunk as u16);
    let Some(mut judge) = Judge::open(&model, chunk, threads)? else {
        return Err(Failure::usage(
            "this container has no predictors to judge; add some with emberflow train-predictor",
        ));
    };
    let file_len = model.container().file_len();
    let mut engine = open_observed(model, &engine_args, window, 0, args.force)?;
    let mut see = |seen: &FfnSeen<'_>| judge.see(seen);
    let mut result = measure(&mut engine, &mut windows_of(ids), window, Some(&mut see))?;
    drop(engine);
    engine_args.sparsity = SparsityArg::Predicted;
    let mut engine = open_engine(open_model(&args.model)?, &engine_args, window, args.force)?;
    let with = measure(&mut engine, &mut windows_of(ids), window, None)?;
    let mut all = Quality::default();
    judge.layers().iter().for_each(|q| all += *q);
    result.predictors = Some(Judged {
        perplexity: with.perplexity,
        bytes: judge.bytes(),
        share: judge.bytes() as f64 / file_len.max(1) as f64,
        all: all.into(),
        layers: judge.layers().iter().map(|&q| q.into()).collect(),
    });
    Ok(result)
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

/// The next tokens of a text, as many as are asked for, fewer at its end.
type NextTokens<'a> = dyn FnMut(usize) -> Result<Vec<u32>, Failure> + 'a;

/// Gives `ids` piece by piece.
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

/// Scores a text in windows; every window but its first token (which has no
/// context) counts. The model's start token opens each window where it has one.
fn measure(
    engine: &mut Engine,
    next: &mut NextTokens<'_>,
    window: usize,
    mut see: Option<&mut FfnObserver<'_>>,
) -> Result<Perplexity, Failure> {
    let lead = engine.text().start_tokens().to_vec();
    let body = window.saturating_sub(lead.len()).max(1);
    let mut sequence = engine.new_sequence()?;
    let (mut nll, mut scored, mut bytes) = (0.0f64, 0u64, 0u64);
    let mut tokens = Vec::with_capacity(window);
    let mut part = next(body)?;
    let mut following = next(body)?;
    if part.len() + following.len() < 2 {
        return Err(Failure::usage("the text has fewer than two tokens"));
    }
    while !part.is_empty() {
        tokens.clear();
        tokens.extend_from_slice(&lead);
        tokens.extend_from_slice(&part);
        sequence.clear();
        let chunk = engine.chunk();
        for (start, piece) in (0..).step_by(chunk).zip(tokens.chunks(chunk)) {
            let targets = &tokens[start + 1..];
            let mut sink = |i: usize, logits: &[f32]| {
                if let Some(&target) = targets.get(i)
                    && start + i + 1 >= lead.len()
                {
                    nll -= log_probability(logits, target);
                    scored += 1;
                }
            };
            let wanted = Logits::Each(&mut sink);
            match &mut see {
                Some(see) => engine.forward_observed(&mut sequence, piece, wanted, see)?,
                None => engine.forward(&mut sequence, piece, wanted)?,
            }
        }
        bytes += engine.text().tokenizer().decode(&tokens[1..], true)?.len() as u64;
        part = std::mem::take(&mut following);
        if !part.is_empty() {
            following = next(body)?;
        }
    }
    Ok(Perplexity {
        model: engine.config().name.clone(),
        perplexity: (nll / scored.max(1) as f64).exp(),
        bits_per_byte: nll / std::f64::consts::LN_2 / bytes.max(1) as f64,
        tokens: scored,
        bytes,
        window: window as u32,
        active_share: engine.counters().active_share(),
        peak_rss_bytes: mem::peak_rss(),
        budget_bytes: engine.memory().budget(),
        predictors: None,
    })
}
