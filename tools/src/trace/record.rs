//! `emberflow trace record`: which neurons each token of a text needs.

use std::io::Write as _;

use emberflow_engine::{FfnSeen, Logits, Model};
use emberflow_models::config::ModelConfig;
use emberflow_predictor::stats::ActivationStats;
use serde::Serialize;

use super::format::{Header, Writer};
use crate::activity::activity;
use crate::cli::TraceRecordArgs;
use crate::model::{open_model, open_observed};
use crate::{Failure, atomic, budget, print_json, progress, text};

/// Tokens of a sequence when none is given.
const WINDOW: u32 = 1024;

/// The result. Keys are a contract.
#[derive(Debug, Serialize)]
struct Done {
    /// The trace.
    output: String,
    /// Tokens.
    tokens: u64,
    /// Neurons that were needed per token, over all layers.
    needed_per_token: f64,
    /// Share of all neurons.
    active_share: f64,
}

/// Runs the command.
pub fn command(args: &TraceRecordArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine, args.force)?;
    atomic::may_write(&args.output, args.force)?;
    let text = std::fs::read_to_string(&args.file).map_err(Failure::file(&args.file))?;
    let model = open_model(&args.model)?;
    let c = model.text().config().clone();
    let window = text::window(args.window, WINDOW, c.max_context)?;
    let ids = text::tokens(&model, text, args.limit)?;
    let (layers, neurons) = (c.layers as usize, c.ffn as usize);
    let header = header(&model, &c)?;
    let bos = model.text().start_token();
    let chunk = usize::from(args.engine.chunk.unwrap_or(16));
    let reserve = 4 * (chunk * layers * neurons) as u64;
    let mut engine = open_observed(model, &args.engine, window as usize, reserve, args.force)?;

    let file = atomic::Partial::create(&args.output)?;
    let failed = |e: super::TraceError| Failure::Fault(format!("{}: {e}", args.output.display()));
    let mut writer = Writer::new(std::io::BufWriter::new(file.get()), &header).map_err(failed)?;
    let bar = progress::steps("recording", ids.len() as u64);
    let mut sets = Sets::new(layers, chunk);
    let (mut tokens, mut needed) = (0u64, 0u64);
    let mut sequence = engine.new_sequence()?;
    for body in ids.chunks(window as usize - usize::from(bos.is_some())) {
        let all: Vec<u32> = bos.into_iter().chain(body.iter().copied()).collect();
        sequence.clear();
        let mut begins = true;
        for piece in all.chunks(chunk) {
            engine.forward_observed(&mut sequence, piece, Logits::None, &mut |seen| {
                sets.keep(seen);
            })?;
            for set in &sets.by_token[..piece.len()] {
                writer.token(begins, set).map_err(failed)?;
                begins = false;
                tokens += 1;
                needed += set.iter().map(|ids| ids.len() as u64).sum::<u64>();
            }
            bar.inc(piece.len() as u64);
        }
    }
    bar.finish_and_clear();
    drop(writer.finish().map_err(failed)?);
    file.publish()?;
    let per_token = needed as f64 / tokens.max(1) as f64;
    let done = Done {
        output: args.output.display().to_string(),
        tokens,
        needed_per_token: per_token,
        active_share: per_token / (layers * neurons).max(1) as f64,
    };
    if args.json {
        return print_json(&done);
    }
    writeln!(
        std::io::stdout().lock(),
        "{}: {} tokens, {:.0} neurons needed per token ({:.1} %)",
        done.output,
        done.tokens,
        done.needed_per_token,
        100.0 * done.active_share
    )?;
    Ok(())
}

/// The neurons that the tokens of a chunk need.
struct Sets {
    /// By token, then by layer.
    by_token: Vec<Vec<Vec<u32>>>,
}

impl Sets {
    fn new(layers: usize, chunk: usize) -> Self {
        Self {
            by_token: vec![vec![Vec::new(); layers]; chunk],
        }
    }

    /// Those of one layer, whose gates are not zero.
    fn keep(&mut self, seen: &FfnSeen<'_>) {
        self.by_token.iter_mut().for_each(|s| s[seen.layer].clear());
        for (n, gates) in seen.gates.chunks_exact(seen.tokens).enumerate() {
            for (set, &gate) in self.by_token.iter_mut().zip(gates) {
                if gate != 0.0 {
                    set[seen.layer].push(n as u32);
                }
            }
        }
    }
}

fn header(model: &Model, c: &ModelConfig) -> Result<Header, Failure> {
    let container = model.container();
    let stats = activity(container, c)?;
    let (layers, neurons) = (c.layers as usize, c.ffn as usize);
    let g = container.geometry();
    let counts = |s: &ActivationStats| {
        let layers = s.layers.iter().flat_map(|l| &l.experts);
        layers.map(|e| e.counts.clone()).collect()
    };
    Ok(Header {
        model: c.name.clone(),
        layers,
        neurons,
        stride: g.stride,
        rest_read: g.rest_read(),
        sector: g.sector,
        offsets: (0..layers).map(|l| container.neuron_offset(l, 0)).collect(),
        stats_tokens: stats.as_ref().map_or(0, |s| s.tokens),
        counts: stats.as_ref().map_or(Vec::new(), counts),
    })
}
