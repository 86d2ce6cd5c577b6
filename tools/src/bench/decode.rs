//! `emberflow bench decode`: decode speed, time per stage, and speed relative to memory bandwidth.

use std::time::{Duration, Instant};

use emberflow_engine::energy::Meter;
use emberflow_engine::{Counters, Engine, Logits, Probe, Sparsity};
use serde::Serialize;

use super::facts::Facts;
use super::output::{Results, Table, may_write, percent};
use crate::chart::{Labels, piles};
use crate::cli::BenchDecodeArgs;
use crate::model::{open_engine, open_model};
use crate::{Failure, budget, progress, stats};

/// Warm-up tokens.
const WARM_UP: usize = 4;

/// Duration of a memory bandwidth measurement.
const SHORT: Duration = Duration::from_millis(300);

/// Results for one context length.
#[derive(Debug, Serialize)]
pub struct Rates {
    /// Context length.
    pub context: usize,
    /// Time per token: median and quartiles.
    pub ms: stats::Spread,
    /// Tokens per second, from the median.
    pub tokens_per_s: f64,
    /// Mean milliseconds per token in attention, FFN and head.
    pub attention_ms: f64,
    /// See `attention_ms`.
    pub ffn_ms: f64,
    /// Mean milliseconds per token in predictors, included in `ffn_ms`.
    pub predict_ms: f64,
    /// See `attention_ms`.
    pub head_ms: f64,
    /// Bytes of weights, keys and values that a token is computed from.
    pub bytes_per_token: u64,
    /// Bound: milliseconds to read those bytes at the memory bandwidth of the same threads.
    pub bound_ms: f64,
    /// Bytes per second, from the median.
    pub gb_per_s: f64,
    /// `gb_per_s` as a share of the memory bandwidth.
    pub roofline: f64,
    /// The same for the FFNs alone.
    pub ffn_gb_per_s: f64,
    /// See `roofline`.
    pub ffn_roofline: f64,
    /// Share of active neurons.
    pub active_share: f64,
    /// Milliseconds per token spent waiting for reads.
    pub wait_ms: f64,
    /// Token time as a share of the first context's time plus the time for the additional bytes of keys and values; 1
    /// for the first.
    pub of_explained: f64,
    /// Joules per token from the report's `energy_source`, which includes everything else on the machine; absent
    /// without a source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub joules_per_token: Option<f64>,
}

/// Additional members of the JSON object.
#[derive(Serialize)]
struct DecodeReport {
    isa: &'static str,
    threads: usize,
    sparsity: &'static str,
    ffn_resident_share: f64,
    /// Memory bandwidth of the threads on resident FFN weights, in bytes per second.
    memory_gb_per_s: f64,
    /// `rapl` with the processor packages added up, or `battery` with its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    energy_source: Option<String>,
    contexts: Vec<Rates>,
}

/// Runs the command.
pub fn command(args: &BenchDecodeArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine, args.output.force)?;
    may_write(&args.output, "decode", Some(&args.model), None)?;
    let model = open_model(&args.model)?;
    let tokens = args.tokens.unwrap_or(if args.quick { 8 } else { 32 }) as usize;
    let facts = Facts::of(&args.model)?;
    let longest = args.contexts.iter().copied().max().unwrap_or(0);
    let most = model.text().config().max_context as usize;
    let room = longest + WARM_UP + tokens;
    if room > most {
        return Err(Failure::usage(format!(
            "--contexts {longest} plus {} tokens exceed the context length of {most} of this model",
            tokens
        )));
    }
    let mut engine = open_engine(model, &args.engine, room, args.output.force)?;
    // Otherwise the active set is not known before bytes are read.
    let known = engine.sparsity() == Sparsity::Exact && engine.memory().gates_resident();
    if args.oracle && !known {
        return Err(Failure::usage(
            "--oracle needs --sparsity exact and resident Gate rows: use a model with a ReLU-family \
             activation and a larger --memory",
        ));
    }
    let mut meter = Meter::find(&engine.options().lab.sysfs);
    let measured = measure_all(&mut engine, meter.as_mut(), args, tokens)?;
    let report = DecodeReport {
        isa: engine.cpu().name(),
        threads: engine.threads(),
        sparsity: if args.oracle {
            "oracle"
        } else {
            engine.sparsity().name()
        },
        ffn_resident_share: engine.memory().ffn_resident_share(engine.needs()),
        memory_gb_per_s: measured.bandwidth / 1e9,
        energy_source: meter.map(|meter| meter.name().to_owned()),
        contexts: measured.contexts,
    };
    let model = engine.config().name.clone();
    Results {
        bench: "decode",
        svg: chart(&model, &facts.line(), &report),
        table: table(&report.contexts),
        csv: csv(&report),
        agreement: None,
        model: Some(model),
        how: format!(
            "decoding by context length, {tokens} tokens each, {} threads, {}, {} of the FFN in memory",
            report.threads,
            report.sparsity,
            percent(report.ffn_resident_share)
        ),
        facts,
        notes: notes(&report),
        body: report,
    }
    .finish(&args.output)
}

/// Results for all contexts, and the best memory bandwidth.
struct Measured {
    contexts: Vec<Rates>,
    /// Bytes per second.
    bandwidth: f64,
}

fn measure_all(
    engine: &mut Engine,
    mut meter: Option<&mut Meter>,
    args: &BenchDecodeArgs,
    tokens: usize,
) -> Result<Measured, Failure> {
    let mut bandwidth = Probe::new(engine).read_bandwidth(SHORT);
    let passes = args.contexts.len() * tokens * if args.oracle { 2 } else { 1 };
    let bar = progress::steps("decoding", passes as u64);
    let mut contexts: Vec<Rates> = Vec::new();
    for &context in &args.contexts {
        if args.oracle {
            // Decode the same tokens once before, to record their active neurons.
            Probe::new(engine).record_active();
            measure(engine, None, context, tokens, &|| bar.inc(1))?;
            Probe::new(engine).replay_active();
        }
        let mut rates = measure(engine, meter.as_deref_mut(), context, tokens, &|| {
            bar.inc(1)
        })?;
        // Take the highest bandwidth measured during the run.
        bandwidth = bandwidth.max(Probe::new(engine).read_bandwidth(SHORT));
        if let Some(first) = contexts.first() {
            let added = rates.bytes_per_token.saturating_sub(first.bytes_per_token);
            let explained = first.ms.median + added as f64 / bandwidth.max(1.0) * 1e3;
            rates.of_explained = rates.ms.median / explained;
        }
        contexts.push(rates);
    }
    bar.finish_and_clear();
    for rates in &mut contexts {
        rates.bound_ms = rates.bytes_per_token as f64 / bandwidth.max(1.0) * 1e3;
        rates.roofline = share(rates.gb_per_s * 1e9, bandwidth);
        rates.ffn_roofline = share(rates.ffn_gb_per_s * 1e9, bandwidth);
    }
    Ok(Measured {
        contexts,
        bandwidth,
    })
}

fn measure(
    engine: &mut Engine,
    mut meter: Option<&mut Meter>,
    context: usize,
    tokens: usize,
    done: &dyn Fn(),
) -> Result<Rates, Failure> {
    let mut sequence = engine.new_sequence()?;
    Probe::new(engine).pretend(&mut sequence, 0, context)?;
    let vocab = engine.config().vocab;
    // Greedy decoding of random weights soon repeats itself; stepping through the vocabulary activates different
    // neurons for every token.
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
    let mut joules_now = || meter.as_mut().and_then(|meter| meter.joules());
    let joules_before = joules_now();
    let mut joules = joules_before;
    let mut ms = Vec::with_capacity(tokens);
    for _ in 0..tokens {
        ms.push(step(engine)?);
        joules = joules_now();
        done();
    }
    let counters = engine.counters().since(before);
    let per_token = |sum: u64| sum as f64 / tokens.max(1) as f64;
    let ms = stats::Spread::of(&mut ms);
    let ffn_bytes = per_token(counters.ffn_bytes);
    let kv_bytes = (context + WARM_UP + tokens / 2) as u64 * sequence.position_bytes();
    let bytes = Probe::new(engine).dense_bytes() + kv_bytes + ffn_bytes as u64;
    let ffn_ms = per_token(counters.ffn_ns) / 1e6;
    Ok(Rates {
        context,
        tokens_per_s: 1e3 / ms.median,
        attention_ms: per_token(counters.attention_ns) / 1e6,
        ffn_ms,
        predict_ms: per_token(counters.predict_ns) / 1e6,
        head_ms: per_token(counters.head_ns) / 1e6,
        bytes_per_token: bytes,
        bound_ms: 0.0,
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

impl Rates {
    /// Milliseconds per token by stage: attention, FFN without the next two, predictors, I/O wait, head.
    fn parts(&self) -> [f64; 5] {
        let ffn = self.ffn_ms - self.predict_ms - self.wait_ms;
        [
            self.attention_ms,
            ffn.max(0.0),
            self.predict_ms,
            self.wait_ms,
            self.head_ms,
        ]
    }
}

/// What the numbers are compared with, and the energy.
fn notes(report: &DecodeReport) -> Vec<String> {
    let mut notes = vec![format!(
        "bound: bytes per token / {:.1} GB/s, the memory bandwidth of the same threads in this \
         run; medians and quartiles over tokens, stages are means",
        report.memory_gb_per_s
    )];
    if let Some(source) = &report.energy_source {
        let joules = (report.contexts.iter())
            .filter_map(|r| Some(format!("{:.3} ({})", r.joules_per_token?, r.context)));
        let joules = joules.collect::<Vec<_>>().join(", ");
        notes.push(format!("J/token (context), {source}: {joules}"));
    }
    notes
}

fn table(contexts: &[Rates]) -> Table {
    let mut table = Table::new(
        "context | tokens/s | ms/token (25 % to 75 %) | attention | FFN | predict | \
         I/O wait | head | active | MB/token | GB/s | bound, ms | of memory | FFN GB/s | \
         of memory | of explained",
    );
    for r in contexts {
        let whole = |share: f64| format!("{:.0} %", 100.0 * share);
        let ms = &r.ms;
        let mut cells = vec![
            r.context.to_string(),
            format!("{:.2}", r.tokens_per_s),
            format!("{:.2} ({:.2} to {:.2})", ms.median, ms.low, ms.high),
        ];
        cells.extend(r.parts().map(|ms| format!("{ms:.2}")));
        cells.extend([
            percent(r.active_share),
            format!("{:.1}", r.bytes_per_token as f64 / 1e6),
            format!("{:.1}", r.gb_per_s),
            format!("{:.2}", r.bound_ms),
            whole(r.roofline),
            format!("{:.1}", r.ffn_gb_per_s),
            whole(r.ffn_roofline),
            format!("{:.2}", r.of_explained),
        ]);
        table.rows.push(cells);
    }
    table
}

fn csv(report: &DecodeReport) -> Table {
    let mut table = Table::new(
        "context | sparsity | ffn_resident_share | tokens_per_s | ms_median | ms_25 | \
         ms_75 | attention_ms | ffn_ms | predict_ms | wait_ms | head_ms | active_share | \
         bytes_per_token | memory_gb_per_s | bound_ms | gb_per_s | roofline | \
         ffn_gb_per_s | ffn_roofline | of_explained | joules_per_token",
    );
    for r in &report.contexts {
        let numbers = |values: &[f64]| -> Vec<String> {
            values.iter().map(|value| format!("{value:.4}")).collect()
        };
        let mut cells = vec![r.context.to_string(), report.sparsity.to_owned()];
        cells.extend(numbers(&[report.ffn_resident_share, r.tokens_per_s]));
        cells.extend(numbers(&[r.ms.median, r.ms.low, r.ms.high]));
        cells.extend(numbers(&[r.attention_ms, r.ffn_ms, r.predict_ms]));
        cells.extend(numbers(&[r.wait_ms, r.head_ms, r.active_share]));
        cells.push(r.bytes_per_token.to_string());
        cells.extend(numbers(&[report.memory_gb_per_s, r.bound_ms, r.gb_per_s]));
        cells.extend(numbers(&[r.roofline, r.ffn_gb_per_s, r.ffn_roofline]));
        cells.extend(numbers(&[r.of_explained]));
        let joules = r.joules_per_token.map(|j| format!("{j:.4}"));
        cells.push(joules.unwrap_or_default());
        table.rows.push(cells);
    }
    table
}

/// Time per token by stage, with the bound.
fn chart(model: &str, facts: &str, report: &DecodeReport) -> String {
    let names = [
        "attention",
        "FFN",
        "predictors",
        "I/O wait",
        "head",
        "bound",
    ];
    let mut groups = Vec::new();
    for r in &report.contexts {
        groups.push((format!("{} positions", r.context), r.parts().to_vec()));
        let mut bound = vec![0.0; names.len()];
        bound[names.len() - 1] = r.bound_ms;
        groups.push(("bytes / memory".into(), bound));
    }
    let title = format!(
        "{model}: time per token by stage, {}, {} of the FFN in memory",
        report.sparsity,
        percent(report.ffn_resident_share)
    );
    let labels = Labels {
        title: &title,
        facts,
        x: "context length",
        y: "milliseconds per token (mean)",
    };
    piles(&labels, &names.map(str::to_owned), &groups)
}
