//! Comparison with published results, and with our own targets.

use super::parts::within_a_fifth;
use super::results::Results;
use super::tables::{OFFLOAD, ours, times_llama};
use super::text::{Table, gib, num, percent};

/// Results with half of the FFN in memory, including llama.cpp.
const HALF: &str = OFFLOAD[2].1;

/// Rows with half of the FFN in memory, by policy.
const LLMFLASH: [(&str, &str); 2] = [("share", "0.5"), ("policy", "llmflash")];
const MMAP: [(&str, &str); 2] = [("share", "0.5"), ("policy", "mmap")];

/// A number from the first row of a file with these fields.
fn cell(r: &Results, file: &str, wanted: &[(&str, &str)], column: &str) -> Option<f64> {
    r.csv(file)?.find(wanted)?.number(column)
}

/// A number from the first row of a file.
fn first(r: &Results, file: &str, column: &str) -> Option<f64> {
    cell(r, file, &[], column)
}

/// Our speed at half relative to another of our policies.
fn times_policy(r: &Results, policy: &str) -> Option<f64> {
    let csv = r.csv(HALF)?;
    Some(ours(&csv, "full")? / ours(&csv, policy)?)
}

/// `full` relative to `llmflash` in a sweep with one share.
fn times_flash(r: &Results, file: &str) -> Option<f64> {
    let speed = |policy| cell(r, file, &[("policy", policy)], "tokens_per_s");
    Some(speed("full")? / speed("llmflash")?)
}

/// Joins both, or `None`.
fn both(a: Option<String>, between: &str, b: Option<String>) -> Option<String> {
    Some(format!("{}{between}{}", a?, b?))
}

/// Speed and memory at both ends of the sweep.
fn sweep_ends(r: &Results) -> Option<String> {
    let sweep = r.csv("sweep.csv")?;
    let (first, last) = (sweep.rows().next()?, sweep.rows().last()?);
    let [slow, fast] = [first, last].map(|row| num(row.or_zero("tokens_per_s")));
    let [least, most] = [first, last].map(|row| gib(row.or_zero("budget_bytes")));
    Some(format!(
        "{slow} to {fast} tokens/s, {least} to {most} GiB of a 7B model"
    ))
}

/// A published result and ours.
struct Published {
    place: &'static str,
    what: &'static str,
    theirs: &'static str,
    here: Option<String>,
}

/// Our results next to those of PowerInfer-2 and LLM in a flash. Rows without a file are omitted.
pub fn papers(r: &Results) -> String {
    let mut table = Table::new(&["paper", "what", "paper", "here"]);
    let mut left_out = Vec::new();
    let rows = decoding(r).into_iter().chain(whole(r));
    for row in rows {
        match row.here {
            Some(here) => table.row(&[row.place, row.what, row.theirs, &here]),
            None => left_out.push(row.what),
        }
    }
    table.end() + &not_measured(&left_out)
}

fn not_measured(what: &[&str]) -> String {
    match what {
        [] => String::new(),
        _ => format!("\nNot measured with this commit: {}.\n", what.join("; ")),
    }
}

/// Decode with half of the FFN in memory.
fn decoding(r: &Results) -> [Published; 5] {
    let latency = |column| first(r, "latency.csv", column);
    let tail = latency("p99_ms").zip(latency("mean_ms"));
    let waits = cell(r, "sweep-policies.csv", &LLMFLASH, "wait_share");
    [
        Published {
            place: "PowerInfer-2, Fig. 7",
            what: "half of the FFN on flash, relative to llama.cpp",
            theirs: "24.6 on average, up to 27.8",
            here: r.csv(HALF).as_ref().and_then(times_llama).map(num),
        },
        Published {
            place: "Fig. 7",
            what: "the same, relative to LLM in a flash",
            theirs: "3.84 on average, up to 4.63",
            here: times_policy(r, "llmflash").map(num),
        },
        Published {
            place: "Table 4",
            what: "share of time waiting for I/O, Bamboo-7B",
            theirs: "13.7 %",
            here: latency("wait_share").map(percent),
        },
        Published {
            place: "Table 4",
            what: "the same, LLM in a flash",
            theirs: "76.7 %",
            here: waits.map(percent),
        },
        Published {
            place: "Table 5",
            what: "P99 / mean of token latency, Bamboo-7B",
            theirs: "1.79",
            here: tail.map(|(p99, mean)| num(p99 / mean)),
        },
    ]
}

/// Other models, prefill, memory, batches, mechanisms.
fn whole(r: &Results) -> [Published; 6] {
    let gain = |share| cell(r, "batch.csv", &[("share", share), ("texts", "4")], "gain").map(num);
    let ladder = |io, name: &str| {
        let all = cell(
            r,
            "ladder.csv",
            &[("io", io), ("policy", "full")],
            "of_first",
        )?;
        Some(format!("{} ({name})", num(all)))
    };
    let prompt = cell(r, "prefill.csv", &[("share", "0.5")], "of_resident");
    let at_half = |wanted| cell(r, "sweep-policies.csv", wanted, "tokens_per_s");
    [
        Published {
            place: "Table 6",
            what: "half in memory, relative to LLM in a flash: SiLU; Bamboo",
            theirs: "2.4; 4.6",
            here: both(
                times_flash(r, "table-6-silu.csv").map(num),
                "; ",
                times_flash(r, "table-6-relu.csv").map(num),
            ),
        },
        Published {
            place: "Fig. 8, §7.3",
            what: "prompt of 512 tokens, half on flash, relative to all in memory",
            theirs: "58 %",
            here: prompt.map(percent),
        },
        Published {
            place: "Fig. 10",
            what: "memory sweep",
            theirs: "2.13 to 11.68 tokens/s, 7 to 19 GB of a 47B model",
            here: sweep_ends(r),
        },
        Published {
            place: "Fig. 13",
            what: "four texts at once, relative to the CPU alone; here relative to one text",
            theirs: "1.28",
            here: both(gain("0.5"), " at half; in memory ", gain("1")),
        },
        Published {
            place: "Fig. 14",
            what: "all mechanisms, relative to none, UFS 4.0",
            theirs: "24",
            here: both(
                ladder("sim:ufs4", "simulated UFS 4.0"),
                ", ",
                ladder("sim:ufs31", "simulated UFS 3.1"),
            ),
        },
        Published {
            place: "LLM in a flash",
            what: "half in memory, relative to reading weights on demand: OPT-6.7B on a CPU; here `llmflash` relative to `mmap`",
            theirs: "4.8 (3182 to 669 ms)",
            here: (at_half(&LLMFLASH).zip(at_half(&MMAP)))
                .map(|(window, mapped)| num(window / mapped)),
        },
    ]
}

/// A target, and the measurement with whether it is met.
struct Target {
    what: &'static str,
    wanted: &'static str,
    measured: Option<(String, bool)>,
}

/// Our own targets; missed ones first.
pub fn targets(r: &Results) -> String {
    let mut table = Table::new(&["quantity", "target", "measured", ""]);
    let all: Vec<Target> = external(r).into_iter().chain(within(r)).collect();
    for met in [false, true] {
        for target in &all {
            if let Some((text, _)) = target.measured.as_ref().filter(|m| m.1 == met) {
                let verdict = if met { "met" } else { "**missed**" };
                table.row(&[target.what, target.wanted, text, verdict]);
            }
        }
    }
    let unknown = all.iter().filter(|target| target.measured.is_none());
    let unknown: Vec<&str> = unknown.map(|target| target.what).collect();
    table.end() + &not_measured(&unknown)
}

/// Targets relative to other programs and to memory speed.
fn external(r: &Results) -> [Target; 6] {
    let times = |x: Option<f64>, least: f64| x.map(|x| (format!("{x:.2}"), x >= least));
    let share = |x: Option<f64>, least: f64| x.map(|x| (percent(x), x >= least));
    let llama = |file| r.csv(file).as_ref().and_then(times_llama);
    let bound = cell(r, "sweep.csv", &[("share", "1")], "of_bound");
    [
        Target {
            what: "half of the FFN in memory, relative to llama.cpp's best under the same limit",
            wanted: "25",
            measured: times(llama(HALF), 25.0),
        },
        Target {
            what: "a quarter of the FFN in memory, the same",
            wanted: "15",
            measured: times(llama("offload-25.csv"), 15.0),
        },
        Target {
            what: "half, relative to our LLM in a flash (`llmflash`)",
            wanted: "5",
            measured: times(times_policy(r, "llmflash"), 5.0),
        },
        Target {
            what: "all in memory, relative to the bound",
            wanted: "at most 1.25",
            measured: bound.map(|x| (format!("{x:.2}"), x <= 1.25)),
        },
        Target {
            what: "`dense` decode, of memory bandwidth",
            wanted: "85 %",
            measured: share(first(r, "decode-dense.csv", "roofline"), 0.85),
        },
        Target {
            what: "`exact`: the sparse FFN, of memory bandwidth",
            wanted: "70 %",
            measured: share(first(r, "decode-exact.csv", "ffn_roofline"), 0.70),
        },
    ]
}

/// Targets for shares of our own time, budgets and plans.
fn within(r: &Results) -> [Target; 5] {
    let at_most = |x: f64| (percent(x), x <= 0.10);
    let decode = |column| first(r, "decode-predicted.csv", column);
    let naming = decode("predict_ms").zip(decode("ffn_ms"));
    let steady = |column| first(r, "latency-steady.csv", column);
    let enough = steady("hit_rate").is_some_and(|hits| hits >= 0.95);
    let sweep = r.csv("sweep.csv");
    let peaks = sweep.as_ref().map(|csv| {
        let good =
            (csv.rows()).filter(|row| row.or_zero("peak_rss_bytes") <= row.or_zero("budget_bytes"));
        let (good, all) = (good.count(), csv.rows().count());
        (format!("{good} of {all}"), good == all)
    });
    let rises = sweep.as_ref().map(|csv| {
        let speeds: Vec<f64> = csv.rows().map(|row| row.or_zero("tokens_per_s")).collect();
        let rises = speeds.is_sorted();
        (if rises { "yes" } else { "no" }.to_owned(), rises)
    });
    let plans = r.csv("plan.csv").map(|csv| {
        let (good, all) = within_a_fifth(&csv);
        (format!("{good} of {all}"), good == all)
    });
    [
        Target {
            what: "predictors, share of FFN time, all in memory",
            wanted: "at most 10 %",
            measured: (naming.filter(|(naming, _)| *naming > 0.0))
                .map(|(naming, ffn)| at_most(naming / ffn)),
        },
        Target {
            what: "waiting at a hit rate of 95 % or more (the steady model)",
            wanted: "at most 10 %",
            measured: steady("wait_share").filter(|_| enough).map(at_most),
        },
        Target {
            what: "points of the sweep with the peak within the budget",
            wanted: "all",
            measured: peaks,
        },
        Target {
            what: "more memory is never slower in the sweep",
            wanted: "yes",
            measured: rises,
        },
        Target {
            what: "forecasts within 20 %",
            wanted: "all rows",
            measured: plans,
        },
    ]
}
