//! `emberflow-lab prefill`: speed of prompts with part of the FFN on disk, compared with everything
//! in memory and with the disk's sequential rate (PowerInfer-2, Figs 8 and 9).

use serde::Serialize;

use crate::cli::PrefillArgs;
use emberflow::Failure;
use emberflow::bench::child::{Decoding, Run};
use emberflow::bench::output::{Results, Rows, Table, may_write, percent};
use emberflow::bench::points::{Point, Setup, names};
use emberflow::bench::rounds::{Agreement, Series, in_turns};
use emberflow::bench::sweep::model_of;
use emberflow::chart::{Labels, bars};
use emberflow::model::open_model;
use emberflow::stats::Range;

/// One prompt, chunk and share of the FFN.
#[derive(Debug, Serialize)]
struct PrefillRow {
    prompt_tokens: usize,
    /// Prompt tokens per pass.
    chunk: usize,
    /// `--chunk` of the run; 0 if the planner chose.
    asked_chunk: u16,
    share: f64,
    tokens_per_s: Range,
    /// Speed relative to everything in memory.
    of_resident: f64,
    bytes_read: u64,
    /// Milliseconds of prefill.
    ms: f64,
    /// Milliseconds with everything in memory: the compute bound.
    compute_ms: f64,
    /// Milliseconds of a sequential read of the same number of bytes: the disk bound.
    disk_ms: f64,
    /// Which of the two bounds is larger.
    limit: &'static str,
    /// Time relative to the larger bound.
    of_bound: f64,
    note: Option<String>,
}

/// A prompt and its chunk size.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Chunked {
    /// Index of the prompt.
    prompt: usize,
    /// Prompt tokens per pass; 0 = the planner's choice.
    chunk: u16,
}

/// Prompts, and their requested numbers of tokens.
struct Prompts {
    lengths: Vec<u32>,
    texts: Vec<String>,
}

impl Prompts {
    /// With the requested lengths, or the default ones that fit the model.
    fn new(args: &PrefillArgs) -> Result<Self, Failure> {
        let model = open_model(&args.bench.model)?;
        let most = model.text().config().max_context.saturating_sub(1);
        let lengths: Vec<u32> = match args.lengths.as_slice() {
            [] if args.bench.quick => vec![48],
            [] => [128, 512].into_iter().filter(|&n| n <= most).collect(),
            lengths => lengths.to_vec(),
        };
        let mut texts = Vec::new();
        for &length in &lengths {
            if length == 0 || length > most {
                return Err(Failure::usage(format!(
                    "--lengths {length}: expected 1 to {most}, which is what this model has room for"
                )));
            }
            texts.push(prompt(length as usize, |text| {
                Ok(model.text().encode(text)?.len())
            })?);
        }
        Ok(Self { lengths, texts })
    }

    fn name(&self, run: Chunked) -> String {
        let chunk = match run.chunk {
            0 => String::new(),
            n => format!(", chunk {n}"),
        };
        format!("{} tokens{chunk}", self.lengths[run.prompt])
    }
}

/// Every prompt and chunk, at the requested share and with everything in memory.
fn points(args: &PrefillArgs, prompts: usize) -> Vec<Point<Chunked>> {
    let shares = [args.share, 1.0];
    let shares = if args.share == 1.0 {
        &shares[1..]
    } else {
        &shares
    };
    let mut points = Vec::new();
    for prompt in 0..prompts {
        for &chunk in &args.chunks {
            let variant = Chunked { prompt, chunk };
            points.extend(shares.iter().map(|&share| Point { share, variant }));
        }
    }
    points
}

/// Runs the command.
pub fn command(args: &PrefillArgs) -> Result<(), Failure> {
    let bench = &args.bench;
    may_write(&bench.output, "prefill", Some(&bench.model), None)?;
    let prompts = Prompts::new(args)?;
    let points = points(args, prompts.texts.len());
    let names = names(&points, |run| prompts.name(run));
    let rounds = bench.rounds_or(3);
    let Setup {
        facts,
        mut device,
        child,
    } = Setup::new(bench, &args.io)?;
    let series = in_turns(&names, rounds, &mut || device.measure(), &mut |i, _| {
        let Point { share, variant } = points[i];
        let run = Decoding {
            prompt: &prompts.texts[variant.prompt],
            tokens: 1,
            io: &args.io,
            share,
        };
        let chunk = variant.chunk.to_string();
        let more: &[&str] = match variant.chunk {
            0 => &[],
            _ => &["--chunk", &chunk],
        };
        child.run(&run.with(more), None)
    })?;
    let sequential = device.sequential_mb_per_s();
    let rows = rows(&points, &series, sequential);
    let agreement = (0..prompts.texts.len())
        .map(|prompt| {
            let all = points.iter().zip(&series);
            let of = all.filter(|(p, _)| p.variant.prompt == prompt);
            Agreement::of(of.map(|(_, s)| s))
        })
        .reduce(Agreement::and);
    let model = model_of(&series)?;
    let title = format!("{model}: speed of prompts, --io {}", args.io);
    let notes = vec![
        format!(
            "bound: the greater of the same prompt's time with everything in memory and of a sequential read, \
             at {sequential:.0} MB/s, of what was read"
        ),
        "paper: PowerInfer-2, §7.3, Bamboo-7B on a phone's NPU: above 700 tokens/s in memory, 404.6 with \
         half of the FFN on flash (0.58 or less)"
            .into(),
    ];
    let how = format!("prompts, {rounds} interleaved rounds, --io {}", args.io);
    Results {
        bench: "prefill",
        svg: chart(&title, &facts.line(), &rows),
        table: table(&rows),
        csv: csv(&rows),
        agreement,
        model: Some(model),
        facts,
        how,
        body: Rows { rows: &rows },
        notes,
    }
    .finish(&bench.output)
}

/// A text of about `length` tokens, in whole words; `tokens` counts them.
fn prompt(
    length: usize,
    tokens: impl Fn(&str) -> Result<usize, Failure>,
) -> Result<String, Failure> {
    const WORDS: [&str; 24] = [
        "the", "river", "runs", "past", "an", "old", "mill", "where", "nobody", "has", "lived",
        "since", "winter", "and", "every", "evening", "some", "light", "falls", "on", "its",
        "broken", "wheel", "again",
    ];
    // No repetition: repeated words would need the same neurons.
    let (mut state, mut words) = (length as u64 | 1, Vec::new());
    let mut word = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        WORDS[(state >> 33) as usize % WORDS.len()]
    };
    words.extend((0..length).map(|_| word()));
    let (mut low, mut high) = (1, words.len());
    // Bisection: more words are more tokens, and each word has at least one.
    while low < high {
        let middle = (low + high).div_ceil(2);
        if tokens(&words[..middle].join(" "))? <= length {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    Ok(words[..low].join(" "))
}

fn rows(points: &[Point<Chunked>], all: &[Series], sequential: f64) -> Vec<PrefillRow> {
    let ms = |s: &Series| {
        let of = |r: &Run| 1e3 * r.prompt_tokens as f64 / r.prefill_tokens_per_s.max(1e-9);
        s.range(of).median
    };
    let one = |(point, series): (&Point<Chunked>, &Series)| {
        let in_memory = Point {
            share: 1.0,
            ..*point
        };
        let resident = points.iter().position(|&p| p == in_memory);
        let compute_ms = resident.map_or(0.0, |i| ms(&all[i]));
        let (first, ms) = (series.first(), ms(series));
        let bytes_read = first.map_or(0, |r| r.io.bytes_read);
        let disk_ms = if sequential > 0.0 {
            bytes_read as f64 / sequential / 1e3
        } else {
            0.0
        };
        let bound = compute_ms.max(disk_ms);
        let of = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        PrefillRow {
            prompt_tokens: first.map_or(0, |r| r.prompt_tokens),
            chunk: first.map_or(0, |r| r.plan.chunk),
            asked_chunk: point.variant.chunk,
            share: point.share,
            tokens_per_s: series.range(|r| r.prefill_tokens_per_s),
            of_resident: of(compute_ms, ms),
            bytes_read,
            ms,
            compute_ms,
            disk_ms,
            limit: if disk_ms > compute_ms {
                "disk"
            } else {
                "computing"
            },
            of_bound: of(ms, bound),
            note: series.refused.clone(),
        }
    };
    points.iter().zip(all).map(one).collect()
}

fn table(rows: &[PrefillRow]) -> Table {
    let mut table = Table::new(
        "prompt | chunk | FFN in memory | tokens/s | of resident | ms | computing, ms | \
         sequential reads, ms | limit | of bound",
    );
    for r in rows {
        let point = vec![
            r.prompt_tokens.to_string(),
            r.chunk.to_string(),
            percent(r.share),
        ];
        table.add(point, r.note.as_ref(), || {
            let mut cells = vec![r.tokens_per_s.show(2), percent(r.of_resident)];
            cells.extend([r.ms, r.compute_ms, r.disk_ms].map(|ms| format!("{ms:.1}")));
            cells.extend([r.limit.into(), format!("{:.2}", r.of_bound)]);
            cells
        });
    }
    table
}

fn csv(rows: &[PrefillRow]) -> Table {
    let mut table = Table::new(
        "prompt_tokens | chunk | share | tokens_per_s | tokens_per_s_min | \
         tokens_per_s_max | of_resident | bytes_read | ms | compute_ms | disk_ms | \
         limit | of_bound",
    );
    for r in rows {
        let t = r.tokens_per_s;
        let mut cells = vec![
            r.prompt_tokens.to_string(),
            r.chunk.to_string(),
            r.share.to_string(),
        ];
        let numbers = [t.median, t.min, t.max, r.of_resident];
        cells.extend(numbers.map(|v| format!("{v:.4}")));
        cells.push(r.bytes_read.to_string());
        cells.extend([r.ms, r.compute_ms, r.disk_ms].map(|v| format!("{v:.3}")));
        cells.push(r.limit.into());
        cells.push(format!("{:.4}", r.of_bound));
        table.rows.push(cells);
    }
    table
}

fn chart(title: &str, facts: &str, rows: &[PrefillRow]) -> String {
    let mut names: Vec<String> = Vec::new();
    let mut groups: Vec<(String, Vec<f64>)> = Vec::new();
    for r in rows {
        let name = format!("{} in memory", percent(r.share));
        if !names.contains(&name) {
            names.push(name);
        }
        let group = match r.asked_chunk {
            0 => r.prompt_tokens.to_string(),
            n => format!("{} in chunks of {n}", r.prompt_tokens),
        };
        match groups.iter_mut().find(|g| g.0 == group) {
            Some(group) => group.1.push(r.tokens_per_s.median),
            None => groups.push((group, vec![r.tokens_per_s.median])),
        }
    }
    let labels = Labels {
        title,
        facts,
        x: "tokens of the prompt",
        y: "tokens/s",
    };
    bars(&labels, &names, &groups)
}

#[cfg(test)]
mod tests {
    #[test]
    fn prompts_have_the_length_that_was_asked_for() {
        let words = |text: &str| Ok(text.split(' ').count());
        let text = super::prompt(20, words).unwrap();
        assert_eq!(text.split(' ').count(), 20);
        // Two tokens per word.
        let twice = super::prompt(21, |text| Ok(words(text)? * 2)).unwrap();
        assert_eq!(twice.split(' ').count(), 10);
    }
}
