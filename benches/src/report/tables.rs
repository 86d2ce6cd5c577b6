//! Tables of whole runs: comparison with llama.cpp, speed by memory, breakdown of time.

use super::csv::{Csv, CsvRow};
use super::results::Results;
use super::text::{Table, gib, num, percent, range};

/// Shares of the FFN at which llama.cpp runs in the same control group, and the files.
pub const OFFLOAD: [(&str, &str); 4] = [
    ("100 %", "offload-100.csv"),
    ("75 %", "offload-75.csv"),
    ("50 %", "offload-50.csv"),
    ("25 %", "offload-25.csv"),
];

/// Fastest llama.cpp configuration in a comparison under one limit.
pub fn best_llama(csv: &Csv) -> f64 {
    let theirs = csv
        .rows()
        .filter(|row| row.text("name").starts_with("llama.cpp"));
    theirs.map(|row| row.or_zero("median")).fold(0.0, f64::max)
}

/// Our speed with a policy in a comparison under one limit.
pub fn ours(csv: &Csv, policy: &str) -> Option<f64> {
    csv.find(&[("name", &format!("emberflow {policy}"))])?
        .number("median")
}

/// Our speed relative to the fastest llama.cpp.
pub fn times_llama(csv: &Csv) -> Option<f64> {
    let theirs = best_llama(csv);
    ours(csv, "full")
        .filter(|_| theirs > 0.0)
        .map(|us| us / theirs)
}

/// Budget of the whole process for a share of the FFN, in GiB.
pub fn budget(r: &Results, share: &str) -> Option<f64> {
    let sweep = r.csv("sweep.csv")?;
    let share = share.trim_end_matches(" %").parse::<f64>().ok()? / 100.0;
    let mut rows = sweep.rows();
    let row = rows.find(|row| row.number("share") == Some(share))?;
    Some(row.number("budget_bytes")? / f64::from(1 << 30))
}

/// Comparison with llama.cpp under one memory limit.
pub fn offload(r: &Results) -> String {
    let mut table = Table::new(&[
        "FFN in memory",
        "process, GiB",
        "program",
        "tokens/s",
        "relative to llama.cpp's best",
    ]);
    let mut any = false;
    for (share, file) in OFFLOAD {
        let Some(csv) = r.csv(file) else { continue };
        any = true;
        let best = best_llama(&csv);
        let memory = budget(r, share).map_or("?".to_owned(), |gib| format!("{gib:.2}"));
        for row in csv.rows() {
            let name = row.text("name").replacen("emberflow ", "Emberflow, `", 1);
            let name = if name.contains('`') { name + "`" } else { name };
            let median = row.or_zero("median");
            let (speed, ratio) = match median {
                0.0 => ("none: out of memory or time".into(), String::new()),
                _ => (
                    range(median, row.or_zero("low"), row.or_zero("high")),
                    if best > 0.0 {
                        num(median / best)
                    } else {
                        String::new()
                    },
                ),
            };
            table.row(&[share, &memory, &name, &speed, &ratio]);
        }
    }
    if !any {
        return r.left_out(OFFLOAD[2].1);
    }
    format!(
        "{}: {}.\n\n{}",
        "Speeds",
        r.rounds(OFFLOAD[2].1),
        table.end()
    )
}

/// Comparison with llama.cpp with everything in memory.
pub fn in_memory(r: &Results) -> String {
    let mut table = Table::new(&[
        "model",
        "program",
        "decode, tokens/s",
        "relative to llama.cpp",
        "prompt of 512, tokens/s",
        "relative to llama.cpp",
    ]);
    let mut any = false;
    for model in ["llama-1b", "bamboo-7b"] {
        let Some(csv) = r.csv(&format!("in-memory-{model}.csv")) else {
            continue;
        };
        any = true;
        let llama = csv.find(&[("name", "llama.cpp")]);
        for row in csv.rows() {
            let cells = |what: &str| {
                let of = |end: &str| row.or_zero(&format!("{what}{end}"));
                let ratio = llama.and_then(|l| l.number(what)).map(|l| of("") / l);
                [
                    range(of(""), of("_low"), of("_high")),
                    ratio.map(num).unwrap_or_default(),
                ]
            };
            let ([decode, times], [prompt, of]) = (cells("decode"), cells("prefill"));
            table.row(&[model, row.text("name"), &decode, &times, &prompt, &of]);
        }
    }
    if any {
        table.end()
    } else {
        r.left_out("in-memory-bamboo-7b.csv")
    }
}

/// Speed by share of the FFN in memory.
pub fn sweep(r: &Results) -> String {
    let Some(csv) = r.csv("sweep.csv") else {
        return r.left_out("sweep.csv");
    };
    let others = r.csv("sweep-policies.csv");
    let other = |share: &str, policy: &str| {
        let row = others
            .as_ref()?
            .find(&[("share", share), ("policy", policy)])?;
        row.number("tokens_per_s").map(num)
    };
    let mut table = Table::new(&[
        "FFN in memory",
        "budget, GiB",
        "peak, GiB",
        "`full`, tokens/s",
        "waiting",
        "hits",
        "relative to the bound",
        "`llmflash`",
        "`mmap`",
    ]);
    for row in csv.rows() {
        let share = row.text("share");
        let rate = |end: &str| row.or_zero(&format!("tokens_per_s{end}"));
        table.row(&[
            percent(row.or_zero("share")),
            gib(row.or_zero("budget_bytes")),
            gib(row.or_zero("peak_rss_bytes")),
            range(rate(""), rate("_min"), rate("_max")),
            percent(row.or_zero("wait_share")),
            percent(row.or_zero("hit_rate")),
            num(row.or_zero("of_bound")),
            other(share, "llmflash").unwrap_or_default(),
            other(share, "mmap").unwrap_or_default(),
        ]);
    }
    format!("`full`: {}.\n\n{}", r.rounds("sweep.csv"), table.end())
}

/// Breakdown of a token's time.
pub fn decode(r: &Results) -> String {
    let modes = [
        ("`dense`", "decode-dense.csv"),
        ("`exact`", "decode-exact.csv"),
        ("`predicted`", "decode-predicted.csv"),
        (
            "`predicted`, half of the FFN in memory",
            "decode-predicted-50.csv",
        ),
        ("known active set (oracle)", "decode-oracle.csv"),
    ];
    let mut table = Table::new(&[
        "",
        "ms/token",
        "attention",
        "FFN",
        "predictor",
        "waiting",
        "head",
        "GB/s",
        "of memory bandwidth",
        "FFN, of memory bandwidth",
    ]);
    let mut any = false;
    for (mode, file) in modes {
        let Some(csv) = r.csv(file) else { continue };
        let Some(row) = csv.rows().next() else {
            continue;
        };
        any = true;
        let n = |column: &str| num(row.or_zero(column));
        table.row(&[
            mode.to_owned(),
            range(
                row.or_zero("ms_median"),
                row.or_zero("ms_25"),
                row.or_zero("ms_75"),
            ),
            n("attention_ms"),
            n("ffn_ms"),
            n("predict_ms"),
            n("wait_ms"),
            n("head_ms"),
            n("gb_per_s"),
            percent(row.or_zero("roofline")),
            percent(row.or_zero("ffn_roofline")),
        ]);
    }
    if any {
        table.end()
    } else {
        r.left_out("decode-exact.csv")
    }
}

/// Long contexts.
pub fn contexts(r: &Results) -> String {
    let mut table = Table::new(&["positions", "mode", "ms/token", "relative to explained"]);
    let mut any = false;
    for mode in ["exact", "dense"] {
        let Some(csv) = r.csv(&format!("decode-contexts-{mode}.csv")) else {
            continue;
        };
        any = true;
        for row in csv.rows() {
            table.row(&[
                row.text("context").to_owned(),
                format!("`{mode}`"),
                num(row.or_zero("ms_median")),
                num(row.or_zero("of_explained")),
            ]);
        }
    }
    if any {
        table.end()
    } else {
        r.left_out("decode-contexts-exact.csv")
    }
}

/// Latency of single tokens.
pub fn latency(r: &Results) -> String {
    let files = [
        ("usual (persistence 0.83)", "latency.csv"),
        ("steady (persistence 0.9)", "latency-steady.csv"),
    ];
    let mut table = Table::new(&[
        "model",
        "tokens",
        "mean, ms",
        "P50",
        "P90",
        "P99",
        "P99 / mean",
        "waiting",
        "hits",
        "relative to the bound",
    ]);
    let mut missing = String::new();
    let mut any = false;
    for (model, file) in files {
        let Some(csv) = r.csv(file) else {
            missing += &format!("\n{model}: {}", r.left_out(file));
            continue;
        };
        any = true;
        for row in csv.rows() {
            let n = |column: &str| num(row.or_zero(column));
            table.row(&[
                model.to_owned(),
                row.text("tokens").to_owned(),
                n("mean_ms"),
                n("p50_ms"),
                n("p90_ms"),
                n("p99_ms"),
                num(row.or_zero("p99_ms") / row.or_zero("mean_ms")),
                percent(row.or_zero("wait_share")),
                percent(row.or_zero("hit_rate")),
                n("of_bound"),
            ]);
        }
    }
    if any {
        table.end() + &missing
    } else {
        r.left_out("latency.csv")
    }
}

/// Mechanisms added one by one.
pub fn ladder(r: &Results) -> String {
    let Some(csv) = r.csv("ladder.csv") else {
        return r.left_out("ladder.csv");
    };
    let steps = [
        ("nothing", "baseline"),
        ("+ bundles", "bundle-only"),
        ("+ neuron cache", "no-pipeline"),
        ("+ cluster pipeline", "full"),
    ];
    let mut table = Table::new(&[
        "step",
        "policy",
        "UFS 4.0, simulated: tokens/s",
        "factor",
        "waiting",
        "UFS 3.1, simulated: tokens/s",
        "factor",
        "waiting",
        "paper, phone: tokens/s",
        "factor",
    ]);
    for (step, policy) in steps {
        let on = |io: &str| csv.find(&[("io", io), ("policy", policy)]);
        let first = policy == "baseline";
        let factor = |x: f64| if first { String::new() } else { num(x) };
        let cells = |row: Option<CsvRow<'_>>| match row {
            Some(row) => [
                num(row.or_zero("tokens_per_s")),
                factor(row.or_zero("factor")),
                percent(row.or_zero("wait_share")),
            ],
            None => [const { String::new() }; 3],
        };
        let (fast, slow) = (on("sim:ufs4"), on("sim:ufs31"));
        let paper = |column: &str| fast.map_or(0.0, |row| row.or_zero(column));
        let mut all = vec![step.to_owned(), format!("`{policy}`")];
        all.extend(cells(fast));
        all.extend(cells(slow));
        all.push(num(paper("paper_tokens_per_s")));
        all.push(factor(paper("paper_factor")));
        table.row(&all);
    }
    table.end()
}

/// Several texts at once.
pub fn batch(r: &Results) -> String {
    let Some(csv) = r.csv("batch.csv") else {
        return r.left_out("batch.csv");
    };
    let mut table = Table::new(&[
        "texts at once",
        "neurons needed by any text",
        "half in memory: tokens/s, all texts",
        "relative to one text",
        "hits",
        "waiting",
        "all in memory: tokens/s, all texts",
        "relative to one text",
    ]);
    for texts in ["1", "2", "4", "8"] {
        let at = |share: &str| csv.find(&[("share", share), ("texts", texts)]);
        let Some(half) = at("0.5") else { continue };
        let all = |column: &str| at("1").map_or(String::new(), |row| num(row.or_zero(column)));
        table.row(&[
            texts.to_owned(),
            percent(half.or_zero("needed_share")),
            num(half.or_zero("tokens_per_s")),
            num(half.or_zero("gain")),
            percent(half.or_zero("hit_rate")),
            percent(half.or_zero("wait_share")),
            all("tokens_per_s"),
            all("gain"),
        ]);
    }
    table.end()
}

/// Prefill.
pub fn prefill(r: &Results) -> String {
    let Some(csv) = r.csv("prefill.csv") else {
        return r.left_out("prefill.csv");
    };
    let mut table = Table::new(&[
        "prompt, tokens",
        "FFN in memory",
        "chunk",
        "tokens/s",
        "relative to all in memory",
        "limit",
    ]);
    for row in csv.rows() {
        let rate = |end: &str| row.or_zero(&format!("tokens_per_s{end}"));
        table.row(&[
            row.text("prompt_tokens").to_owned(),
            percent(row.or_zero("share")),
            row.text("chunk").to_owned(),
            range(rate(""), rate("_min"), rate("_max")),
            percent(row.or_zero("of_resident")),
            row.text("limit").to_owned(),
        ]);
    }
    table.end()
}
