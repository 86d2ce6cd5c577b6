//! `emberflow-lab split`: the partition solver on a phone's published curves, compared with the
//! authors' results. Nothing is measured here.

mod chunks;
#[cfg(test)]
mod chunks_tests;
mod measured;
pub(crate) mod snapdragon;
#[cfg(test)]
mod tests;

use std::io::{self, Write};

use emberflow_devices::split::{Curve, Pair, Partition, Product, Solution};
use serde::Serialize;

use self::snapdragon::{GPU, GRAPHED, NPU, PAIR, PublishedSplit, RATIOS, SLOW_SYNC, SPACE, TABLE};

use crate::cli::SplitArgs;
use emberflow::{Failure, print_json};

/// Products of a layer of Llama-3 8B, gate and up combined, as `[rows, columns]`.
pub(crate) const LAYER: [[usize; 2]; 6] = [
    [4096, 4096],
    [1024, 4096],
    [1024, 4096],
    [4096, 4096],
    [28672, 4096],
    [4096, 14336],
];
/// Number of layers.
pub(crate) const LAYERS: f64 = 32.0;
/// The head, computed for one token.
const HEAD: Product = Product {
    rows: 128_256,
    cols: 4096,
    n: 1,
};

/// Token counts for which an engine without partitions has graphs (HeteroInfer §5.3.2).
const STANDARD: [usize; 4] = [128, 256, 512, 1024];

/// Tokens per chunk (Agent.xpu §4.2 uses one size).
const CHUNK: usize = 128;

/// Milliseconds to build the graphs for a token count (§5.3.2): `[tokens, ms]`.
const BUILDING: [[f64; 2]; 2] = [[135.0, 408.4], [1000.0, 2050.0]];

/// Published speedups at 525 tokens (§5.3.2) over building online, padding, and graphs in sequence.
const PUBLISHED_525: [f64; 3] = [2.24, 2.21, 1.35];
/// Published speedups of decode, Llama-8B: over the GPU alone (§5.4), and over `clFinish` (§5.5).
const PUBLISHED_DECODE: [f64; 2] = [1.22, 4.01];

/// A row of the paper's table, with the solver's choice.
#[derive(Serialize)]
struct SplitRow {
    weights: [usize; 2],
    tokens: [usize; 2],
    gpu_us: f64,
    npu_us: f64,
    chosen: String,
    us: f64,
    published: &'static str,
}

/// Prefill times of a prompt in milliseconds: as the solver partitions it, on the GPU, with graphs built online, padded,
/// and with graphs in sequence.
#[derive(Serialize)]
pub(crate) struct Prompt {
    tokens: usize,
    pub split: f64,
    gpu_alone: f64,
    pub online: f64,
    pub padded: f64,
    pub in_pieces: f64,
    /// In chunks (Agent.xpu, Algorithm 1), with an idle GPU and with one that decodes other texts;
    /// GPU time left to those.
    chunks: f64,
    chunks_busy: f64,
    gpu_left: f64,
}

/// Decode times in milliseconds per token.
#[derive(Serialize)]
pub(crate) struct Decoding {
    pub split: f64,
    pub gpu_alone: f64,
    pub slow_sync: f64,
}

#[derive(Serialize)]
struct SplitReport {
    bench: &'static str,
    simulated: &'static str,
    sync_us: u32,
    table: Vec<SplitRow>,
    prompts: Vec<Prompt>,
    decoding: Decoding,
}

fn row(pair: &Pair<'_>, of: &PublishedSplit) -> SplitRow {
    let Solution { partition, seconds } = pair.solve(of.product, SPACE);
    SplitRow {
        weights: [of.product.rows, of.product.cols],
        tokens: [of.product.n, of.until],
        gpu_us: GPU.seconds(of.product) * 1e6,
        npu_us: NPU.seconds(of.product) * 1e6,
        chosen: named(of.product, partition),
        us: seconds * 1e6,
        published: of.chosen,
    }
}

/// Milliseconds of all layers for `n` tokens, with `seconds` per product.
fn layers(n: usize, seconds: impl Fn(Product) -> f64) -> f64 {
    let all = LAYER.map(|[rows, cols]| seconds(Product { rows, cols, n }));
    1e3 * LAYERS * all.iter().sum::<f64>()
}

/// Graphs of [`STANDARD`] that cover `n` tokens in sequence; the last one is padded.
fn pieces(mut n: usize) -> Vec<usize> {
    let mut found = Vec::new();
    while n > 0 {
        let fits = STANDARD.iter().rev().find(|&&graph| graph <= n);
        let graph = *fits.unwrap_or(&STANDARD[0]);
        found.push(graph);
        n = n.saturating_sub(graph);
    }
    found
}

pub(crate) fn prompt(pair: &Pair<'_>, n: usize) -> Prompt {
    let npu = |of: Product, n: usize| NPU.seconds(Product { n, ..of });
    let [[low, fast], [high, slow]] = BUILDING;
    let building = fast + (n as f64 - low) * (slow - fast) / (high - low);
    let standard = STANDARD.iter().find(|&&graph| graph >= n);
    let standard = standard.map_or_else(|| n.next_multiple_of(1024), |&graph| graph);
    let pieces = pieces(n);
    let chunks = |of: Product, busy: bool| chunks::chunks(pair, of, CHUNK, busy);
    Prompt {
        tokens: n,
        split: layers(n, |of| pair.solve(of, SPACE).seconds),
        gpu_alone: layers(n, |of| GPU.seconds(of)),
        online: layers(n, |of| NPU.seconds(of) + pair.sync) + building.max(0.0),
        padded: layers(n, |of| npu(of, standard) + pair.sync),
        in_pieces: layers(n, |of| {
            pieces.iter().map(|&n| npu(of, n)).sum::<f64>() + pair.sync
        }),
        chunks: layers(n, |of| chunks(of, false).seconds),
        chunks_busy: layers(n, |of| chunks(of, true).seconds),
        gpu_left: layers(n, |of| {
            let placed = chunks(of, true);
            let own = Product {
                n: placed.first,
                ..of
            };
            placed.seconds
                - if placed.first > 0 {
                    GPU.seconds(own)
                } else {
                    0.0
                }
        }),
    }
}

pub(crate) fn decoding(pair: &Pair<'_>) -> Decoding {
    let each = |seconds: &dyn Fn(Product) -> f64| layers(1, seconds) + 1e3 * seconds(HEAD);
    let slow = Pair {
        sync: SLOW_SYNC,
        ..*pair
    };
    Decoding {
        split: each(&|of| pair.solve(of, SPACE).seconds),
        gpu_alone: each(&|of| GPU.seconds(of)),
        // The same partitions, joined with `clFinish`.
        slow_sync: each(&|of| {
            let chosen = pair.solve(of, SPACE).partition;
            slow.seconds(of, chosen)
        }),
    }
}

/// The division of the rows, `GPU : NPU`, of which the NPU has so many.
fn ratio(of: Product, rows: usize) -> String {
    let is = |[first, second]: &&[usize; 2]| of.rows - of.rows * first / (first + second) == rows;
    let found = RATIOS.iter().find(is);
    found.map_or(String::new(), |[first, second]| format!("{first}:{second}"))
}

fn named(of: Product, Partition { rows, tokens }: Partition) -> String {
    let padded = GRAPHED.padded(tokens).unwrap_or(tokens);
    match (rows == of.rows, tokens == of.n) {
        _ if rows == 0 => "GPU alone".into(),
        (true, true) => format!("NPU alone, {padded} tokens"),
        (true, false) => format!("activations, NPU {tokens} tokens"),
        (false, _) => format!("weights {}, NPU {padded} tokens", ratio(of, rows)),
    }
}

/// Runs the command.
pub fn command(args: &SplitArgs) -> Result<(), Failure> {
    let pair = Pair {
        sync: f64::from(args.sync_us) / 1e6,
        ..PAIR
    };
    let report = SplitReport {
        bench: "split",
        simulated: "Snapdragon 8 Gen 3 by HeteroInfer, Table 3, W4A16; products alone, no attention, no norms",
        sync_us: args.sync_us,
        table: TABLE.iter().map(|of| row(&pair, of)).collect(),
        prompts: args
            .tokens
            .iter()
            .map(|&n| prompt(&pair, n as usize))
            .collect(),
        decoding: decoding(&pair),
    };
    if args.json {
        print_json(&report)
    } else {
        print(&report, &mut io::stdout().lock()).map_err(Failure::from)
    }
}

/// The token count of a row, or its first count and range.
fn tokens_of([from, until]: [usize; 2]) -> String {
    if from == until {
        from.to_string()
    } else {
        format!("{from} of {from} to {until}")
    }
}

fn print(report: &SplitReport, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "simulated: {}", report.simulated)?;
    writeln!(out, "{} us to synchronise and to copy\n", report.sync_us)?;
    writeln!(
        out,
        "| weights | tokens | GPU us | NPU us | chosen | us | chosen in the paper |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|")?;
    for row in &report.table {
        let tokens = tokens_of(row.tokens);
        let [rows, cols] = row.weights;
        writeln!(
            out,
            "| {rows}x{cols} | {tokens} | {:.0} | {:.0} | {} | {:.0} | {} |",
            row.gpu_us, row.npu_us, row.chosen, row.us, row.published
        )?;
    }
    writeln!(
        out,
        "\nLlama-8B, prompts, ms; times as long as the partition"
    )?;
    writeln!(
        out,
        "| tokens | partition | GPU alone | graphs built online | padded | graphs in sequence | chunks | chunks while \
         the GPU decodes |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|")?;
    for p in &report.prompts {
        let relative = |ms: f64, published: Option<f64>| {
            let published = published.map_or(String::new(), |f| format!(", paper {f:.2}"));
            format!("{ms:.0} ({:.2}{published})", ms / p.split)
        };
        let of = |i: usize| (p.tokens == 525).then(|| PUBLISHED_525[i]);
        writeln!(
            out,
            "| {} | {:.0} | {} | {} | {} | {} | {} | {}, which is idle for {:.0} |",
            p.tokens,
            p.split,
            relative(p.gpu_alone, None),
            relative(p.online, of(0)),
            relative(p.padded, of(1)),
            relative(p.in_pieces, of(2)),
            relative(p.chunks, None),
            relative(p.chunks_busy, None),
            p.gpu_left,
        )?;
    }
    let d = &report.decoding;
    writeln!(
        out,
        "\ndecoding: {:.1} ms a token; GPU alone {:.1} ({:.2} times as long, paper {:.2}); the same partitions \
         joined by clFinish {:.1} ({:.2}, paper {:.2})",
        d.split,
        d.gpu_alone,
        d.gpu_alone / d.split,
        PUBLISHED_DECODE[0],
        d.slow_sync,
        d.slow_sync / d.split,
        PUBLISHED_DECODE[1],
    )?;
    Ok(())
}
