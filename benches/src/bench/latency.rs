//! `emberflow-lab latency`: time and stalls of single tokens (PowerInfer-2, Table 5 and §7.2.4).

use emberflow_engine::Ablation;
use serde::Serialize;

use super::paper::{LATENCY, WAITING};
use crate::cli::LatencyArgs;
use emberflow::Failure;
use emberflow::bench::bound::{Bound, Device, NOTE};
use emberflow::bench::child::{Decoding, Run, mean};
use emberflow::bench::output::{Results, Rows, Table, may_write, percent};
use emberflow::bench::points::{self, Point, Setup};
use emberflow::bench::rounds::{Agreement, Series};
use emberflow::bench::sweep::{bounds, memory_of, model_of};
use emberflow::chart::{Labels, histogram};
use emberflow::stats::{Range, percentile};

/// Lower ends of the hit-rate classes, and their names.
const CLASSES: [(f64, &str); 6] = [
    (0.0, "below 50 %"),
    (0.5, "50 to 80 %"),
    (0.8, "80 to 90 %"),
    (0.9, "90 to 95 %"),
    (0.95, "95 to 99 %"),
    (0.99, "99 % and more"),
];

/// One share of the FFN and policy, all rounds together.
#[derive(Debug, Serialize)]
struct LatencyRow {
    share: f64,
    policy: &'static str,
    tokens: usize,
    mean_ms: f64,
    p50_ms: f64,
    p90_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    p99_of_mean: f64,
    wait_share: f64,
    hit_rate: f64,
    /// Hit rate reached by 99 % of the tokens.
    worst_hit_rate: f64,
    bound: Bound,
    /// Token time relative to the bound, over the rounds.
    of_bound: Range,
    by_hit_rate: Vec<Class>,
    note: Option<String>,
}

/// Tokens with similar hit rates.
#[derive(Debug, Serialize)]
struct Class {
    hit_rate: &'static str,
    tokens: usize,
    mean_ms: f64,
    wait_share: f64,
}

/// Runs the command.
pub fn command(args: &LatencyArgs) -> Result<(), Failure> {
    let bench = &args.bench;
    may_write(&bench.output, "latency", Some(&bench.model), None)?;
    let points = points::each(&args.shares, &args.policies);
    let (tokens, rounds) = (bench.tokens_or(512), bench.rounds_or(1));
    let mut setup = Setup::new(bench, &args.io)?;
    let decoding = Decoding::of(bench, tokens, &args.io);
    let named = |policy: Ablation| policy.name().to_owned();
    let more = |policy: Ablation| ["--ablation".into(), policy.name().into()];
    let series = setup.decode(&decoding, rounds, &points, named, more)?;
    let (facts, device) = (setup.facts, setup.device);
    let memory = memory_of(&series);
    let rows: Vec<LatencyRow> = (points.iter().zip(&series))
        .map(|(point, series)| row(*point, series, &device, memory))
        .collect();
    let model = model_of(&series)?;
    let lists: Vec<(String, Vec<f64>)> = (series.iter())
        .map(|s| (s.name.clone(), each(s, |run| &run.details.ms)))
        .collect();
    let title = format!("{model}: time per token, --io {}", args.io);
    let labels = Labels {
        title: &title,
        facts: &facts.line(),
        x: "milliseconds of a token",
        y: "% of the tokens",
    };
    let svg = histogram(&labels, &lists);
    let how = format!(
        "latency of single tokens, {tokens} tokens, {rounds} interleaved rounds, --io {}",
        args.io
    );
    Results {
        bench: "latency",
        svg,
        table: table(&rows),
        csv: csv(&rows),
        agreement: Some(Agreement::of(series.iter())),
        model: Some(model),
        facts,
        how,
        body: Rows { rows: &rows },
        notes: notes(&rows),
    }
    .finish(&bench.output)
}

/// The paper's values, and the tokens by hit rate.
fn notes(rows: &[LatencyRow]) -> Vec<String> {
    let [mean, p50, p90, p99] = LATENCY;
    vec![
        NOTE.to_owned(),
        format!(
            "paper: PowerInfer-2, Table 5, by its authors on their phone, Bamboo-7B, half of the FFN: mean \
             {mean} ms, P50 {p50}, P90 {p90}, P99 {p99} (P99 of mean {:.2})",
            p99 / mean
        ),
        format!(
            "paper: Table 4, the same: waiting {}, LLM in a flash {}",
            percent(WAITING[0]),
            percent(WAITING[1])
        ),
        by_hit_rate(rows),
    ]
}

/// Concatenates a per-token series of all runs.
fn each(series: &Series, of: impl Fn(&Run) -> &Vec<f64>) -> Vec<f64> {
    let all = series.runs.iter().flat_map(|run| of(run).iter().copied());
    all.collect()
}

fn row(point: Point<Ablation>, series: &Series, device: &Device, memory: f64) -> LatencyRow {
    let (bound, of_bound) = bounds(series, device, memory);
    let ms = each(series, |r| &r.details.ms);
    let waits = each(series, |r| &r.details.wait_ms);
    let rates = each(series, |r| &r.details.hit_rate);
    let by_hit_rate = classes(&ms, &waits, &rates);
    let (mut sorted, mut hits) = (ms.clone(), rates);
    sorted.sort_by(f64::total_cmp);
    hits.sort_by(f64::total_cmp);
    let (mean_ms, p99_ms) = (mean(&ms), percentile(&sorted, 0.99));
    LatencyRow {
        share: point.share,
        policy: point.variant.name(),
        tokens: ms.len(),
        mean_ms,
        p50_ms: percentile(&sorted, 0.5),
        p90_ms: percentile(&sorted, 0.9),
        p99_ms,
        max_ms: sorted.last().copied().unwrap_or_default(),
        p99_of_mean: p99_ms / mean_ms.max(1e-9),
        wait_share: series.range(Run::wait_share).median,
        hit_rate: series.range(Run::hit_rate).median,
        worst_hit_rate: percentile(&hits, 0.01),
        bound,
        of_bound,
        by_hit_rate,
        note: series.refused.clone(),
    }
}

/// Groups tokens by hit rate; empty classes are omitted.
fn classes(ms: &[f64], waits: &[f64], rates: &[f64]) -> Vec<Class> {
    let ends = CLASSES.iter().skip(1).map(|c| c.0).chain([f64::INFINITY]);
    let class = |(&(low, name), high): (&(f64, &'static str), f64)| {
        let inside = |rate: f64| rate >= low && rate < high;
        let all = ms.iter().zip(waits).zip(rates);
        let here: Vec<(f64, f64)> = all
            .filter(|(_, rate)| inside(**rate))
            .map(|((ms, wait), _)| (*ms, *wait))
            .collect();
        let total: f64 = here.iter().map(|t| t.0).sum();
        let waited: f64 = here.iter().map(|t| t.1).sum();
        (!here.is_empty()).then(|| Class {
            hit_rate: name,
            tokens: here.len(),
            mean_ms: total / here.len() as f64,
            wait_share: waited / total.max(1e-9),
        })
    };
    CLASSES.iter().zip(ends).filter_map(class).collect()
}

/// A table of the classes.
fn by_hit_rate(rows: &[LatencyRow]) -> String {
    let mut table =
        Table::new("FFN in memory | policy | hit rate of the token | tokens | ms/token | waiting");
    for row in rows {
        for class in &row.by_hit_rate {
            table.rows.push(vec![
                percent(row.share),
                row.policy.into(),
                class.hit_rate.into(),
                class.tokens.to_string(),
                format!("{:.2}", class.mean_ms),
                percent(class.wait_share),
            ]);
        }
    }
    format!("\n{}", table.markdown())
}

fn table(rows: &[LatencyRow]) -> Table {
    let mut table = Table::new(
        "FFN in memory | policy | mean, ms | P50 | P90 | P99 | max | P99 of mean | \
         waiting | hits | hits of the worst 1 % | bound, ms | limit | of bound",
    );
    for r in rows {
        let point = vec![percent(r.share), r.policy.into()];
        table.add(point, r.note.as_ref(), || {
            let ms = [r.mean_ms, r.p50_ms, r.p90_ms, r.p99_ms, r.max_ms];
            let mut cells = ms.map(|ms| format!("{ms:.2}")).to_vec();
            cells.push(format!("{:.2}", r.p99_of_mean));
            cells.extend([r.wait_share, r.hit_rate, r.worst_hit_rate].map(percent));
            cells.extend(r.bound.cells(r.of_bound));
            cells
        });
    }
    table
}

fn csv(rows: &[LatencyRow]) -> Table {
    let mut table = Table::new(
        "share | policy | tokens | mean_ms | p50_ms | p90_ms | p99_ms | max_ms | \
         wait_share | hit_rate | worst_hit_rate | bound_ms | of_bound",
    );
    for r in rows {
        let mut cells = vec![r.share.to_string(), r.policy.into(), r.tokens.to_string()];
        let ms = [r.mean_ms, r.p50_ms, r.p90_ms, r.p99_ms, r.max_ms];
        let rest = [
            r.wait_share,
            r.hit_rate,
            r.worst_hit_rate,
            r.bound.ms,
            r.of_bound.median,
        ];
        cells.extend(ms.iter().chain(&rest).map(|v| format!("{v:.4}")));
        table.rows.push(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_classified_by_their_hits() {
        let classes = classes(&[10.0, 20.0, 30.0], &[1.0, 10.0, 5.0], &[1.0, 0.96, 0.95]);
        let found: Vec<_> = (classes.iter())
            .map(|c| (c.hit_rate, c.tokens, c.mean_ms, c.wait_share))
            .collect();
        assert_eq!(
            found,
            [
                ("95 to 99 %", 2, 25.0, 0.3),
                ("99 % and more", 1, 10.0, 0.1)
            ]
        );
    }
}
