//! `emberflow-lab timeline`: one token as lanes of compute threads, the I/O thread and the storage
//! device (as PowerInfer-2, Fig. 6).

use std::io::Write;
use std::ops::Range;

use emberflow_engine::{Engine, Logits, Sampler, Sampling, trace as kinds};
use emberflow_storage::trace::{Lane, Span};
use serde::Serialize;

use crate::cli::TimelineArgs;
use emberflow::chart::{Bar, Row, timeline};
use emberflow::chrome::{ROOM, label};
use emberflow::cli::DraftArgs;
use emberflow::model::{Use, open_for, open_model};
use emberflow::{Failure, atomic, budget, print_json, progress};

/// Traced tokens; the one with the median time is drawn.
const TOKENS: usize = 9;

/// Default prompt.
const PROMPT: &str = "# Ownership\n\nOwnership is";

/// Use of a lane during the token.
#[derive(Debug, Serialize)]
pub struct LaneShare {
    /// Name of the lane.
    pub name: String,
    /// Share of the time in which the lane was busy.
    pub busy: f64,
    /// Share of the time in which it was idle while computation waited for reads.
    pub waiting: f64,
    /// Spans recorded.
    pub spans: usize,
}

/// Time of one kind of work over all lanes.
#[derive(Debug, Serialize)]
pub struct KindTime {
    /// Name of the kind.
    pub name: &'static str,
    /// Milliseconds; nested spans count in both kinds.
    pub ms: f64,
    /// Number of spans.
    pub count: usize,
}

#[derive(Debug, Serialize)]
struct TimelineReport {
    model: String,
    threads: usize,
    io: &'static str,
    ffn_resident_share: f64,
    /// Position of the token.
    position: usize,
    token_ms: f64,
    /// All measured times, ascending.
    all_ms: Vec<f64>,
    lanes: Vec<LaneShare>,
    kinds: Vec<KindTime>,
    bytes_read: u64,
    reads: u64,
}

/// Trace of one token.
struct Shot {
    position: usize,
    time: Range<u64>,
    lanes: Vec<Lane>,
}

impl Shot {
    fn ns(&self) -> u64 {
        self.time.end - self.time.start
    }
}

/// Runs the command.
pub fn command(args: &TimelineArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine.engine(), args.force)?;
    atomic::may_write_each([&args.svg], args.force, &[args.model.file()])?;
    let model = open_model(&args.model)?;
    let prompt = model
        .text()
        .encode(args.prompt.as_deref().unwrap_or(PROMPT))?;
    if prompt.is_empty() {
        return Err(Failure::usage("the prompt is empty; give some text"));
    }
    let context = prompt.len() + args.warm_up + TOKENS;
    let wanted = Use {
        context,
        prompt: 0,
        batch: 1,
        spans: ROOM,
        reserve: 0,
        drafts: DraftArgs::OFF,
        force: args.force,
    };
    let mut engine = open_for(model, &args.engine.engine(), &wanted, false)?;
    let Some(trace) = engine.trace().cloned() else {
        return Err(Failure::usage("the engine records nothing"));
    };
    let sampling = Sampling {
        temperature: 1.0,
        ..Sampling::default()
    };
    let mut sampler = Sampler::new(sampling, engine.config().vocab as usize);
    let mut sequence = engine.new_sequence()?;
    for chunk in prompt.chunks(engine.chunk()) {
        engine.forward(&mut sequence, chunk, Logits::Last)?;
    }
    let mut shots = Vec::with_capacity(TOKENS);
    let bar = progress::steps("decoding", (args.warm_up + TOKENS) as u64);
    for n in 0..args.warm_up + TOKENS {
        let token = sampler.sample(engine.logits(), sequence.tokens());
        let position = sequence.len();
        trace.clear();
        let start = trace.now();
        engine.forward(&mut sequence, &[token], Logits::Last)?;
        let time = start..trace.now();
        if n >= args.warm_up {
            let lanes = trace.lanes();
            shots.push(Shot {
                position,
                time,
                lanes,
            });
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    shots.sort_by_key(Shot::ns);
    let all_ms = shots.iter().map(|shot| ms(shot.ns())).collect();
    let shot = shots.swap_remove(shots.len() / 2);
    let report = TimelineReport::of(&engine, &shot, all_ms);
    if let Some(path) = &args.svg {
        atomic::write(path, draw(&report, &shot, args.layers).as_bytes())?;
    }
    if args.json {
        return print_json(&report);
    }
    Ok(write!(std::io::stdout().lock(), "{}", table(&report))?)
}

impl TimelineReport {
    /// The median token, with all times.
    fn of(engine: &Engine, shot: &Shot, all_ms: Vec<f64>) -> Self {
        Self {
            model: engine.config().name.clone(),
            threads: engine.threads(),
            io: engine.io_name(),
            ffn_resident_share: engine.memory().ffn_resident_share(engine.needs()),
            position: shot.position,
            token_ms: ms(shot.ns()),
            all_ms,
            lanes: shares(shot),
            kinds: times(&shot.lanes),
            bytes_read: device(&shot.lanes).map(|span| span.values[1]).sum(),
            reads: device(&shot.lanes).count() as u64,
        }
    }
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn device(lanes: &[Lane]) -> impl Iterator<Item = &Span> {
    let lane = lanes.iter().find(|lane| lane.name == "device");
    lane.into_iter().flat_map(|lane| &lane.spans)
}

/// Whether it is the lane of a compute thread. The others are those of the I/O thread, the storage device and accelerators.
fn computes(lane: &Lane) -> bool {
    lane.name.starts_with("compute ")
}

fn is_wait(span: &Span) -> bool {
    *span.kind == kinds::WAIT
}

/// The disjoint intervals of `time` covered by the spans, in order.
fn covered<'a>(spans: impl Iterator<Item = &'a Span>, time: &Range<u64>) -> Vec<Range<u64>> {
    let clip = |at: u64| at.clamp(time.start, time.end);
    let mut parts: Vec<_> = spans
        .map(|span| clip(span.start)..clip(span.end))
        .filter(|part| !part.is_empty())
        .collect();
    parts.sort_by_key(|part| part.start);
    let mut out: Vec<Range<u64>> = Vec::new();
    for part in parts {
        match out.last_mut() {
            Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
            _ => out.push(part),
        }
    }
    out
}

fn length(parts: &[Range<u64>]) -> u64 {
    parts.iter().map(|part| part.end - part.start).sum()
}

fn shares(shot: &Shot) -> Vec<LaneShare> {
    let total = shot.ns().max(1) as f64;
    let of_caller = shot.lanes.first().map_or(&[][..], |lane| &lane.spans);
    let waits = covered(of_caller.iter().filter(|s| is_wait(s)), &shot.time);
    let share = |lane: &Lane| {
        let busy = covered(lane.spans.iter().filter(|s| !is_wait(s)), &shot.time);
        let mut waiting = 0;
        if computes(lane) {
            for wait in &waits {
                let inside = covered(lane.spans.iter().filter(|s| !is_wait(s)), wait);
                waiting += wait.end - wait.start - length(&inside);
            }
        }
        LaneShare {
            name: lane.name.clone(),
            busy: length(&busy) as f64 / total,
            waiting: waiting as f64 / total,
            spans: lane.spans.len(),
        }
    };
    shot.lanes.iter().map(share).collect()
}

fn times(lanes: &[Lane]) -> Vec<KindTime> {
    let mut out: Vec<KindTime> = Vec::new();
    for span in lanes.iter().flat_map(|lane| &lane.spans) {
        let name = span.kind.name;
        let time = ms(span.end - span.start);
        match out.iter_mut().find(|kind| kind.name == name) {
            Some(kind) => {
                kind.ms += time;
                kind.count += 1;
            }
            None => out.push(KindTime {
                name,
                ms: time,
                count: 1,
            }),
        }
    }
    out
}

/// Colours, in drawing order: earlier ones lie behind.
const FILLS: [(&str, &str); 17] = [
    ("embedding", "#d8a7c9"),
    ("attention", "#74b774"),
    ("router", "#4f9d8d"),
    ("ffn", "#e6e6e6"),
    ("head", "#b59ad6"),
    ("dense", "#d98880"),
    ("experts", "#a67db8"),
    ("products", "#7fa650"),
    ("reduce", "#c9a66b"),
    ("gate", "#6fa8dc"),
    ("up", "#f6a04d"),
    ("down", "#e8c547"),
    ("wait", "#e06666"),
    ("read", "#4a6fa5"),
    ("queue", "#999999"),
    ("start", "#8fb3c9"),
    ("deliver", "#76a5af"),
];

fn draw(report: &TimelineReport, shot: &Shot, layers: Option<u64>) -> String {
    let mut time = shot.time.clone();
    if let Some(layers) = layers {
        let first = |span: &&Span| span.kind.keys[0] == "layer" && span.values[0] < layers;
        let spans = shot.lanes.iter().flat_map(|lane| &lane.spans);
        time.end = (spans.filter(first).map(|span| span.end).max()).unwrap_or(time.end);
    }
    let at = |ns: u64| ms(ns.clamp(time.start, time.end) - time.start);
    let rows: Vec<Row> = (shot.lanes.iter().zip(&report.lanes))
        .map(|(lane, share)| {
            let mut spans: Vec<&Span> = (lane.spans.iter())
                .filter(|span| span.start < time.end)
                .collect();
            // Sections are drawn behind the clusters inside them.
            spans.sort_by_key(|span| (span.start, std::cmp::Reverse(span.end)));
            let bars = spans.into_iter().map(|span| Bar {
                from: at(span.start),
                to: at(span.end),
                // A kind without a colour is grey.
                kind: (FILLS.iter())
                    .position(|fill| fill.0 == span.kind.name)
                    .unwrap_or(FILLS.len()),
                title: label(span),
            });
            let waiting = if share.waiting > 0.0005 {
                format!(", {:.1} % waiting", 100.0 * share.waiting)
            } else {
                String::new()
            };
            Row {
                name: lane.name.clone(),
                note: format!("{:.1} % busy{waiting}", 100.0 * share.busy),
                bars: bars.collect(),
            }
        })
        .collect();
    let part = layers.map_or(String::new(), |n| format!(", layers 0 to {}", n.max(1) - 1));
    let title = format!(
        "{}: a token in {:.2} ms, FFN {:.0} % resident, {} reads ({}){part}",
        report.model,
        report.token_ms,
        100.0 * report.ffn_resident_share,
        report.reads,
        report.io,
    );
    timeline(&title, ms(time.end - time.start), &FILLS, &rows)
}

fn table(report: &TimelineReport) -> String {
    let mut text = format!(
        "{}: token at position {} in {:.2} ms (median of {}: {:.2} to {:.2}), FFN {:.0} % resident, \
         {} reads of {:.1} KiB in all ({})\n\n{:<12} {:>7} {:>9} {:>7}\n",
        report.model,
        report.position,
        report.token_ms,
        report.all_ms.len(),
        report.all_ms.first().copied().unwrap_or_default(),
        report.all_ms.last().copied().unwrap_or_default(),
        100.0 * report.ffn_resident_share,
        report.reads,
        report.bytes_read as f64 / 1024.0,
        report.io,
        "lane",
        "busy",
        "waiting",
        "spans"
    );
    for lane in &report.lanes {
        text += &format!(
            "{:<12} {:>5.1} % {:>7.1} % {:>7}\n",
            lane.name,
            100.0 * lane.busy,
            100.0 * lane.waiting,
            lane.spans
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use emberflow_storage::trace::{DELIVER, Kind, QUEUE, READ, START};

    use super::*;

    fn span(kind: &'static Kind, start: u64, end: u64) -> Span {
        Span {
            kind,
            values: [0, 3],
            start,
            end,
        }
    }

    fn lane(name: &str, spans: Vec<Span>) -> Lane {
        Lane {
            name: name.into(),
            spans,
            lost: 0,
        }
    }

    fn shot() -> Shot {
        let main = vec![
            span(&kinds::ATTENTION, 0, 20),
            span(&kinds::GATE, 22, 28),
            span(&kinds::FFN, 20, 40),
            span(&kinds::WAIT, 40, 60),
        ];
        // Still busy when the wait begins.
        let other = vec![span(&kinds::FFN, 20, 45)];
        let reads = vec![span(&READ, 30, 50), span(&READ, 45, 60)];
        Shot {
            position: 7,
            time: 0..100,
            lanes: vec![
                lane("compute 0", main),
                lane("compute 1", other),
                lane("i/o thread", Vec::new()),
                lane("device", reads),
            ],
        }
    }

    #[test]
    fn shares_count_overlapping_spans_once() {
        let shares: Vec<_> = (shares(&shot()).iter())
            .map(|lane| (lane.busy, lane.waiting))
            .collect();
        assert_eq!(shares, [(0.4, 0.2), (0.25, 0.15), (0.0, 0.0), (0.3, 0.0)]);
    }

    #[test]
    fn kinds_add_up_over_the_lanes() {
        let times = times(&shot().lanes);
        let ffn = times.iter().find(|kind| kind.name == "ffn").unwrap();
        assert_eq!((ffn.count, (ffn.ms * 1e6).round()), (2, 45.0));
    }

    /// An accelerator's lane after those of the I/O thread and the storage device makes neither of these a compute thread.
    #[test]
    fn lanes_that_compute_nothing_never_wait() {
        let mut shot = shot();
        let dense = lane("accelerator", vec![span(&kinds::DENSE, 20, 30)]);
        shot.lanes.push(dense);
        let shares: Vec<_> = (shares(&shot).iter())
            .map(|lane| (lane.busy, lane.waiting))
            .collect();
        let expected = [(0.4, 0.2), (0.25, 0.15), (0.0, 0.0), (0.3, 0.0), (0.1, 0.0)];
        assert_eq!(shares, expected);
    }

    /// The names in the source, so that a new kind cannot be forgotten here.
    #[test]
    fn every_kind_has_a_colour_of_its_own() {
        let engine = include_str!("../../../engine/src/trace.rs");
        let names = engine.lines().filter_map(|line| {
            let name = line.trim().strip_prefix("name: \"")?;
            name.strip_suffix("\",")
        });
        let storage = [&READ, &QUEUE, &START, &DELIVER].map(|kind| kind.name);
        let all: BTreeSet<&str> = names.chain(storage).collect();
        assert!(all.len() >= 17, "{all:?}");
        let known: BTreeSet<&str> = FILLS.iter().map(|fill| fill.0).collect();
        assert_eq!(all, known);
        let colours: BTreeSet<&str> = FILLS.iter().map(|fill| fill.1).collect();
        assert_eq!(colours.len(), FILLS.len());
    }
}
