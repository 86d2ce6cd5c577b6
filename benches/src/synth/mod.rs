//! `emberflow-lab synth`: random checkpoints of real shapes with given statistics.
//!
//! Speed and memory depend on a model's shape, its formats, and which neurons fire: how many, how
//! unevenly, how persistently; likewise for experts. A checkpoint with the same numbers measures
//! what the real one would, without a download. Its text is meaningless.
//!
//! | file | what |
//! |---|---|
//! | `shape.rs`, `described.rs`, `vocab.rs` | dimensions; those of a `config.json`; tokens |
//! | `firing.rs`, `normal.rs` | statistics → biases and correlation |
//! | `routing.rs` | the same for experts |
//! | `window.rs` | correlation → an attention pattern |
//! | `stream.rs`, `mixers.rs`, `recipe.rs` | the residual stream; what every row contains |
//! | `blocks.rs`, `random.rs` | rows as bytes |
//! | `write.rs` | the files |
//! | `measure.rs` | statistics of decoding, next to the targets |

mod args;
mod blocks;
mod described;
pub mod firing;
mod measure;
mod mixers;
mod normal;
mod random;
mod recipe;
pub mod routing;
pub mod shape;
mod stream;
mod vocab;
mod window;
mod write;

pub use self::args::{SynthArgs, SynthQuantArg};

use std::io::Write;
use std::time::Instant;

use emberflow_models::Encoding;
use emberflow_models::config::{Activation, ModelConfig};
use serde::Serialize;

use self::firing::{Firing, Targets};
use self::measure::Measured;
use self::recipe::{Recipe, Statistics};
use self::routing::{Routing, RoutingTargets};
use emberflow::interrupt::Unfinished;
use emberflow::{Failure, atomic, print_json, progress, size};

/// Threads that generate rows: enough to keep up with a disk.
const THREADS: usize = 2;
/// Models of up to this many bytes are measured by default.
const SMALL: u64 = 64 << 20;
/// Tokens of that measurement.
const TOKENS: u32 = 1024;
/// Fewest tokens of a measurement.
const FEWEST: u32 = 16;

/// Output of the command. JSON keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct SynthReport {
    /// File or folder.
    pub output: String,
    /// Name of the shape.
    pub shape: String,
    /// Activation.
    pub act: String,
    /// Seed.
    pub seed: u64,
    /// Bytes of the weights.
    pub bytes: u64,
    /// Seconds for writing.
    pub seconds: f64,
    /// Highest resident set of the process after writing (VmHWM).
    pub peak_rss_bytes: Option<u64>,
    /// Target statistics.
    pub target: Targets,
    /// Statistics measured by decoding.
    pub measured: Option<Measured>,
}

impl SynthReport {
    /// The report before anything is written.
    fn new(output: &str, shape: &str, act: &str, seed: u64, target: Targets) -> Self {
        Self {
            output: output.into(),
            shape: shape.into(),
            act: act.into(),
            seed,
            bytes: 0,
            seconds: 0.0,
            peak_rss_bytes: None,
            target,
            measured: None,
        }
    }
}

impl From<SynthQuantArg> for Encoding {
    fn from(arg: SynthQuantArg) -> Self {
        match arg {
            SynthQuantArg::Q4_0 => Self::Q4_0,
            SynthQuantArg::Q8_0 => Self::Q8_0,
            SynthQuantArg::F16 => Self::F16,
        }
    }
}

/// Runs the command.
pub fn command(args: &SynthArgs) -> Result<(), Failure> {
    let gguf = args.output.extension().is_some_and(|e| e == "gguf");
    let config = args.shape.config(args.act, args.layers, args.small)?;
    let act = match args.act {
        _ if args.shape.text().is_some() => described::activation(config.ffn_kind).to_owned(),
        act => name(act.unwrap_or_else(|| args.shape.default_act())),
    };
    check(args, gguf, &config, &act)?;
    let mut target = targets(args, &config)?;
    let mut statistics = statistics(&target, &config)?;
    if args.shape.text().is_some() && !config.ffn_kind.activation.is_sparse() {
        // all neurons count, so they may change as fast as the experts
        let routed = statistics.routing.as_ref().map_or(1.0, |r| r.correlation);
        target.persistence = statistics.firing.loosen(routed);
    }
    let recipe = Recipe::new(&config, statistics, args.gate_rank, args.seed)?;
    let room = config
        .max_context
        .saturating_sub(recipe.stream.window.warm_up as u32);
    if let Some(tokens @ 1..) = args.measure
        && !(FEWEST..=room).contains(&tokens)
    {
        return Err(Failure::usage(format!(
            "--measure {tokens}: expected 0 for none, or {FEWEST} to {room}, the model's context"
        )));
    }
    let encoding = match args.quant {
        _ if !gguf => Encoding::F32,
        None | Some(SynthQuantArg::Q4_0) => args.shape.four_bits(),
        Some(quant) => quant.into(),
    };
    let place = args.output.display().to_string();
    let mut report = SynthReport::new(&place, &name(args.shape), &act, args.seed, target);
    let start = Instant::now();
    let bar = progress::bytes("writing", 0);
    let mut tell = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let output = &args.output;
    let unfinished = Unfinished::partial(output);
    let written = if gguf {
        write::gguf(
            output, &config, &recipe, encoding, &report, THREADS, &mut tell,
        )
    } else {
        write::folder(output, &config, &recipe, THREADS, &mut tell)
    };
    bar.finish_and_clear();
    drop(unfinished);
    report.bytes = written?;
    report.seconds = start.elapsed().as_secs_f64();
    report.peak_rss_bytes = emberflow_storage::mem::peak_rss();
    let unasked = if report.bytes <= SMALL { TOKENS } else { 0 };
    if let tokens @ 1.. = args.measure.unwrap_or(unasked) {
        let (tokens, warm_up) = (tokens as usize, recipe.stream.window.warm_up);
        report.measured = Some(measure::measure(output, encoding, tokens, warm_up)?);
    }
    if args.json {
        return print_json(&report);
    }
    show(&report)?;
    Ok(())
}

/// Rejects meaningless options and unwritable outputs before minutes of work.
fn check(args: &SynthArgs, gguf: bool, config: &ModelConfig, act: &str) -> Result<(), Failure> {
    if args.active.is_some() && !config.ffn_kind.activation.is_sparse() {
        return Err(Failure::usage(format!(
            "--active: {} with {} has no neurons that do not fire, so every one of them is computed; \
             give --act relu or drelu too",
            name(args.shape),
            act
        )));
    }
    if !gguf && args.shape.text().is_some() {
        return Err(Failure::usage(format!(
            "{}: {} is written as a gguf file only; name one that ends in .gguf",
            args.output.display(),
            name(args.shape)
        )));
    }
    if !gguf && args.quant.is_some() {
        return Err(Failure::usage(format!(
            "--quant is for gguf files; {} becomes a folder with weights in f32 (for a file, \
             name one that ends in .gguf)",
            args.output.display()
        )));
    }
    if gguf {
        atomic::may_create(&args.output, args.force, &[])
    } else {
        atomic::may_create_folder(&args.output)
    }
}

/// The result as text.
fn show(report: &SynthReport) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{}: {} ({}), {} of weights, {:.1} s",
        report.output,
        report.shape,
        report.act,
        size::show(report.bytes),
        report.seconds
    )?;
    let t = &report.target;
    let m = report.measured.as_ref();
    let mut rows = vec![
        ("neurons that fire per token", t.active, m.map(|m| m.active)),
        (
            "neurons that give 80 % of activations",
            t.hot_share,
            m.map(|m| m.hot_share),
        ),
        (
            "firing neurons that fire for the next token too",
            t.persistence,
            m.map(|m| m.persistence),
        ),
    ];
    if let Some(wanted) = t.routing {
        let found = m.and_then(|m| m.routing);
        rows.extend([
            (
                "experts that take 90 % of the routes",
                wanted.popular,
                found.map(|r| r.popular),
            ),
            (
                "experts of a token that the next one visits too",
                wanted.reuse,
                found.map(|r| r.reuse),
            ),
        ]);
    }
    let Some(m) = m else {
        for (what, target, _) in rows {
            writeln!(out, "{what:<50}{:>8.1} % target", 100.0 * target)?;
        }
        return Ok(());
    };
    writeln!(out, "{:<50}{:>8}   {:>8}", "", "target", "measured")?;
    for (what, target, found) in rows {
        let found = found.unwrap_or_default();
        writeln!(
            out,
            "{what:<50}{:>8.1} % {:>8.1} %",
            100.0 * target,
            100.0 * found
        )?;
    }
    writeln!(
        out,
        "over {} tokens of decoding and {} layers; the engine counts {:.1} % of gates",
        m.tokens,
        m.layers,
        100.0 * m.engine_active
    )
}

/// Command line name of an enum value.
fn name(choice: impl clap::ValueEnum) -> String {
    choice
        .to_possible_value()
        .map_or_else(String::new, |v| v.get_name().to_owned())
}

/// Default targets: the published numbers of models with this activation. Bamboo's 85 % sparsity
/// for dReLU, ReluLLaMA's 67 % for ReLU. Without exact zeros, a neuron counts as firing if its gate
/// is positive.
///
/// # Errors
/// Options for experts with a shape without experts.
fn targets(args: &SynthArgs, config: &ModelConfig) -> Result<Targets, Failure> {
    let kind = config.ffn_kind;
    let (active, curve) = match kind.activation {
        Activation::Relu if kind.relu_on_up => (0.15, "bamboo"),
        // measured: benches/NOTEBOOK.md, "How many neurons of an ungated expert fire"
        Activation::Relu2 if kind.ungated => (0.21, "0.56"),
        Activation::Relu | Activation::Relu2 => (0.33, "llama2-reglu-70b"),
        _ => (0.5, "swiglu"),
    };
    let hot_share = args
        .skew
        .or_else(|| curve.parse().ok())
        .map_or(0.8, |s| s.0);
    let routing = args.shape.default_routing();
    if routing.is_none() && (args.popular.is_some() || args.reuse.is_some()) {
        return Err(Failure::usage(format!(
            "--popular and --reuse are for shapes with experts; {} has none",
            name(args.shape)
        )));
    }
    Ok(Targets {
        active: (args.active.or(args.shape.default_active())).unwrap_or(active),
        hot_share,
        persistence: args.persistence,
        routing: routing.map(|published| RoutingTargets {
            popular: args.popular.unwrap_or(published.popular),
            reuse: args.reuse.unwrap_or(published.reuse),
        }),
    })
}

/// The parameters for `target`.
fn statistics(target: &Targets, config: &ModelConfig) -> Result<Statistics, Failure> {
    let routing = match (&config.mixture, target.routing) {
        (Some(mixture), Some(routing)) => {
            Some(Routing::solve(routing, config.experts as usize, mixture)?)
        }
        _ => None,
    };
    Ok(Statistics {
        firing: Firing::solve(target, config.ffn_kind.relu_on_up)?,
        routing,
    })
}
