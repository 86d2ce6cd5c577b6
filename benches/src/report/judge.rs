//! Beside what the papers publish, and beside our own targets.

use super::parts::within_a_fifth;
use super::results::Results;
use super::tables::{OFFLOAD, ours, times_llama};
use super::text::{Table, num, percent};
use super::{share_of, sweep_ends};

/// The file of half of the FFN beside llama.cpp.
const HALF: &str = OFFLOAD[2].1;

/// Our numbers beside those of PowerInfer-2 and LLM in a flash. Rows without a file are left out.
pub fn papers(r: &Results) -> String {
    let mut table = Table::new(&["paper", "what", "paper", "here"]);
    let mut left_out = Vec::new();
    for (place, what, paper, here) in rows(r) {
        match here {
            Some(here) => table.row(&[place, what, paper, &here]),
            None => left_out.push(what),
        }
    }
    let mut text = table.end();
    if !left_out.is_empty() {
        text += &format!(
            "\nNot measured with this commit: {}.\n",
            left_out.join("; ")
        );
    }
    text
}

type PaperRow = (&'static str, &'static str, &'static str, Option<String>);

fn rows(r: &Results) -> Vec<PaperRow> {
    let half = r.csv(HALF);
    let times = |policy: &str| {
        let csv = half.as_ref()?;
        Some(num(ours(csv, "full")? / ours(csv, policy)?))
    };
    let latency = |column: &str| r.csv("latency.csv")?.rows().next()?.number(column);
    let ratio = |file: &str| {
        let csv = r.csv(file)?;
        let at = |policy| csv.find(&[("policy", policy)])?.number("tokens_per_s");
        Some(at("full")? / at("llmflash")?)
    };
    let prefill = || {
        let csv = r.csv("prefill.csv")?;
        csv.find(&[("share", "0.5")])?.number("of_resident")
    };
    let ladder = |io: &str| {
        let csv = r.csv("ladder.csv")?;
        csv.find(&[("io", io), ("policy", "full")])?
            .number("of_first")
    };
    let batch = |share: &str| {
        let csv = r.csv("batch.csv")?;
        csv.find(&[("share", share), ("texts", "4")])?
            .number("gain")
            .map(num)
    };
    let policies = || r.csv("sweep-policies.csv");
    let flash = || {
        let csv = policies()?;
        let at = |policy| {
            csv.find(&[("share", "0.5"), ("policy", policy)])?
                .number("tokens_per_s")
        };
        Some(num(at("llmflash")? / at("mmap")?))
    };
    let silu = ratio("table-6-silu.csv").map(num);
    let both = |a: Option<String>, b: Option<String>, between: &str| {
        Some(format!("{}{between}{}", a?, b?))
    };
    vec![
        (
            "PowerInfer-2, Fig. 7",
            "half of the FFN on flash, times llama.cpp",
            "24.6 on average, up to 27.8",
            half.as_ref().and_then(times_llama).map(num),
        ),
        (
            "Fig. 7",
            "the same, times LLM in a flash",
            "3.84 on average, up to 4.63",
            times("llmflash"),
        ),
        (
            "Table 4",
            "share of the time that waits for I/O, Bamboo-7B",
            "13.7 %",
            latency("wait_share").map(percent),
        ),
        (
            "Table 4",
            "the same, LLM in a flash",
            "76.7 %",
            share_of(
                policies(),
                &[("share", "0.5"), ("policy", "llmflash")],
                "wait_share",
            ),
        ),
        (
            "Table 5",
            "P99 of a token's time, of the mean, Bamboo-7B",
            "1.79",
            latency("p99_ms").and_then(|p| Some(num(p / latency("mean_ms")?))),
        ),
        (
            "Table 6",
            "SiLU at half, times LLM in a flash; Bamboo beside it",
            "2.4; 4.6",
            both(silu, ratio("table-6-relu.csv").map(num), "; "),
        ),
        (
            "Fig. 8, §7.3",
            "prompt of 512 tokens, half on flash, of in memory",
            "58 %",
            prefill().map(percent),
        ),
        (
            "Fig. 10",
            "memory sweep",
            "2.13 to 11.68 tokens/s, 7 to 19 GB of a 47B model",
            sweep_ends(r),
        ),
        (
            "Fig. 13",
            "four texts at once, times its own CPU alone; here times one text",
            "1.28",
            both(
                batch("0.5"),
                batch("1").map(|b| format!("{b} in memory")),
                " at half, ",
            ),
        ),
        (
            "Fig. 14",
            "all mechanisms, times none, UFS 4.0",
            "24",
            both(
                ladder("sim:ufs4").map(|x| format!("{} (simulated UFS 4.0)", num(x))),
                ladder("sim:ufs31").map(|x| format!("{} (simulated UFS 3.1)", num(x))),
                ", ",
            ),
        ),
        (
            "LLM in a flash",
            "half in memory, times reading the weights as needed: OPT-6.7B on a CPU; here `llmflash` times `mmap`",
            "4.8 (3182 to 669 ms)",
            flash(),
        ),
    ]
}

/// A target, and where it stands: wanted, and measured with whether that is enough.
type Target = (&'static str, &'static str, Option<(String, bool)>);

/// Our own targets: those that are missed first.
pub fn targets(r: &Results) -> String {
    let mut table = Table::new(&["target", "wanted", "measured", ""]);
    let all = all_targets(r);
    for met in [false, true] {
        for (what, wanted, measured) in &all {
            if let Some((text, _)) = measured.as_ref().filter(|m| m.1 == met) {
                let verdict = if met { "met" } else { "**missed**" };
                table.row(&[*what, wanted, text, verdict]);
            }
        }
    }
    let unknown: Vec<&str> = (all.iter())
        .filter(|(_, _, measured)| measured.is_none())
        .map(|(what, _, _)| *what)
        .collect();
    let mut text = table.end();
    if !unknown.is_empty() {
        text += &format!("\nNot measured with this commit: {}.\n", unknown.join("; "));
    }
    text
}

fn all_targets(r: &Results) -> Vec<Target> {
    let at_least = |x: Option<f64>, wanted: f64| x.map(|x| (format!("{x:.2}"), x >= wanted));
    let share_at_least = |x: Option<f64>, wanted: f64| x.map(|x| (percent(x), x >= wanted));
    let llama = |file: &str| r.csv(file).as_ref().and_then(times_llama);
    let flash = || {
        let csv = r.csv(HALF)?;
        Some(ours(&csv, "full")? / ours(&csv, "llmflash")?)
    };
    let decode = |file: &str, column: &str| r.csv(file)?.rows().next()?.number(column);
    let naming = |file: &str| Some(decode(file, "predict_ms")? / decode(file, "ffn_ms")?);
    let bound = || {
        let csv = r.csv("sweep.csv")?;
        csv.find(&[("share", "1")])?.number("of_bound")
    };
    let peaks = || {
        let csv = r.csv("sweep.csv")?;
        let within =
            |row: super::csv::Row<'_>| row.or_zero("peak_rss_bytes") <= row.or_zero("budget_bytes");
        let (good, all) = (
            csv.rows().filter(|row| within(*row)).count(),
            csv.rows().count(),
        );
        Some((format!("{good} of {all}"), good == all))
    };
    let monotone = || {
        let csv = r.csv("sweep.csv")?;
        let speeds: Vec<f64> = csv.rows().map(|row| row.or_zero("tokens_per_s")).collect();
        let rises = speeds.is_sorted();
        Some((if rises { "yes" } else { "no" }.to_owned(), rises))
    };
    let steady = |column: &str| r.csv("latency-steady.csv")?.rows().next()?.number(column);
    let plan = || {
        let (good, all) = within_a_fifth(&r.csv("plan.csv")?);
        Some((format!("{good} of {all}"), good == all))
    };
    vec![
        (
            "half of the FFN in memory, times llama.cpp's best under the same cap",
            "25",
            at_least(llama(HALF), 25.0),
        ),
        (
            "a quarter of the FFN in memory, the same",
            "15",
            at_least(llama("offload-25.csv"), 15.0),
        ),
        (
            "half, times our LLM in a flash (`llmflash`)",
            "5",
            at_least(flash(), 5.0),
        ),
        (
            "all in memory, of the bound",
            "at most 1.25",
            bound().map(|x| (format!("{x:.2}"), x <= 1.25)),
        ),
        (
            "`dense` decoding, of the speed of memory",
            "85 %",
            share_at_least(decode("decode-dense.csv", "roofline"), 0.85),
        ),
        (
            "`exact`: the sparse FFN, of the speed of memory",
            "70 %",
            share_at_least(decode("decode-exact.csv", "ffn_roofline"), 0.70),
        ),
        (
            "naming, of the time in FFNs, all in memory",
            "at most 10 %",
            naming("decode-predicted.csv").map(|x| (percent(x), x <= 0.10)),
        ),
        (
            "waiting at hits of 95 % or more (the steady model)",
            "at most 10 %",
            steady("wait_share")
                .filter(|_| steady("hit_rate").is_some_and(|hits| hits >= 0.95))
                .map(|x| (percent(x), x <= 0.10)),
        ),
        (
            "budgets of the sweep that the peak stays within",
            "all",
            peaks(),
        ),
        (
            "more memory is never slower in the sweep",
            "yes",
            monotone(),
        ),
        ("plans within 20 %", "all rows", plan()),
    ]
}
