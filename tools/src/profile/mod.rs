//! `emberflow profile`: records how often each neuron is active on a text.

mod experts;
mod merge;
mod misses;
pub mod published;
mod show;
pub mod show_experts;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use emberflow_engine::meta::ContainerMeta;
use emberflow_engine::{Engine, FfnSeen, Logits, Model};
use emberflow_predictor::record::{Recorder, Subject, spread};
use emberflow_predictor::stats::BATCHES;
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::activity::original_ids;
use crate::cli::{ProfileArgs, ProfileCommand, ProfileRunArgs};
use crate::model::{open_model, open_observed};
use crate::tell::tell;
use crate::text::{self, Tokens};
use crate::{Failure, atomic, budget, interrupt, print_json, progress};

/// Default tokens per window.
const WINDOW: u32 = 256;

/// Memory limit of the token sample.
const SAMPLE_BYTES: usize = 32 << 20;

/// Interval between checkpoints.
const CHECKPOINT: Duration = Duration::from_secs(20);

/// Output of `profile --json`. Keys are a contract.
#[derive(Debug, Serialize)]
struct NeuronProfile {
    /// Path of the statistics.
    output: String,
    /// Tokens profiled.
    tokens: u64,
    /// Tokens resumed from an interrupted run.
    resumed_tokens: u64,
    /// Batches recorded, by size 1, 2, 4, 8, 16, 32.
    steps: Vec<u64>,
    /// Mean share of active neurons per token, by layer.
    active_share: Vec<f64>,
    /// Duration.
    seconds: f64,
}

/// Runs the command.
pub fn command(args: &ProfileArgs) -> Result<(), Failure> {
    match &args.command {
        Some(ProfileCommand::Merge(args)) => merge::command(args),
        Some(ProfileCommand::Show(args)) => show::command(args),
        None => run(&args.run),
    }
}

/// Checkpoint file of an unfinished run.
fn checkpoint_of(output: &Path) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(".checkpoint");
    name.into()
}

/// A text divided into windows.
struct Cut {
    ids: Vec<u32>,
    window: u32,
    /// Tokens before each window (BOS).
    start: Vec<u32>,
}

impl Cut {
    fn new(args: &ProfileRunArgs, model: &Model, file: &Path) -> Result<Self, Failure> {
        let start = model.text().start_tokens().to_vec();
        let room = model.text().config().max_context;
        let room = room.saturating_sub(start.len() as u32);
        let window = text::window(args.window, WINDOW, room)?;
        let ids = Tokens::open(model.text(), file, args.limit)?.rest()?;
        if ids.is_empty() {
            return Err(Failure::usage("the text has no tokens"));
        }
        Ok(Self { ids, window, start })
    }

    /// Positions of a window.
    fn positions(&self) -> usize {
        self.window as usize + self.start.len()
    }

    /// Identifies the run: text, model and windows.
    fn subject(&self, meta: &ContainerMeta) -> Subject {
        let c = &meta.config;
        let neurons: Vec<usize> = c.banks().map(|bank| bank.neurons as usize).collect();
        Subject {
            model: format!("{} {}", c.name, meta.source.fingerprint),
            text: hash(&self.ids, self.window),
            window: self.window as usize,
            sample: Recorder::sample_for(&neurons, SAMPLE_BYTES),
            neurons,
        }
    }
}

/// A new recorder, or the one of an interrupted run.
fn recorder(checkpoint: &Path, subject: &Subject) -> Result<Recorder, Failure> {
    match std::fs::read(checkpoint) {
        Ok(bytes) => Recorder::resume(&bytes, subject.clone()).map_err(Failure::stats(checkpoint)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Recorder::new(subject.clone())),
        Err(e) => Err(Failure::file(checkpoint)(e)),
    }
}

fn run(args: &ProfileRunArgs) -> Result<(), Failure> {
    let start = Instant::now();
    let (Some(file), Some(output)) = (&args.file, &args.output) else {
        return Err(Failure::usage("profile needs -f TEXT and -o STATS"));
    };
    budget::may_take(&args.engine, args.force)?;
    atomic::may_write(output, args.force, &[args.model.file(), Some(file)])?;
    let model = open_model(&args.model)?;
    let cut = Cut::new(args, &model, file)?;
    if model.text().config().mixture.is_some() {
        return experts::run(args, model, &cut, output, start);
    }
    let c = model.text().config().clone();
    let original = original_ids(model.container(), &c)?;
    let subject = cut.subject(model.text().meta());
    let checkpoint = checkpoint_of(output);
    let mut recorder = recorder(&checkpoint, &subject)?;
    let resumed_tokens = recorder.tokens();
    let reserve = Recorder::bytes_for(&subject);
    let mut engine = open_observed(model, &args.engine, cut.positions(), reserve, args.force)?;
    record(
        &mut engine,
        &mut recorder,
        &cut,
        &checkpoint,
        args.stop_after,
    )?;
    let named = || Failure::stats(output);
    let mut stats = recorder.stats().restored(&original).map_err(named())?;
    if let Some(profile) = &mut stats.profile {
        // In a model with sparse and dense layers, the cold region holds neurons of sparse layers only.
        let told_apart = |layer: usize| !c.has_zeros() || c.is_sparse(layer as u32);
        profile.misses = misses::count(&recorder.trace().of_banks(told_apart))?;
    }
    atomic::write(output, &stats.to_bytes().map_err(named())?)?;
    // The result is complete. A leftover checkpoint does no harm: the next run rejects or resumes it.
    let _ = std::fs::remove_file(&checkpoint);
    let profile = stats.profile.as_ref();
    let done = NeuronProfile {
        output: output.display().to_string(),
        tokens: stats.tokens,
        resumed_tokens,
        steps: profile.map_or(Vec::new(), |p| p.steps.to_vec()),
        active_share: stats.active_share(),
        seconds: start.elapsed().as_secs_f64(),
    };
    if args.json {
        return print_json(&done);
    }
    Ok(done.print(cut.window)?)
}

/// Runs the remaining windows, at most `stop_after` of them, and writes checkpoints.
fn record(
    engine: &mut Engine,
    recorder: &mut Recorder,
    cut: &Cut,
    checkpoint: &Path,
    stop_after: Option<u64>,
) -> Result<(), Failure> {
    // Ctrl-C stops after the current window.
    let stop = Arc::new(AtomicBool::new(false));
    interrupt::on_ctrl_c(&stop);

    let windows: Vec<&[u32]> = cut.ids.chunks(cut.window as usize).collect();
    let bar = progress::steps("profiling", cut.ids.len() as u64);
    bar.set_position(recorder.tokens());
    let mut saved = Instant::now();
    let mut passed = 0;
    for step in spread(windows.len() as u64) {
        let Some(window) = step else {
            recorder.end_group();
            continue;
        };
        passed += 1;
        if passed <= recorder.done() {
            continue;
        }
        let Some(body) = windows.get(window as usize) else {
            continue;
        };
        watch(engine, recorder, &cut.start, body)?;
        recorder.end_window(window);
        bar.inc(body.len() as u64);
        let stopped = stop.load(Ordering::Relaxed) || stop_after == Some(passed);
        if stopped || saved.elapsed() > CHECKPOINT {
            let bytes = recorder.to_bytes().map_err(Failure::stats(checkpoint))?;
            atomic::write(checkpoint, &bytes)?;
            saved = Instant::now();
        }
        if stopped {
            bar.finish_and_clear();
            tell(format_args!(
                "stopped after {} of {} tokens; run the same command again to resume",
                recorder.tokens(),
                cut.ids.len()
            ));
            return Err(Failure::Interrupted);
        }
    }
    bar.finish_and_clear();
    Ok(())
}

impl NeuronProfile {
    fn print(&self, window: u32) -> std::io::Result<()> {
        let mut largest = (BATCHES.iter().zip(&self.steps)).filter(|&(_, &steps)| steps > 0);
        let layers = self.active_share.len();
        let mean = self.active_share.iter().sum::<f64>() / layers.max(1) as f64;
        writeln!(
            std::io::stdout().lock(),
            "{}: {} tokens in windows of {window}, batches of up to {}, {:.1} % of neurons active per token, {:.1} s",
            self.output,
            self.tokens,
            largest.next_back().map_or(1, |(&size, _)| size),
            100.0 * mean,
            self.seconds
        )
    }
}

/// Runs one window through the model.
fn watch(
    engine: &mut Engine,
    recorder: &mut Recorder,
    start: &[u32],
    body: &[u32],
) -> Result<(), Failure> {
    let lead = start.len();
    let tokens = [start, body].concat();
    let mut sequence = engine.new_sequence()?;
    let chunk = engine.chunk();
    for (from, piece) in (0..).step_by(chunk).zip(tokens.chunks(chunk)) {
        // BOS is not part of the text.
        let skip = lead.saturating_sub(from).min(piece.len());
        let at = (from + skip).saturating_sub(lead);
        let mut see = |seen: &FfnSeen<'_>| {
            recorder.see(seen.layer, at, skip, seen.tokens, seen.gates, seen.hidden);
        };
        engine.forward_observed(&mut sequence, piece, Logits::None, &mut see)?;
    }
    Ok(())
}

fn hash(ids: &[u32], window: u32) -> u64 {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    xxh3_64_with_seed(&bytes, window.into())
}
