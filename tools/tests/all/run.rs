//! `emberflow run` on the bundled model, as a user runs it.

use crate::common;
use std::process::Stdio;

use crate::common::{call, json, smallest_budget};

const PROMPT: &str = "A vector is a contiguous";

fn generate(extra: &[&str]) -> serde_json::Value {
    let mut args = vec!["point", "-p", PROMPT, "-n", "24", "--ignore-eos", "--json"];
    args.extend(extra);
    json(&args)
}

#[test]
fn most_of_the_ffn_can_stay_on_disk() {
    let output = call(&["run", "--ffn-resident", "0.45", "-n", "32"]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.len() > 60, "no text: {text:?}");
    let summary = String::from_utf8(output.stderr).unwrap();
    for part in [
        "tok/s",
        "ms/token",
        "read/token",
        "cache hits",
        "resident",
        "peak",
        "logits",
    ] {
        assert!(summary.contains(part), "summary lacks {part}: {summary}");
    }
    // energy and deviations from disk and machine profiles are optional
    let lines: Vec<&str> = summary.trim().lines().collect();
    assert!((6..=9).contains(&lines.len()), "{summary}");
    for line in &lines {
        assert!(line.chars().count() <= 110, "{line}");
        let (what, text) = line.split_at(10);
        let aligned = what.ends_with(' ') && !text.starts_with(' ');
        assert!(aligned, "{line}");
    }
    let report = generate(&["--ffn-resident", "0.45"]);
    let hash = format!(
        "logits {}",
        json(&["run", "-n", "32", "--json"])["logits_hash"]
            .as_str()
            .unwrap()
    );
    assert!(lines.last().unwrap().ends_with(&hash), "{summary}");
    let resident = report["memory"]["ffn_resident_share"].as_f64().unwrap();
    assert!((0.4..=0.451).contains(&resident), "{resident}");
    assert!(
        report["io"]["bytes_read"].as_u64().unwrap() > 0,
        "nothing was read"
    );
}

/// A text ended by the model was not truncated: summary and JSON distinguish the two.
#[test]
fn the_end_of_a_text_is_told() {
    let text = |seed: &str, more: &[&str]| {
        let common = ["run", "-p", "A vector is", "-n", "200", "--temp", "1"];
        call(&[&common[..], &["--seed", seed], more].concat())
    };
    let seeds: Vec<String> = (0..32).map(|seed: u32| seed.to_string()).collect();
    let mut told = [false; 2];
    for seed in &seeds {
        let report: serde_json::Value =
            serde_json::from_slice(&text(seed, &["--json"]).stdout).unwrap();
        let ended = report["stop"] == "eos";
        assert!(ended || report["stop"] == "length", "{}", report["stop"]);
        if told == [true; 2] {
            break;
        }
        if std::mem::replace(&mut told[usize::from(ended)], true) {
            continue;
        }
        let said = String::from_utf8(text(seed, &[]).stderr).unwrap();
        let tokens = &report["generated_tokens"];
        let line = format!("(EOS) after {tokens} of 200 tokens; --ignore-eos");
        assert_eq!(said.contains(&line), ended, "{said}");
        if ended {
            let on = text(seed, &["--ignore-eos"]);
            assert!(!String::from_utf8_lossy(&on.stderr).contains("(EOS)"));
        }
    }
    assert_eq!(told, [true; 2], "no seed ends its text, or all do");
}

/// Regression: "use --context for more" was also printed at the model's maximum.
#[test]
fn a_full_context_says_what_helps() {
    let long = "fn main() { let x = vec![1, 2, 3]; } ".repeat(400);
    let run = |prompt: &str, more: &[&str]| {
        let args = ["run", "-p", prompt, "--ignore-eos", "-n", "4000"];
        let output = call(&[&args[..], more].concat());
        String::from_utf8(output.stderr).unwrap()
    };
    let short = run("A vector is", &["--context", "16"]);
    assert!(
        short.contains("of 16 tokens is full; use --context for more, up to"),
        "{short}"
    );
    let most = run("A vector is", &[]);
    assert!(most.contains("which is the model's maximum"), "{most}");
    assert!(!most.contains("--context"), "{most}");
    let refused = run(&long, &[]);
    assert!(
        refused.contains("shorten the prompt") && !refused.contains("--context"),
        "{refused}"
    );
}

/// Regression: more memory than the machine has was accepted.
#[test]
fn a_budget_that_nobody_has_is_refused_unless_forced() {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");
    let more = ["--memory", "99999GiB"];
    for args in [
        &["run", "-n", "2", "--json"][..],
        &["perplexity", "-f", text, "--limit", "64", "--json"],
    ] {
        let refused = call(&[args, &more].concat());
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains("97.7 TiB is more than the"), "{message}");
        let forced = call(&[args, &more, &["--force"]].concat());
        let message = String::from_utf8_lossy(&forced.stderr).into_owned();
        assert!(forced.status.success(), "{args:?}: {message}");
        assert!(message.contains("97.7 TiB is more than the"), "{message}");
    }
}

/// Regression: a budget above its control group's limit, by either option, thrashed silently. Needs
/// permission to create a group.
#[test]
fn a_budget_that_the_control_group_does_not_concede_is_refused() {
    let Some(group) = common::Group::of(16 << 20) else {
        eprintln!("no control group can be made here: nothing was tested");
        return;
    };
    let run = |args: &[&str]| {
        let mut command = group.command();
        let common = ["run", "-p", "A vector is", "-n", "2", "--json"];
        let output = command.args(common).args(args).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), message)
    };
    let (code, message) = run(&["--memory", "40MiB"]);
    assert_eq!(code, Some(2), "{message}");
    assert!(
        message.contains("--memory 40.0 MiB is more than the 16.0 MiB limit"),
        "{message}"
    );
    let (code, message) = run(&["--ffn-resident", "1"]);
    assert_eq!(code, Some(2), "{message}");
    for part in ["--ffn-resident 1 needs ", "control group", "--force"] {
        assert!(message.contains(part), "{message}");
    }
}

/// Regression: a fixed reserve of 128 MiB left nothing of a small group, so that none of the FFN was resident. Needs
/// permission to create a group.
#[test]
fn auto_holds_what_fits_in_a_small_control_group() {
    let Some(group) = common::Group::of(64 << 20) else {
        eprintln!("no control group can be made here: nothing was tested");
        return;
    };
    let output = group
        .command()
        .args(["run", "-n", "4", "--json"])
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{message}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["memory"]["ffn_resident_share"], 1.0, "{report}");
}

/// Caches fill in the first half of a text; for a long one the speed of the second half is shown
/// too.
#[test]
fn the_second_half_of_a_long_text_is_shown() {
    let summary = |n: &str| {
        let args = ["run", "-n", n, "--ignore-eos", "--ffn-resident", "0.5"];
        String::from_utf8(call(&args).stderr).unwrap()
    };
    let (short, long) = (summary("30"), summary("32"));
    assert!(!short.contains(" in the last "), "{short}");
    assert!(long.contains(" in the last 16; "), "{long}");
    let all = String::from_utf8(call(&["run", "-n", "4"]).stderr).unwrap();
    assert!(all.contains("flash     nothing read\n"), "{all}");
}

/// `-v` speaks to people.
#[test]
fn what_was_chosen_is_told_in_words() {
    let output = call(&["run", "-v", "-n", "2", "--ffn-resident", "0.5"]);
    let said = String::from_utf8(output.stderr).unwrap();
    for part in [
        "memory: ",
        "FFN: 50 % in memory",
        "reads: ",
        "computing: ",
        "rests on: ",
    ] {
        assert!(said.contains(part), "no {part:?}: {said}");
    }
    let lines = said.lines().filter(|l| l.contains("INFO"));
    for line in lines {
        assert!(!line.contains('{') && line.len() < 250, "{line}");
    }
}

#[test]
fn the_report_has_every_key_of_the_contract() {
    let report = generate(&[]);
    for key in [
        "model",
        "text",
        "tokens",
        "prompt_tokens",
        "generated_tokens",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "ttft_ms",
        "latency_ms",
        "memory",
        "io",
        "cache",
        "sparsity",
        "logits_hash",
        "threads",
        "policy",
    ] {
        assert!(report.get(key).is_some(), "no {key}: {report}");
    }
    let groups: [(&str, &[&str]); 5] = [
        ("latency_ms", &["mean", "p50", "p90", "p99"]),
        (
            "memory",
            &[
                "budget_bytes",
                "peak_rss_bytes",
                "fixed",
                "embedding",
                "layer_inputs",
                "ngrams",
                "hot",
                "cold",
                "kv",
                "predictor",
                "scratch",
            ],
        ),
        (
            "io",
            &["engine", "bytes_read", "reads", "wait_ms", "wait_share"],
        ),
        (
            "cache",
            &["hit_rate", "hot_hit_rate", "cold_hit_rate", "evictions"],
        ),
        ("sparsity", &["mode", "active_share", "predictor_recall"]),
    ];
    for (group, keys) in groups {
        for key in keys {
            assert!(report[group].get(key).is_some(), "no {group}.{key}");
        }
    }
    assert_eq!(report["generated_tokens"], 24);
}

/// Peak RSS stays within the budget from the smallest one up, and the text and every logit are the
/// same for every budget, mode, thread count and I/O engine.
#[test]
fn the_budget_is_kept_and_changes_nothing_but_speed() {
    let expected = generate(&["--sparsity", "dense", "--threads", "1"]);
    let full = expected["memory"]["budget_bytes"].as_u64().unwrap() >> 20;
    let variants = [
        ["exact", "2", "auto"],
        ["dense", "1", "pread"],
        ["exact", "4", "sim:ufs4"],
        ["dense", "16", "uring"],
    ];
    for [sparsity, threads, io] in variants {
        let variant = ["--sparsity", sparsity, "--threads", threads, "--io", io];
        let plain = ["point", "-p", PROMPT, "-n", "24"];
        let smallest = smallest_budget(&[&plain[..], &variant].concat());
        assert!(
            full >= smallest + 2,
            "{variant:?}: {smallest} of {full} MiB"
        );
        for step in 0..5 {
            let mib = smallest + step * (full - smallest) / 4;
            let memory = format!("{mib}MiB");
            let mut args = [&variant[..], &["--memory", &memory]].concat();
            if step % 2 == 1 {
                args.push("--lock");
            }
            let report = generate(&args);
            let peak = report["memory"]["peak_rss_bytes"].as_u64().unwrap();
            assert!(peak <= mib << 20, "{args:?}: peak {peak} above {mib} MiB");
            let share = report["memory"]["ffn_resident_share"].as_f64().unwrap();
            let read = report["io"]["bytes_read"].as_u64().unwrap();
            assert!(
                step > 0 || (share < 0.5 && read > 0),
                "{args:?}: {share}, {read}"
            );
            for key in ["logits_hash", "text", "tokens"] {
                assert_eq!(report[key], expected[key], "{args:?}: {key} differs");
            }
        }
    }
}

/// A long prompt and a long text stay within the budget too.
#[test]
fn long_inputs_are_in_the_budget() {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");
    let args = [
        "perplexity",
        "-f",
        text,
        "--window",
        "64",
        "--limit",
        "600",
        "--json",
    ];
    let memory = format!("{}MiB", smallest_budget(&args));
    let report = json(&[&args[..], &["--memory", &memory]].concat());
    let peak = report["peak_rss_bytes"].as_u64().unwrap();
    let budget = report["budget_bytes"].as_u64().unwrap();
    assert!(peak <= budget, "perplexity: {peak} of {budget}");

    let prompt = "fn main() { let x = vec![1, 2, 3]; } ".repeat(40);
    let run = ["run", "-p", &prompt, "-n", "16", "--json"];
    let memory = format!("{}MiB", smallest_budget(&run));
    let report = json(&[&run[..], &["--memory", &memory]].concat());
    let peak = report["memory"]["peak_rss_bytes"].as_u64().unwrap();
    let budget = report["memory"]["budget_bytes"].as_u64().unwrap();
    assert!(peak <= budget, "long prompt: {peak} of {budget}");
}

#[test]
fn every_instruction_set_gives_the_same_logits() {
    let best = generate(&[]);
    let mut compared = 0;
    let all = [
        "scalar",
        "avx2",
        "avx2-vnni",
        "avx512",
        "avx512-vnni",
        "neon",
        "neon-dotprod",
        "neon-i8mm",
    ];
    for isa in all {
        let output = common::emberflow()
            .env("EMBERFLOW_ISA", isa)
            .args(["run", "-p", PROMPT, "-n", "24", "--ignore-eos", "--json"])
            .output()
            .unwrap();
        if output.status.code() == Some(2) {
            eprintln!("SKIPPED: this machine has no {isa}");
            continue;
        }
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        compared += 1;
        assert_eq!(report["isa"], isa);
        assert_eq!(report["logits_hash"], best["logits_hash"], "{isa}");
    }
    assert!(compared > 0);
}

#[test]
fn sampling_is_seeded() {
    let draw = |seed: &str| generate(&["--temp", "1", "--top-p", "0.95", "--seed", seed]);
    let (a, b, c) = (draw("1"), draw("1"), draw("2"));
    assert_eq!(a["text"], b["text"]);
    assert_ne!(a["text"], c["text"]);
}

const RELU_FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/models/relu");
const EXPORTED: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/never-written.gguf");
const RELU_GGUF: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../tests/fixtures/models/relu/model.gguf"
);

/// A checkpoint runs without packing, and other commands read it as well.
#[test]
fn a_checkpoint_runs_unpacked() {
    for model in [RELU_FOLDER, RELU_GGUF] {
        let run = |threads: &str| {
            let done = json(&[
                "run",
                model,
                "-p",
                "a b",
                "-n",
                "4",
                "--threads",
                threads,
                "--json",
            ]);
            assert_eq!(done["memory"]["ffn_resident_share"], 1.0, "{done}");
            assert_eq!(done["sparsity"]["active_share"], 1.0, "{done}");
            done["logits_hash"].clone()
        };
        assert_eq!(run("1"), run("2"));
        let seen = json(&["inspect", model, "--tensors", "--json"]);
        assert!(seen["bundle"].is_null(), "{seen}");
        let tensors = seen["tensors"].as_array().unwrap();
        assert!(
            tensors.iter().any(|of| of["name"] == "layers.0.ffn.0.down"),
            "{seen}"
        );
        let verified = json(&["verify", model, "--json"]);
        assert_eq!(verified["checksums"], false, "{verified}");
        let plan = json(&["plan", model, "--json"]);
        assert!(plan["model"].is_string(), "{plan}");
        let small = call(&["run", model, "-p", "a", "--memory", "1MiB"]);
        assert_eq!(small.status.code(), Some(1));
    }
}

#[test]
fn wrong_use_is_refused_with_what_to_do() {
    let cases: [(&[&str], i32, &str); 11] = [
        (&["run", "--temp=-1", "-p", "a"], 2, "temperature"),
        (&["run", "--memory", "2cats"], 2, "unknown unit"),
        (
            &["run", "/nowhere/model.ember", "-p", "a"],
            1,
            "/nowhere/model.ember",
        ),
        (&["run", "--kv", "telepathy"], 2, "telepathy"),
        (&["run", "--context", "999999"], 1, "context"),
        (&["run", "--sparsity", "exakt"], 2, "exact"),
        (&["runn"], 2, "run"),
        (
            &["run", RELU_FOLDER, "-p", "a", "--sparsity", "exact"],
            1,
            "emberflow pack",
        ),
        (
            &["run", RELU_GGUF, "-p", "a", "--device", "cpu"],
            1,
            "emberflow pack",
        ),
        (&["export", RELU_GGUF, "-o", EXPORTED], 1, "emberflow pack"),
        (
            &["run", "-p", "a", "-n", "4", "--context", "1"],
            1,
            "tokens are needed",
        ),
    ];
    for (args, code, part) in cases {
        let output = call(args);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
        assert!(message.contains(part), "{args:?}: {message}");
    }
}

#[test]
fn an_instruction_set_that_is_not_there_is_refused() {
    let args = ["run", "-p", PROMPT, "-n", "2"];
    let output = common::emberflow()
        .args(args)
        .env("EMBERFLOW_ISA", "bogus")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        message.contains("bogus") && message.contains("scalar"),
        "{message}"
    );
}

/// A chat with these messages: its answers and its messages on standard error.
fn chat(extra: &[&str], input: &str) -> (String, String) {
    use std::io::Write;
    let mut child = common::emberflow()
        .args(["run", "--chat"])
        .args(extra)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = child.stdin.take().unwrap();
    pipe.write_all(input.as_bytes()).unwrap();
    drop(pipe);
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    (String::from_utf8(output.stdout).unwrap(), told)
}

#[test]
fn chat_uses_the_template_and_ends_with_its_input() {
    let input = "What is a vector?\nAnd a slice?\n";
    let (answers, _) = chat(&["--json", "-n", "8"], input);
    assert_eq!(answers.lines().count(), 2, "{answers}");
}

/// Regression: answers were truncated after 128 tokens without a message, and followed by five
/// lines of statistics.
#[test]
fn an_answer_goes_on_to_its_end_or_says_why_not() {
    let report = |extra: &[&str]| -> serde_json::Value {
        let all = [&["--json", "--ignore-eos"], extra].concat();
        serde_json::from_str(&chat(&all, "What is a vector?\n").0).unwrap()
    };
    let whole = report(&["--context", "200"]);
    assert_eq!(whole["stop"], "context");
    assert!(whole["generated_tokens"].as_u64() > Some(128), "{whole}");
    assert_eq!(report(&["-n", "4"])["stop"], "length");
    let (_, told) = chat(&["-n", "4"], "What is a vector?\n");
    assert!(told.contains("cut after 4 tokens by -n"), "{told}");
    // statistics only on request
    assert!(
        !told.contains("tokens/s") && !told.contains("(4 tokens, ") && !told.contains("kernels"),
        "{told}"
    );
    let (_, told) = chat(&["-n", "4", "-v"], "What is a vector?\n");
    assert!(
        told.contains("kernels") && !told.contains("(4 tokens, "),
        "{told}"
    );
    // the oldest exchange is dropped for an answer
    let many = "What is a vector?\n".repeat(6);
    let (_, told) = chat(&["-n", "8", "--context", "64"], &many);
    assert!(told.contains("the oldest exchanges are dropped"), "{told}");
}

/// `-n -1` continues to the end of the text or of the context.
#[test]
fn minus_one_is_no_length() {
    let args = ["run", "-p", PROMPT, "--json", "--ignore-eos", "-n"];
    let run = |more: &[&str]| json(&[&args[..], more].concat());
    let full = run(&["-1", "--context", "160"]);
    assert_eq!(full["stop"], "context", "{full}");
    let prompt = full["prompt_tokens"].as_u64().unwrap();
    // the last token needs no position
    assert_eq!(full["generated_tokens"], 160 - prompt + 1);
}

/// The bundled model recommends temperature 0.7 and top-p 0.9.
#[test]
fn the_sampling_in_use_is_told() {
    let sampling = |extra: &[&str]| generate(extra)["sampling"].clone();
    let recommended = serde_json::json!({
        "temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0,
        "xtc_probability": 0.0, "xtc_threshold": 0.1, "repetition_penalty": 1.0, "penalty_window": 64,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 0, "from": "recommended",
    });
    assert_eq!(sampling(&[]), recommended);
    let mut chosen = recommended;
    for (key, value) in [
        ("temperature", 0.5.into()),
        ("top_k", 40.into()),
        ("seed", 7.into()),
        ("from", serde_json::json!("chosen")),
    ] {
        chosen[key] = value;
    }
    let extra = ["--temp", "0.5", "--top-k", "40", "--seed", "7"];
    assert_eq!(sampling(&extra), chosen);
    let told = |extra: &[&str]| {
        let output = call(&[&["run", "-n", "2"], extra].concat());
        String::from_utf8(output.stderr).unwrap()
    };
    for (extra, wanted) in [
        (
            &[][..],
            "sampling  temperature 0.7, top-p 0.9, seed 0 (as the checkpoint recommends)",
        ),
        (&["--temp", "0"], "sampling  greedy (as chosen)"),
        (
            &["--temp", "0.5", "--min-p", "0.25"],
            "sampling  temperature 0.5, top-p 0.9, min-p 0.25, seed 0 (as chosen)",
        ),
    ] {
        let told = told(extra);
        assert!(told.contains(wanted), "{told}");
    }
}

/// The bundled model's chat template does not support system messages.
#[test]
fn a_system_message_without_effect_is_told() {
    let (_, told) = chat(&["-n", "2", "--system", "Be short."], "What is a vector?\n");
    assert!(told.contains("--system has no effect"), "{told}");
    let (_, told) = chat(&["-n", "2"], "What is a vector?\n");
    assert!(!told.contains("--system"), "{told}");
}

/// What is no model is called by what it is, with what to do.
#[test]
fn files_that_are_no_models_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let other = [b"\x7fELF\x02\x01\0".as_slice(), &[0; 8192]].concat();
    for (bytes, wanted) in [
        (b"".as_slice(), "it is empty"),
        (b"What is a vector?", "-f takes as the prompt"),
        (b"\n<!DOCTYPE html><title>", "a web page"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "git lfs pull",
        ),
        (&other, "neither GGUF files nor packed models"),
    ] {
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, bytes).unwrap();
        let refused = call(&["run", path.to_str().unwrap()]);
        assert_eq!(refused.status.code(), Some(1));
        let message = String::from_utf8_lossy(&refused.stderr);
        assert!(
            message.contains(wanted) && message.contains("a model is a GGUF file"),
            "{message}"
        );
    }
    let folder = call(&["run", dir.path().to_str().unwrap()]);
    let message = String::from_utf8_lossy(&folder.stderr);
    assert!(message.contains("without a config.json"), "{message}");
}
