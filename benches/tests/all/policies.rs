//! The ablation's policies, as a user runs them: different speed, same output.

use std::ops::ControlFlow;

use crate::common::{call, json};
use emberflow::cli::ModelArg;
use emberflow::model::open_model;
use emberflow_engine::{Ablation, Budget, Engine, Lab, Options, Request, Sampling};
use emberflow_storage::io::{Faults, IoChoice, Profile, SimClock, SimOptions};
use serde_json::Value;

const POLICIES: [&str; 8] = [
    "full",
    "no-pipeline",
    "no-cache",
    "no-bundle",
    "baseline",
    "bundle-only",
    "llmflash",
    "mmap",
];

fn run(policy: &str, share: &str, io: &str) -> Value {
    let report = json(&[
        "run",
        "-p",
        "A vector is",
        "-n",
        "12",
        "--ignore-eos",
        "--json",
        "--threads",
        "2",
        "--ablation",
        policy,
        "--ffn-resident",
        share,
        "--io",
        io,
    ]);
    assert_eq!(report["policy"], policy);
    report
}

#[test]
fn no_policy_changes_a_bit() {
    let first = run("full", "1.0", "auto");
    for policy in POLICIES {
        for (share, io) in [("0.45", "auto"), ("0.7", "pread"), ("0.7", "sim:ufs4")] {
            let report = run(policy, share, io);
            assert_eq!(
                report["logits_hash"], first["logits_hash"],
                "{policy} {share} {io}"
            );
            assert_eq!(report["tokens"], first["tokens"]);
        }
    }
}

/// Tokens and hash of a run on a device that is sometimes late and completes out of order.
fn delayed(policy: Ablation, faults: Faults, seed: u64) -> (Vec<u32>, u64, f64) {
    let mut device = SimOptions::new(Profile::Ufs31, seed);
    device.faults = faults;
    device.clock = SimClock::Real;
    let options = Options {
        budget: Budget::FfnShare(0.5),
        threads: 2,
        context: 32,
        lab: Lab {
            ablation: policy,
            io: IoChoice::Sim(device),
            ..Lab::default()
        },
        ..Options::default()
    };
    let model = open_model(&ModelArg { model: None }).unwrap();
    let mut engine = Engine::open(model, options).unwrap();
    let prompt = engine.text().encode("A vector is").unwrap();
    let request = Request {
        max_tokens: 6,
        sampling: Sampling::default(),
        ignore_eos: true,
        ..Request::default()
    };
    let mut sequence = engine.new_sequence().unwrap();
    let go_on = &mut |_| ControlFlow::Continue(());
    let generation = engine
        .generate(&mut sequence, &prompt, &request, go_on)
        .unwrap();
    let waited = generation.counters.wait_ns as f64 / 1e6;
    (generation.tokens, generation.logits_hash, waited)
}

#[test]
fn delays_of_the_device_change_no_bit() {
    // Reads every needed neuron individually.
    let reads = Ablation::NoCache;
    let prompt = delayed(reads, Faults::default(), 0);
    let late = Faults {
        delay: 300,
        shuffle: true,
        ..Faults::default()
    };
    for (seed, policy) in Ablation::ALL.into_iter().enumerate() {
        let run = delayed(policy, late, seed as u64);
        assert_eq!((&run.0, run.1), (&prompt.0, prompt.1), "{}", policy.name());
        if policy == reads {
            assert!(run.2 > 0.0, "it waited for no read");
        }
    }
}

#[test]
fn each_does_without_what_it_is_named_for() {
    let of = |policy: &str| {
        let report = run(policy, "0.7", "auto");
        let number = |a: &str, b: &str| report[a][b].as_f64().unwrap();
        (
            number("cache", "cold_hit_rate"),
            number("io", "reads"),
            number("io", "wait_ms"),
            number("io", "bytes_read"),
        )
    };
    // `full` may read whole clusters instead of neurons.
    let [cached, llmflash, nothing] = ["no-pipeline", "llmflash", "no-cache"].map(of);
    assert!(
        cached.0 > llmflash.0 && llmflash.0 > 0.0,
        "{cached:?} {llmflash:?}"
    );
    assert_eq!(nothing.0, 0.0);
    assert!(nothing.3 > 1.5 * cached.3, "{nothing:?} {cached:?}");
    // two reads instead of one bundle read
    assert!(of("baseline").1 > 1.5 * of("bundle-only").1);
    // no reads in the end except those of the initial fill
    assert_eq!(of("mmap").2, 0.0);
}

/// Policies are compared at equal memory and thus at equal bytes, except policies that cache
/// nothing.
///
/// The memory of a process before it divides the budget varies by half a MiB between starts (the
/// system maps pages of the program in groups), so each policy is run three times.
#[test]
fn policies_that_keep_neurons_hold_as_many_bytes() {
    let held = |policy: &str| {
        let args = ["run", "-p", "A vector is", "-n", "24", "--ignore-eos"];
        let more = ["--memory", "35MiB", "--json", "--ablation", policy];
        let runs = [(); 3].map(|()| json(&[&args[..], &more].concat())["memory"].clone());
        let mean = |keys: &[&str]| {
            let numbers = runs
                .iter()
                .flat_map(|run| keys.iter().map(|key| run[*key].as_f64()));
            numbers.map(Option::unwrap).sum::<f64>() / runs.len() as f64
        };
        (mean(&["gates", "hot", "cold"]), mean(&["peak_rss_bytes"]))
    };
    let full = held("full");
    for policy in ["no-pipeline", "no-bundle", "llmflash"] {
        let other = held(policy);
        // `full` may read whole clusters, whose buffers are part of the same budget.
        let (ffn, peak) = (other.0 / full.0, other.1 / full.1);
        assert!((0.9..1.2).contains(&ffn), "{policy}: {other:?} {full:?}");
        assert!((0.9..1.1).contains(&peak), "{policy}: {other:?} {full:?}");
    }
}

#[test]
fn decoding_is_measured_beside_its_bounds() {
    let args = [
        "decode",
        "-n",
        "4",
        "--contexts",
        "0,64",
        "--threads",
        "2",
        "--json",
    ];
    let report = json(&args);
    assert!(report["memory_gb_per_s"].as_f64() > Some(0.0));
    let contexts = report["contexts"].as_array().unwrap();
    assert_eq!(contexts.len(), 2);
    for c in contexts {
        let part = |name: &str| c[name].as_f64().unwrap();
        let parts = part("attention_ms") + part("ffn_ms") + part("head_ms");
        assert!(parts > 0.0 && part("roofline") > 0.0 && part("ffn_roofline") > 0.0);
    }
    // keys and values of 64 more positions
    let bytes = |i: usize| contexts[i]["bytes_per_token"].as_u64().unwrap();
    assert!(bytes(1) > bytes(0));
    let oracle = json(&[&args[..], &["--oracle"]].concat());
    assert_eq!(oracle["sparsity"], "oracle");
    let active = |r: &Value| r["contexts"][0]["active_share"].as_f64().unwrap();
    assert_eq!(active(&oracle), active(&report));
    let dense = call(&[&args[..], &["--oracle", "--sparsity", "dense"]].concat());
    assert_eq!(dense.status.code(), Some(2));
    let needed = |r: &Value| r["contexts"][0]["bytes_per_token"].as_u64().unwrap();
    assert!(needed(&oracle) < needed(&report));
}
