//! Without activation statistics, the first tokens of a run correct what the plan assumes about neurons.

use std::ops::ControlFlow;

use emberflow::export::export;
use emberflow_engine::{Budget, Lab, Options, Request, demo_container};
use emberflow_kernels::DType;
use emberflow_models::demo::Demo;
use emberflow_storage::io::{IoChoice, Profile, SimOptions};
use emberflow_tests::{open, packed, roomy};

const PROMPT: usize = 16;
const TOKENS: usize = 56;

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
    let run = |budget| {
        let mut engine = open(
            &container,
            Options {
                budget,
                lab: Lab {
                    io: IoChoice::Sim(SimOptions::new(Profile::Nvme, 7)),
                    profiles: false,
                    ..Lab::default()
                },
                ..roomy(PROMPT + TOKENS)
            },
        );
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
        (all.logits_hash, before, engine.plan().unwrap(), counts)
    };
    let (expected, ..) = run(Budget::Bytes(1 << 40));
    for share in [0.3, 0.6] {
        let (hash, before, after, counts) = run(Budget::FfnShare(share));
        assert_eq!(hash, expected, "{share}");
        assert_eq!(before.memory.budget(), after.memory.budget());
        // A fifth is assumed to fire.
        let fired = counts.fired as f64 / counts.possible as f64;
        assert!((0.1..0.19).contains(&fired), "{fired}");
        let [assumed, corrected] = [before, after].map(|plan| plan.decode.bytes_read);
        let read = counts.bytes_read as f64 / (PROMPT + TOKENS) as f64;
        let [before, after] = [assumed, corrected].map(|bytes| (bytes - read).abs());
        assert!(
            after < before,
            "{share}: {assumed} to {corrected}, {read} read"
        );
    }
}
