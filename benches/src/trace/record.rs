//! `emberflow-lab trace record`: records which neurons each token of a text needs, or which experts
//! in a model with experts.

use std::io::Write as _;

use emberflow_engine::{FfnSeen, Logits, Model};
use emberflow_models::config::ModelConfig;
use emberflow_predictor::stats::ActivationStats;
use emberflow_storage::container::Container;
use serde::Serialize;

use super::format::{Header, Writer};
use crate::cli::TraceRecordArgs;
use emberflow::activity::{activity, visits};
use emberflow::model::{open_model, open_observed, open_routed};
use emberflow::text::{self, Tokens};
use emberflow::{Failure, atomic, budget, print_json, progress};

/// Default tokens per sequence.
const WINDOW: u32 = 1024;

/// Output of the command. JSON keys are a contract.
#[derive(Debug, Serialize)]
struct Done {
    /// Path of the trace.
    output: String,
    /// Tokens.
    tokens: u64,
    /// `neurons` or `experts`.
    unit: &'static str,
    /// Mean number needed per token, over all layers.
    needed_per_token: f64,
    /// Share of all neurons or experts.
    active_share: f64,
}

/// Runs the command.
pub fn command(args: &TraceRecordArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine.engine(), args.force)?;
    let reads = [args.model.file(), Some(args.file.as_path())];
    atomic::may_write(&args.output, args.force, &reads)?;
    let model = open_model(&args.model)?;
    let c = model.text().config().clone();
    let window = text::window(args.window, WINDOW, c.max_context)?;
    let text = model.text().clone();
    let mut source = Tokens::open(&text, &args.file, args.limit)?;
    let header = header(&model, &c)?;
    let (layers, neurons) = (header.layers, header.neurons);
    let start = model.text().start_tokens().to_vec();
    let engine = args.engine.engine();
    let chunk = match engine.lab.chunk {
        0 => 16,
        given => given,
    };
    let reserve = 4 * (chunk * layers * neurons) as u64;
    let open = if header.experts {
        open_routed
    } else {
        open_observed
    };
    let mut engine = open(model, &engine, window as usize, reserve, args.force)?;

    let file = atomic::Partial::create(&args.output)?;
    let failed = |e: super::TraceError| Failure::Fault(format!("{}: {e}", args.output.display()));
    let mut writer = Writer::new(std::io::BufWriter::new(file.get()), &header).map_err(failed)?;
    let bar = progress::bytes("recording", source.bytes());
    let mut sets = Sets::new(layers, chunk);
    let (mut tokens, mut needed) = (0u64, 0u64);
    let mut sequence = engine.new_sequence()?;
    loop {
        let body = source.next((window as usize).saturating_sub(start.len()).max(1))?;
        if body.is_empty() {
            break;
        }
        bar.set_position(source.bytes_read());
        let all = [&start[..], &body].concat();
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
        }
    }
    bar.finish_and_clear();
    drop(writer.finish().map_err(failed)?);
    file.publish()?;
    let per_token = needed as f64 / tokens.max(1) as f64;
    let done = Done {
        output: args.output.display().to_string(),
        tokens,
        unit: header.unit(),
        needed_per_token: per_token,
        active_share: per_token / (layers * neurons).max(1) as f64,
    };
    if args.json {
        print_json(&done)
    } else {
        done.print()
    }
}

impl Done {
    fn print(&self) -> Result<(), Failure> {
        writeln!(
            std::io::stdout().lock(),
            "{}: {} tokens, {:.0} {} needed per token ({:.1} %)",
            self.output,
            self.tokens,
            self.needed_per_token,
            self.unit,
            100.0 * self.active_share
        )?;
        Ok(())
    }
}

/// Needed neurons or experts of a chunk's tokens.
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

    /// Records one layer: chosen experts, or neurons with nonzero gates.
    fn keep(&mut self, seen: &FfnSeen<'_>) {
        self.by_token.iter_mut().for_each(|s| s[seen.layer].clear());
        let chosen = seen.choices.len() / seen.tokens.max(1);
        let tokens = seen.choices.chunks_exact(chosen.max(1));
        for (set, choices) in self.by_token.iter_mut().zip(tokens) {
            let set = &mut set[seen.layer];
            set.extend(choices.iter().map(|choice| choice.expert));
            set.sort_unstable();
        }
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
    if c.mixture.is_some() {
        return experts_header(container, c);
    }
    let stats = activity(container, c)?;
    let (layers, neurons) = (c.ffn_layers().count(), c.ffn as usize);
    let g = container.geometry();
    let counts = |s: &ActivationStats| {
        let layers = s.layers.iter().flat_map(|l| &l.experts);
        layers.map(|e| e.counts.clone()).collect()
    };
    Ok(Header {
        model: c.name.clone(),
        experts: false,
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

/// Header of a trace of experts.
fn experts_header(container: &Container, c: &ModelConfig) -> Result<Header, Failure> {
    let mut first = Vec::with_capacity(c.layers as usize);
    let mut banks = 0;
    for layer in c.ffn_layers() {
        first.push(banks);
        banks += c.banks_of(layer).count();
    }
    let g = container.geometry();
    let whole = u64::from(g.stride) * u64::from(c.ffn);
    let stride = u32::try_from(whole.next_multiple_of(4096)).map_err(|_| {
        Failure::usage(format!(
            "an expert of {whole} bytes is too large for a trace"
        ))
    })?;
    let routing = visits(container, c)?;
    Ok(Header {
        model: c.name.clone(),
        experts: true,
        layers: first.len(),
        neurons: c.experts as usize,
        stride,
        rest_read: 0,
        sector: g.sector,
        offsets: first
            .iter()
            .map(|&bank| container.neuron_offset(bank, 0))
            .collect(),
        stats_tokens: routing.as_ref().map_or(0, |r| r.tokens),
        counts: routing.map_or(Vec::new(), |r| r.visits),
    })
}
