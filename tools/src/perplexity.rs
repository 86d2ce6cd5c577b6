//! `emberflow perplexity`: perplexity of a model on a text.

use std::io::Write;

use emberflow_engine::lane::LaneReport;
use emberflow_engine::{Engine, FfnObserver, Logits, log_probability};
use emberflow_storage::mem;
use serde::Serialize;

use crate::cli::PerplexityArgs;
use crate::model::{open_engine, open_model};
use crate::text::{self, Tokens};
use crate::{Failure, budget, print_json, progress};

/// Output of `perplexity --json`. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct Perplexity {
    /// Model name.
    pub model: String,
    /// exp(mean negative log-likelihood per scored token).
    pub perplexity: f64,
    /// Negative log-likelihood in bits per byte of text.
    pub bits_per_byte: f64,
    /// Scored tokens.
    pub tokens: u64,
    /// Bytes of the scored tokens.
    pub bytes: u64,
    /// Tokens per window.
    pub window: u32,
    /// The devices of `--device`, with their class of numerics; `null` without one.
    pub device: Option<LaneReport>,
    /// Share of (neuron, token) pairs that are active.
    pub active_share: f64,
    /// Peak resident set of the process (VmHWM).
    pub peak_rss_bytes: Option<u64>,
    /// Memory budget.
    pub budget_bytes: u64,
}

/// Default tokens per window.
pub const WINDOW: u32 = 512;

/// Runs the command.
pub fn command(args: &PerplexityArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine, args.force)?;
    let model = open_model(&args.model)?;
    let window = text::window(args.window, WINDOW, model.text().config().max_context)?;
    let text = model.text().clone();
    let mut tokens = Tokens::open(&text, &args.file, args.limit)?;
    let mut engine = open_engine(model, &args.engine, window as usize, args.force)?;
    let bar = progress::bytes("perplexity", tokens.bytes());
    let mut next = |most: usize| {
        bar.set_position(tokens.bytes_read());
        tokens.next(most)
    };
    let result = measure(&mut engine, &mut next, window as usize, None)?;
    bar.finish_and_clear();
    if args.json {
        return print_json(&result);
    }
    Ok(result.print(&mut std::io::stdout().lock())?)
}

impl Perplexity {
    /// Prints one line of text.
    ///
    /// # Errors
    /// I/O errors of `out`.
    pub fn print(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(
            out,
            "perplexity {:.4} ({:.4} bits/byte) over {} tokens in windows of {}; \
             {:.1} % of neurons active",
            self.perplexity,
            self.bits_per_byte,
            self.tokens,
            self.window,
            100.0 * self.active_share
        )
    }
}

/// Returns the next tokens of a text, at most as many as requested, fewer at its end.
pub type NextTokens<'a> = dyn FnMut(usize) -> Result<Vec<u32>, Failure> + 'a;

/// Scores a text in windows. Each window starts with an empty context: with the model's BOS token if it has one;
/// otherwise its first token is not scored. `see` observes the FFNs of an engine opened with an observer.
///
/// # Errors
/// A text with fewer than two tokens, and errors of `next` or the engine.
pub fn measure(
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
        device: engine.lane(),
        active_share: engine.counters().active_share(),
        peak_rss_bytes: mem::peak_rss(),
        budget_bytes: engine.memory().budget(),
    })
}
