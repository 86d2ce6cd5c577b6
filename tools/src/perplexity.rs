//! `emberflow perplexity`: how well a model predicts a text.

use std::io::Write;

use emberflow_engine::{Engine, Logits};
use emberflow_storage::mem;
use serde::Serialize;

use crate::cli::PerplexityArgs;
use crate::model::{open_engine, open_model};
use crate::{Failure, print_json, progress};

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
}

/// Tokens per window when none is given.
const WINDOW: u32 = 512;

/// Runs the command.
pub fn command(args: &PerplexityArgs) -> Result<(), Failure> {
    let mut text = std::fs::read_to_string(&args.file).map_err(Failure::file(&args.file))?;
    if let Some(limit) = args.limit {
        // far more text than that many tokens, so that the rest costs no memory
        let bytes = usize::try_from(limit.saturating_mul(64)).unwrap_or(usize::MAX);
        text.truncate(text.floor_char_boundary(bytes.min(text.len())));
        text.shrink_to_fit();
    }
    let model = open_model(&args.model)?;
    let max = model.text().config().max_context;
    let window = args.window.unwrap_or(WINDOW.min(max));
    if window < 2 || window > max {
        return Err(Failure::usage(format!(
            "--window {window}: this model takes 2 to {max}"
        )));
    }
    // Tokenised before the memory is planned, so that the plan knows what it costs.
    let mut ids = model.text().tokens(&text)?;
    drop(text);
    if let Some(limit) = args.limit {
        ids.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    }
    let mut engine = open_engine(model, &args.engine, window as usize)?;
    let result = measure(&mut engine, &ids, window as usize, true)?;
    if args.json {
        return print_json(&result);
    }
    writeln!(
        std::io::stdout().lock(),
        "perplexity {:.4} ({:.4} bits/byte) over {} tokens in windows of {}; \
         {:.1} % of neurons fired",
        result.perplexity,
        result.bits_per_byte,
        result.tokens,
        result.window,
        100.0 * result.active_share
    )?;
    Ok(())
}

/// Scores `ids` in windows; every window but its first token (which has no
/// context) counts. The model's start token opens each window where it has one.
pub fn measure(
    engine: &mut Engine,
    ids: &[u32],
    window: usize,
    show_progress: bool,
) -> Result<Perplexity, Failure> {
    if ids.len() < 2 {
        return Err(Failure::usage("the text has fewer than two tokens"));
    }
    let bos = engine.text().start_token();
    let body = window - usize::from(bos.is_some());
    let bar = show_progress.then(|| progress::steps("perplexity", ids.len() as u64));
    let mut sequence = engine.new_sequence();
    let (mut nll, mut scored, mut bytes) = (0.0f64, 0u64, 0u64);
    let mut tokens = Vec::with_capacity(window);
    for part in ids.chunks(body) {
        tokens.clear();
        tokens.extend(bos);
        tokens.extend_from_slice(part);
        sequence.clear();
        let chunk = engine.chunk();
        for (start, piece) in (0..).step_by(chunk).zip(tokens.chunks(chunk)) {
            let next = &tokens[start + 1..];
            let mut sink = |i: usize, logits: &[f32]| {
                if let Some(&target) = next.get(i) {
                    nll -= log_probability(logits, target);
                    scored += 1;
                }
            };
            engine.forward(&mut sequence, piece, Logits::Each(&mut sink))?;
        }
        bytes += engine.text().tokenizer().decode(&tokens[1..], true)?.len() as u64;
        if let Some(bar) = &bar {
            bar.inc(part.len() as u64);
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
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
    })
}

/// Natural log of the softmax probability of `target`.
fn log_probability(logits: &[f32], target: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    f64::from(logits[target as usize] - max) - sum.ln()
}
