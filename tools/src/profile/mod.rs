//! `emberflow profile`: how a text makes a model's neurons fire.

mod merge;
mod misses;
mod show;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use emberflow_engine::{Engine, FfnSeen, Logits, Model};
use emberflow_predictor::record::{Recorder, Subject, spread};
use emberflow_predictor::stats::{ActivationStats, BATCHES};
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::cli::{ProfileArgs, ProfileCommand, ProfileRunArgs};
use crate::model::{open_model, open_observed};
use crate::{Failure, atomic, budget, interrupt, print_json, progress};

/// Tokens of a window when none is given.
const WINDOW: u32 = 256;

/// Bytes of the sample of tokens.
const SAMPLE_BYTES: usize = 32 << 20;

/// Time between two checkpoints.
const CHECKPOINT: Duration = Duration::from_secs(20);

/// The result. Keys are a contract.
#[derive(Debug, Serialize)]
struct Done {
    /// The statistics.
    output: String,
    /// Tokens counted.
    tokens: u64,
    /// Tokens taken over from a run that was stopped.
    resumed_tokens: u64,
    /// Batches seen, by size 1, 2, 4, 8, 16, 32.
    steps: Vec<u64>,
    /// Mean share of neurons that fire per token, by layer.
    active_share: Vec<f64>,
    /// How long it took.
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

/// Where an unfinished run is kept.
fn checkpoint_of(output: &Path) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(".checkpoint");
    name.into()
}

fn run(args: &ProfileRunArgs) -> Result<(), Failure> {
    let start = Instant::now();
    let (Some(file), Some(output)) = (&args.file, &args.output) else {
        return Err(Failure::usage("profile needs -f TEXT and -o STATS"));
    };
    budget::may_take(&args.engine, args.force)?;
    atomic::may_write(output, args.force)?;
    let text = std::fs::read_to_string(file).map_err(Failure::file(file))?;
    let model = open_model(&args.model)?;
    let meta = model.text().meta();
    let (c, bos) = (meta.config.clone(), model.text().start_token());
    let room = c.max_context - u32::from(bos.is_some());
    let window = args.window.unwrap_or(WINDOW.min(room));
    if window < 2 || window > room {
        return Err(Failure::usage(format!(
            "--window {window}: this model takes 2 to {room}"
        )));
    }
    let name = format!("{} {}", c.name, meta.source.fingerprint);
    let original = original_ids(&model)?;
    let mut ids = model.text().tokens(&text)?;
    drop(text);
    if let Some(limit) = args.limit {
        ids.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    }
    if ids.is_empty() {
        return Err(Failure::usage("the text has no tokens"));
    }
    let (layers, neurons) = (c.layers as usize, c.ffn as usize);
    let subject = Subject {
        model: name,
        text: hash(&ids, window),
        layers,
        neurons,
        window: window as usize,
        sample: Recorder::sample_for(layers, neurons, SAMPLE_BYTES),
    };
    let checkpoint = checkpoint_of(output);
    let mut recorder = match std::fs::read(&checkpoint) {
        Ok(bytes) => {
            Recorder::resume(&bytes, subject.clone()).map_err(Failure::stats(&checkpoint))?
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Recorder::new(subject.clone()),
        Err(e) => return Err(Failure::file(&checkpoint)(e)),
    };
    let resumed_tokens = recorder.tokens();
    let reserve = Recorder::bytes_for(&subject);
    let positions = window as usize + usize::from(bos.is_some());
    let mut engine = open_observed(model, &args.engine, positions, reserve)?;
    // after the present window
    let stop = Arc::new(AtomicBool::new(false));
    interrupt::sets(&stop);

    let windows: Vec<&[u32]> = ids.chunks(window as usize).collect();
    let bar = progress::steps("profiling", ids.len() as u64);
    bar.set_position(resumed_tokens);
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
        watch(&mut engine, &mut recorder, bos, body)?;
        recorder.end_window(window);
        bar.inc(body.len() as u64);
        let stopped = stop.load(Ordering::Relaxed) || args.stop_after == Some(passed);
        if stopped || saved.elapsed() > CHECKPOINT {
            let bytes = recorder.to_bytes().map_err(Failure::stats(&checkpoint))?;
            atomic::write(&checkpoint, &bytes)?;
            saved = Instant::now();
        }
        if stopped {
            bar.finish_and_clear();
            eprintln!(
                "stopped after {} of {} tokens; the same command goes on from here",
                recorder.tokens(),
                ids.len()
            );
            return Err(Failure::Interrupted);
        }
    }
    bar.finish_and_clear();
    let named = || Failure::stats(output);
    let mut stats = recorder.stats().restored(&original).map_err(named())?;
    if let Some(profile) = &mut stats.profile {
        profile.misses = misses::count(recorder.trace())?;
    }
    atomic::write(output, &stats.to_bytes().map_err(named())?)?;
    // the result is safe; a checkpoint that stays is refused or used up by the next run
    let _ = std::fs::remove_file(&checkpoint);
    let done = Done {
        output: output.display().to_string(),
        tokens: stats.tokens,
        resumed_tokens,
        steps: stats
            .profile
            .as_ref()
            .map_or(Vec::new(), |p| p.steps.to_vec()),
        active_share: stats.active_share(),
        seconds: start.elapsed().as_secs_f64(),
    };
    if args.json {
        return print_json(&done);
    }
    let mut largest = (BATCHES.iter().zip(&done.steps)).filter(|&(_, &steps)| steps > 0);
    let mean = done.active_share.iter().sum::<f64>() / layers.max(1) as f64;
    writeln!(
        std::io::stdout().lock(),
        "{}: {} tokens in windows of {window}, batches of up to {}, {:.1} % of neurons fire per token, {:.1} s",
        done.output,
        done.tokens,
        largest.next_back().map_or(1, |(&size, _)| size),
        100.0 * mean,
        done.seconds
    )?;
    Ok(())
}

/// Original ids of the neurons by bank, where the container has them in another order.
fn original_ids(model: &Model) -> Result<Vec<Vec<u32>>, Failure> {
    let c = model.text().config();
    let sizes = [c.layers, c.experts, c.ffn].map(|n| n as usize);
    let stats = model.container().read_stats()?;
    if stats.is_empty() {
        return Ok(Vec::new());
    }
    let stats = ActivationStats::parse(&stats, sizes[0], sizes[1], sizes[2])
        .map_err(Failure::stats(model.container().path()))?;
    let experts = stats.layers.into_iter().flat_map(|l| l.experts);
    Ok(experts.map(|e| e.original).collect())
}

/// Runs one window through the model.
fn watch(
    engine: &mut Engine,
    recorder: &mut Recorder,
    bos: Option<u32>,
    body: &[u32],
) -> Result<(), Failure> {
    let mut tokens = Vec::with_capacity(body.len() + 1);
    tokens.extend(bos);
    let lead = tokens.len();
    tokens.extend_from_slice(body);
    let mut sequence = engine.new_sequence()?;
    let chunk = engine.chunk();
    for (from, piece) in (0..).step_by(chunk).zip(tokens.chunks(chunk)) {
        // the start token belongs to no text
        let skip = lead.saturating_sub(from);
        let at = (from + skip) - lead;
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
