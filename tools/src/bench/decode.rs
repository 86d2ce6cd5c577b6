//! `emberflow bench decode`: how fast tokens are made, where the time goes, and how far
//! that is from the speed of memory.

use std::time::{Duration, Instant};

use emberflow_engine::{Counters, Engine, Logits, Sparsity};
use serde::Serialize;

use crate::cli::BenchDecodeArgs;
use crate::model::{open_engine, open_model};
use crate::{Failure, print_json, progress, stats};

/// Tokens that are not counted: what they touch first comes into memory.
const WARM_UP: usize = 4;

/// The numbers of one context length.
#[derive(Debug, Serialize)]
pub struct Rates {
    /// Positions before the first token.
    pub context: usize,
    /// Median time of a token, and the middle half of them.
    pub ms: stats::Spread,
    /// Tokens per second at the median.
    pub tokens_per_s: f64,
    /// Milliseconds per token in attention, FFN and head (means).
    pub attention_ms: f64,
    /// See `attention_ms`.
    pub ffn_ms: f64,
    /// Of this, milliseconds in which predictors named neurons.
    pub predict_ms: f64,
    /// See `attention_ms`.
    pub head_ms: f64,
    /// Bytes of weights and of keys and values that a token is computed from.
    pub bytes_per_token: u64,
    /// Those bytes per second, at the median.
    pub gb_per_s: f64,
    /// As a share of what the same threads read from the same memory.
    pub roofline: f64,
    /// The same for the FFNs alone.
    pub ffn_gb_per_s: f64,
    /// See `roofline`.
    pub ffn_roofline: f64,
    /// Share of neurons that fired.
    pub active_share: f64,
    /// Milliseconds per token that the computation waited for reads.
    pub wait_ms: f64,
    /// Time of a token as a share of what the first context's time and the added
    /// bytes of keys and values explain; 1 for the first.
    pub of_explained: f64,
    /// Joules per token of whatever tells the energy (see the report's `energy_source`), everything
    /// else on the machine included; absent where nothing tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub joules_per_token: Option<f64>,
}

#[derive(Serialize)]
struct Report {
    model: String,
    machine: emberflow_storage::profile::Machine,
    isa: &'static str,
    threads: usize,
    sparsity: &'static str,
    ffn_resident_share: f64,
    /// Bytes per second that the threads read from the resident FFN weights.
    memory_gb_per_s: f64,
    /// `rapl` with the processor packages that were added up, or `battery` with its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    energy_source: Option<String>,
    contexts: Vec<Rates>,
}

/// Runs the command.
pub fn command(args: &BenchDecodeArgs) -> Result<(), Failure> {
    let model = open_model(&args.model)?;
    let tokens = args.tokens as usize;
    let longest = args.contexts.iter().copied().max().unwrap_or(0);
    let most = model.text().config().max_context as usize;
    let room = longest + WARM_UP + tokens;
    if room > most {
        return Err(Failure::usage(format!(
            "--contexts {longest} and {} tokens are more than the {most} positions of this model",
            tokens
        )));
    }
    let mut engine = open_engine(model, &args.engine, room)?;
    // Elsewhere there is no active set to take for granted before bytes are read.
    let known = engine.sparsity() == Sparsity::Exact && engine.plan().gates_resident;
    if args.oracle && !known {
        return Err(Failure::usage(
            "--oracle needs --sparsity exact and resident Gate rows: use a model with a ReLU-family \
             activation and a larger --memory",
        ));
    }
    let mut bandwidth = engine.read_bandwidth(Duration::from_millis(300));
    let passes = args.contexts.len() * tokens * if args.oracle { 2 } else { 1 };
    let bar = progress::steps("decoding", passes as u64);
    let mut contexts: Vec<Rates> = Vec::new();
    for &context in &args.contexts {
        if args.oracle {
            // The same tokens once before, to learn what they need.
            engine.record_active();
            measure(&mut engine, context, tokens, &|| bar.inc(1))?;
            engine.replay_active();
        }
        let mut rates = measure(&mut engine, context, tokens, &|| bar.inc(1))?;
        // The best that was seen in the run: a slow moment is no bound.
        bandwidth = bandwidth.max(engine.read_bandwidth(Duration::from_millis(300)));
        if let Some(first) = contexts.first() {
            let added = rates.bytes_per_token.saturating_sub(first.bytes_per_token);
            let explained = first.ms.median + added as f64 / bandwidth.max(1.0) * 1e3;
            rates.of_explained = rates.ms.median / explained;
        }
        contexts.push(rates);
    }
    bar.finish_and_clear();
    for rates in &mut contexts {
        rates.roofline = share(rates.gb_per_s * 1e9, bandwidth);
        rates.ffn_roofline = share(rates.ffn_gb_per_s * 1e9, bandwidth);
    }
    let report = Report {
        model: engine.config().name.clone(),
        machine: emberflow_storage::profile::Machine::here(),
        isa: engine.cpu().name(),
        threads: engine.threads(),
        sparsity: if args.oracle {
            "oracle"
        } else {
            engine.sparsity().name()
        },
        ffn_resident_share: engine.memory().ffn_resident_share(engine.needs()),
        memory_gb_per_s: bandwidth / 1e9,
        energy_source: engine.energy_source().map(str::to_owned),
        contexts,
    };
    if args.json {
        return print_json(&report);
    }
    print!("{}", table(&report));
    Ok(())
}

fn measure(
    engine: &mut Engine,
    context: usize,
    tokens: usize,
    done: &dyn Fn(),
) -> Result<Rates, Failure> {
    let mut sequence = engine.new_sequence();
    sequence.pretend(0, context);
    let vocab = engine.config().vocab;
    // Greedy decoding of a random model runs into a circle; a walk through the vocabulary
    // gives every token its own neurons.
    let mut token = 7 % vocab;
    let mut step = |engine: &mut Engine| -> Result<f64, Failure> {
        token = (token * 31 + 17) % vocab;
        let start = Instant::now();
        engine.forward(&mut sequence, &[token], Logits::Last)?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    };
    for _ in 0..WARM_UP {
        step(engine)?;
    }
    let before = engine.counters();
    let joules_before = engine.joules();
    let mut joules = joules_before;
    let mut ms = Vec::with_capacity(tokens);
    for _ in 0..tokens {
        ms.push(step(engine)?);
        joules = engine.joules();
        done();
    }
    let counters = engine.counters().since(before);
    let per_token = |sum: u64| sum as f64 / tokens.max(1) as f64;
    let ms = stats::Spread::of(&mut ms);
    let ffn_bytes = per_token(counters.ffn_bytes);
    let kv_bytes = (context + WARM_UP + tokens / 2) as u64 * sequence.position_bytes();
    let bytes = engine.dense_bytes() + kv_bytes + ffn_bytes as u64;
    let ffn_ms = per_token(counters.ffn_ns) / 1e6;
    Ok(Rates {
        context,
        tokens_per_s: 1e3 / ms.median,
        attention_ms: per_token(counters.attention_ns) / 1e6,
        ffn_ms,
        predict_ms: per_token(counters.predict_ns) / 1e6,
        head_ms: per_token(counters.head_ns) / 1e6,
        bytes_per_token: bytes,
        gb_per_s: bytes as f64 / ms.median / 1e6,
        roofline: 0.0,
        ffn_gb_per_s: ffn_bytes / ffn_ms / 1e6,
        ffn_roofline: 0.0,
        active_share: Counters::active_share(counters),
        wait_ms: per_token(counters.wait_ns) / 1e6,
        of_explained: 1.0,
        joules_per_token: joules
            .zip(joules_before)
            .map(|(after, before)| (after - before) / tokens.max(1) as f64),
        ms,
    })
}

fn share(rate: f64, bound: f64) -> f64 {
    if bound > 0.0 { rate / bound } else { 0.0 }
}

fn table(report: &Report) -> String {
    let mut text = format!(
        "{} ({} threads, {}, {}), FFN {:.0} % resident; the threads read that memory at {:.1} GB/s\n\n\
         context   tok/s   ms/token (25 % to 75 %)   attention    ffn  naming   head   waiting   active   \
         MB/token   GB/s   of memory   ffn GB/s   of memory   of explained\n",
        report.model,
        report.threads,
        report.isa,
        report.sparsity,
        100.0 * report.ffn_resident_share,
        report.memory_gb_per_s
    );
    for r in &report.contexts {
        text += &format!(
            "{:7} {:7.2} {:10.2} ({:6.2} to {:6.2}) {:11.2} {:6.2} {:7.2} {:6.2} {:9.2} {:6.1} % {:10.1} {:6.1} \
             {:9.0} % {:10.1} {:9.0} % {:14.2}\n",
            r.context,
            r.tokens_per_s,
            r.ms.median,
            r.ms.low,
            r.ms.high,
            r.attention_ms,
            r.ffn_ms,
            r.predict_ms,
            r.head_ms,
            r.wait_ms,
            100.0 * r.active_share,
            r.bytes_per_token as f64 / 1e6,
            r.gb_per_s,
            100.0 * r.roofline,
            r.ffn_gb_per_s,
            100.0 * r.ffn_roofline,
            r.of_explained,
        );
    }
    if let Some(source) = &report.energy_source {
        let joules = (report.contexts.iter())
            .filter_map(|r| Some(format!("{:.3} ({})", r.joules_per_token?, r.context)));
        let joules = joules.collect::<Vec<_>>().join(", ");
        text += &format!("\nJ/token (context), {source}: {joules}\n");
    }
    text
}
