//! Without activation statistics, the first tokens of a run correct what the plan assumes about neurons.

use std::ops::ControlFlow;

use emberflow::export::export;
use emberflow_engine::{Lab, Options, Request, demo_container};
use emberflow_kernels::DType;
use emberflow_models::demo::Demo;
use emberflow_storage::io::{IoChoice, Profile, SimOptions};
use emberflow_tests::{give, open, packed, roomy};

const PROMPT: usize = 16;
const TOKENS: usize = 56;
/// Tokens after those used for correction.
const LATER: usize = 24;

#[test]
fn first_tokens_correct_the_forecast_and_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("demo");
    export(
        &demo_container(Demo::Dense).unwrap(),
        &folder,
        &mut |_, _| {},
    )
    .unwrap();
    // Packed without statistics.
    let container = packed(&folder, dir.path(), DType::F32);
    // `None`: all in memory, independent of other tests' effect on the process's peak.
    let run = |share: Option<f64>| {
        let mut engine = open(
            &container,
            Options {
                lab: Lab {
                    io: IoChoice::Sim(SimOptions::new(Profile::Nvme, 7)),
                    profiles: false,
                    ..Lab::default()
                },
                ..roomy(PROMPT + TOKENS + LATER)
            },
        );
        if let Some(share) = share {
            give(&mut engine, share);
        }
        let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| 7 * i + 1).collect();
        let request = Request {
            max_tokens: TOKENS,
            ignore_eos: true,
            ..Request::default()
        };
        let before = engine.plan().unwrap();
        let mut sequence = engine.new_sequence().unwrap();
        let seen = engine.counters();
        let mut on = |_| ControlFlow::Continue(());
        let all = engine
            .generate(&mut sequence, &prompt, &request, &mut on)
            .unwrap();
        let counts = engine.counters().since(seen);
        let after = engine.plan().unwrap();
        let seen = engine.counters();
        let request = Request {
            max_tokens: LATER,
            ..request
        };
        let last = &all.tokens[all.tokens.len() - 1..];
        engine
            .generate(&mut sequence, last, &request, &mut on)
            .unwrap();
        let read = engine.counters().since(seen).bytes_read as f64 / LATER as f64;
        (all.logits_hash, [before, after], counts, read)
    };
    let (expected, ..) = run(None);
    for share in [0.3, 0.5] {
        let (hash, [before, after], counts, read) = run(Some(share));
        assert_eq!(hash, expected, "{share}");
        assert_eq!(before.memory.budget(), after.memory.budget());
        // A fifth is assumed to fire.
        let fired = counts.fired as f64 / counts.possible as f64;
        assert!((0.1..0.19).contains(&fired), "{fired}");
        let [assumed, corrected] = [before, after].map(|plan| plan.decode.bytes_read);
        println!("{share}: {assumed} to {corrected}, {read} read");
        let off = |forecast: f64| (forecast / read - 1.0).abs();
        assert!(assumed != corrected && off(corrected) < 0.35, "{share}");
        // If little is read, most reads are misses of the cold region.
        assert!(share < 0.5 || off(corrected) < off(assumed), "{share}");
    }
}
