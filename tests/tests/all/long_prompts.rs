//! While a long prompt is computed, its chunks take memory from the cache; afterwards the cache gets
//! it back. `shrink.rs` checks the budget.

use std::ops::ControlFlow;

use emberflow::cli::ModelArg;
use emberflow::model::open_model;
use emberflow_devices::device_report;
use emberflow_engine::{
    Admission, Budget, Engine, Event, Finished, Lab, Options, Request, RequestId, Stepped, Stepper,
};
use emberflow_storage::io::{IoChoice, Profile, SimOptions};
use emberflow_tests::devices::{Fault, Faulty, devices, lane_of, never, plain_devices};

const PROMPT: usize = 500;

/// A budget with little memory for neurons, on a disk that is slow compared with the processor.
fn options() -> Options {
    Options {
        threads: 2,
        context: PROMPT + 64,
        budget: Budget::FfnShare(0.3),
        lab: Lab {
            io: IoChoice::Sim(SimOptions::new(Profile::Emmc, 7)),
            profiles: false,
            ..Lab::default()
        },
        ..Options::default()
    }
}

fn open(options: Options) -> Engine {
    // no budget is below the process's peak, which other tests raise here: reset it
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    let model = open_model(&ModelArg { model: None }).expect("the bundled model");
    Engine::open(model, options).expect("open")
}

fn prompt(engine: &Engine, tokens: usize) -> Vec<u32> {
    let text = include_str!("../../../models/demo/heldout.txt");
    let all = engine.text().encode(&text[..8 * tokens]).expect("encode");
    all[..tokens].to_vec()
}

fn request() -> Request {
    Request {
        max_tokens: 12,
        ignore_eos: true,
        ..Request::default()
    }
}

/// Tokens and the hash of their logits.
fn generate(engine: &mut Engine, prompt: &[u32]) -> (Vec<u32>, u64) {
    let mut sequence = engine.new_sequence().expect("a sequence");
    let mut on = |_| ControlFlow::Continue(());
    let all = engine.generate(&mut sequence, prompt, &request(), &mut on);
    let all = all.expect("generate");
    (all.tokens, all.logits_hash)
}

fn admit(stepper: &mut Stepper<'_>, prompt: &[u32]) -> RequestId {
    let sequence = stepper.engine().sequence(prompt.len() + 16);
    let admission = Admission {
        sequence: sequence.expect("a sequence"),
        prompt: prompt.to_vec(),
        request: request(),
        samples: 1,
        bias: Vec::new(),
        constraint: None,
    };
    stepper.admit(admission).expect("admitted")
}

/// Steps until all requests have ended. Returns their results.
fn finish(stepper: &mut Stepper<'_>) -> Vec<Finished> {
    let mut all = Vec::new();
    loop {
        let ended: Vec<RequestId> = match stepper.step().expect("a step") {
            Stepped::Passed { events, .. } => events
                .iter()
                .filter_map(|event| match event {
                    Event::Token { id, stop, .. } => stop.map(|_| *id),
                    _ => None,
                })
                .collect(),
            Stepped::Idle => return all,
            Stepped::Yielded => continue,
        };
        all.extend(ended.into_iter().filter_map(|id| stepper.take(id)));
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_long_prompt_takes_memory_from_the_cache_and_gives_it_back() {
    let (expected, prompt) = {
        let mut engine = open(Options {
            lab: Lab {
                chunk: 16,
                ..options().lab
            },
            ..options()
        });
        let prompt = prompt(&engine, PROMPT);
        let expected = generate(&mut engine, &prompt);
        assert_eq!(engine.prompt_chunk(), 16);
        (expected, prompt)
    };
    let mut engine = open(options());
    let (usual, division) = (engine.chunk(), engine.memory().clone());
    for _ in 0..2 {
        assert_eq!(generate(&mut engine, &prompt), expected);
        assert!(engine.prompt_chunk() > usual, "{usual}");
        assert_eq!(engine.chunk(), usual);
        let after = engine.memory();
        assert_eq!(after.slots, division.slots);
        assert_eq!(after.hot_clusters, division.hot_clusters);
    }
    // a prompt of a few tokens is too short
    let mut short = open(options());
    generate(&mut short, &prompt[..20]);
    assert_eq!(short.prompt_chunk(), short.chunk());
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_second_request_ends_the_division_for_the_first() {
    let mut engine = open(Options {
        batch: 2,
        ..options()
    });
    let long = prompt(&engine, PROMPT);
    let short = &long[100..120];
    let alone = [&long[..], short].map(|prompt| generate(&mut engine, prompt));
    let usual = open(options()).chunk();
    let mut stepper = Stepper::new(&mut engine);
    let first = admit(&mut stepper, &long);
    stepper.step().expect("a step");
    assert!(stepper.engine().chunk() > usual);
    admit(&mut stepper, short);
    stepper.step().expect("a step");
    assert_eq!(stepper.engine().chunk(), usual);
    for ended in finish(&mut stepper) {
        let (tokens, hash) = &alone[usize::from(ended.id != first)];
        assert_eq!((&ended.tokens, &ended.logits_hash), (tokens, hash));
    }
}

/// A request restores the memory division, whether its prompt was computed or not.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn what_ends_in_its_prompt_gives_memory_back() {
    let mut engine = open(options());
    let (long, usual) = (prompt(&engine, PROMPT), engine.chunk());
    let mut sequence = engine.new_sequence().expect("a sequence");
    let mut stop = |_| ControlFlow::Break(());
    let ended = engine.generate(&mut sequence, &long, &request(), &mut stop);
    assert!(ended.expect("generate").tokens.is_empty());
    drop(sequence);
    let chunks = (engine.prompt_chunk(), engine.chunk());
    assert!(
        chunks.0 > usual && chunks.1 == usual,
        "{chunks:?}, {usual} {:?}",
        engine.memory()
    );
    let one = Request {
        max_tokens: 1,
        ..request()
    };
    let mut sequence = engine.new_sequence().expect("a sequence");
    let mut on = |_| ControlFlow::Continue(());
    let ended = engine.generate(&mut sequence, &long, &one, &mut on);
    assert_eq!(ended.expect("generate").tokens.len(), 1);
    assert_eq!(engine.chunk(), usual);
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_budget_that_changes_in_the_middle_is_kept() {
    let mut engine = open(options());
    let long = prompt(&engine, PROMPT);
    let expected = generate(&mut engine, &long);
    let mut stepper = Stepper::new(&mut engine);
    admit(&mut stepper, &long);
    stepper.step().expect("a step");
    drop(stepper);
    let budget = engine.memory().budget() + (1 << 20);
    engine.set_budget(budget).expect("set_budget");
    assert_eq!(engine.memory().budget(), budget);
    assert_eq!(generate(&mut engine, &long), expected);
}

/// A device without memory for longer chunks computes as many rows as before.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_device_without_room_for_more_rows_is_kept() {
    let long = prompt(&open(options()), PROMPT);
    let expected = generate(&mut open(options()), &long);
    let with = |fault| {
        open(Options {
            lane: lane_of(vec![Faulty::device(fault)], 256 << 10),
            budget: Budget::FfnShare(0.75),
            ..options()
        })
    };
    let usual = with(Fault::Never).chunk();
    let mut engine = with(Fault::Room(usual));
    for _ in 0..2 {
        assert_eq!(generate(&mut engine, &long), expected);
        assert_eq!(engine.prompt_chunk(), usual);
    }
    let report = device_report(&engine).expect("a device");
    assert!(report.lost.is_none() && report.clusters > 0, "{report:?}");
}

/// One of two devices that has no memory for shorter passes after a long prompt is lost, and the other goes on.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_device_without_room_leaves_the_other_at_work() {
    let long = prompt(&open(options()), PROMPT);
    let expected = generate(&mut open(options()), &long);
    // Room for the plan's passes and for those of a prompt.
    for (fault, number) in [Fault::Rooms(2), Fault::Never]
        .into_iter()
        .flat_map(|fault| [(fault, 0), (fault, 1)])
    {
        let device = |n| {
            let fault = if n == number { fault } else { Fault::Never };
            Faulty::armed_by(&plain_devices()[0], fault, never())
        };
        let goes_on = || {
            let mut engine = open(Options {
                lane: lane_of(vec![device(0), device(1)], 256 << 10),
                ..options()
            });
            // A cluster of a layer is not divided, and products are.
            let rows = |engine: &Engine| {
                let report = device_report(engine).expect("devices");
                report.devices[1 - number].rows
            };
            assert_eq!(generate(&mut engine, &long), expected);
            let (before, longer) = (rows(&engine), engine.prompt_chunk() > engine.chunk());
            assert_eq!(generate(&mut engine, &long), expected);
            let report = device_report(&engine).expect("devices");
            assert!(report.lost.is_none(), "{report:?}");
            let lost = [0, 1].map(|n| report.devices[n].lost.is_some());
            let its = [0, 1].map(|n| fault != Fault::Never && n == number);
            longer && lost == its && rows(&engine) > before
        };
        // The length of chunks and what a device gets follow from measured times, of which some are far off on a busy machine.
        assert!((0..3).any(|_| goes_on()), "{fault:?} of device {number}");
    }
}

/// A device's buffers follow, and it gets rows of the long chunks.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn devices_follow_and_change_no_bit() {
    let long = prompt(&open(options()), PROMPT);
    let expected = generate(&mut open(options()), &long);
    for device in devices() {
        let follows = || {
            let mut engine = open(Options {
                lane: lane_of(vec![device.clone()], 256 << 10),
                budget: Budget::FfnShare(0.75),
                ..options()
            });
            for _ in 0..2 {
                assert_eq!(generate(&mut engine, &long), expected);
            }
            let report = device_report(&engine).expect("a device");
            assert!(report.lost.is_none(), "{report:?}");
            engine.prompt_chunk() > engine.chunk() && report.streamed.chunk == engine.prompt_chunk()
        };
        // What a device gets follows from measured times, of which some are far off on a busy machine.
        let followed = (0..3).any(|_| follows());
        assert!(followed, "{device:?} gets no rows of long chunks");
    }
}
