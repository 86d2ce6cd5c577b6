//! Prompts' passes in parts: the CPU mixes one part while a device computes the FFN of another. No bit of a text changes,
//! whatever mixers a model has, and also if the device fails midway or the pass yields.

use std::sync::atomic::Ordering;

use emberflow_engine::device::Device;
use emberflow_engine::{
    Admission, Budget, Engine, Lab, Logits, Model, Options, PassOrder, Request, Stepped, Stepper,
};
use emberflow_kernels::DType;
use emberflow_storage::trace::Span;
use emberflow_tests::devices::{CHECKS, Fault, Faulty, cpu, devices, devices_apart, plain_devices};
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, squeeze};

/// Rows of a pass: more than three parts of [`PART`] rows, and a shorter one.
const CHUNK: usize = 110;

/// Rows of a part.
const PART: usize = 32;

fn text(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 40 + (i * 31) % 900).collect()
}

fn some(share: f64, order: PassOrder) -> Options {
    Options {
        budget: Budget::FfnShare(share),
        threads: 2,
        context: 256,
        lab: Lab {
            chunk: CHUNK,
            order,
            profiles: false,
            ..Lab::default()
        },
        ..Options::default()
    }
}

fn on(device: Device, share: f64, held: u64) -> Options {
    Options {
        devices: vec![device],
        device_memory: Some(held),
        ..some(share, PassOrder::Parts(PART))
    }
}

/// With another order.
fn ordered(options: Options, order: PassOrder) -> Options {
    let lab = Lab {
        order,
        ..options.lab
    };
    Options { lab, ..options }
}

/// Mixers on the CPU, and attention alone.
const ORDERS: [PassOrder; 2] = [PassOrder::Parts(PART), PassOrder::Subgraphs(PART)];

fn demo(options: Options) -> Engine {
    Engine::open(Model::demo().unwrap(), options).unwrap()
}

/// Passes that ran in parts.
fn in_parts(engine: &Engine) -> u64 {
    engine.device().unwrap().in_parts
}

/// Dense attention, sliding windows, output norms, short convolutions, DeltaNets, Mamba-2 in layers of its own and beside
/// FFNs; everything in memory, and most of it read for each part.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn mixers_of_all_kinds_in_parts_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    for (name, dtype) in [
        ("llama2", DType::F32),
        ("mistral", DType::Q8),
        ("qwen2_window", DType::Q4),
        ("gemma2", DType::F16),
        ("olmo2", DType::Q8),
        ("lfm2", DType::Q8),
        ("qwen3_5", DType::F32),
        ("nemotron_h", DType::Q8),
        ("granitehybrid_dense", DType::Q4),
        ("bamboo", DType::Q8),
    ] {
        let case = fixtures().join("models").join(name);
        let path = packed(&case, dir.path(), dtype);
        let golden = Golden::load(&case, "golden.json").tokens;
        let tokens: Vec<u32> = golden
            .iter()
            .copied()
            .cycle()
            .take(2 * CHUNK - 30)
            .collect();
        let mut plain = open(&path, some(1.0, PassOrder::Planned));
        let expected = bits(&all_logits(&mut plain, &tokens, 7));
        let shared = devices().into_iter().map(|device| (device, 0));
        let apart = devices_apart().into_iter().map(|device| (device, 2 << 20));
        for (device, held) in shared.chain(apart) {
            if !device.facts().multiplies(dtype) {
                continue;
            }
            // Elsewhere than in plain attention both are the same.
            let apart = ["lfm2", "qwen3_5", "nemotron_h", "granitehybrid_dense"];
            let orders = &ORDERS[..if apart.contains(&name) { 1 } else { 2 }];
            let all = orders
                .iter()
                .flat_map(|&order| [(0.0, order), (1.0, order)]);
            for (share, order) in all {
                let options = ordered(on(device.clone(), share, held), order);
                let mut engine = open(&path, options);
                let found = bits(&all_logits(&mut engine, &tokens, CHUNK));
                let report = engine.device().unwrap();
                assert!(
                    found == expected,
                    "{name} in {dtype}, {order:?}: {report:?}"
                );
                assert_eq!((report.in_parts, report.lost), (2, None), "{name}");
            }
        }
    }
}

/// Clusters that only the device has and single neurons, under budgets that read most of each layer again
/// for each part.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn budgets_and_memory_of_the_device_change_no_bit() {
    let tokens = text(2 * CHUNK - 30);
    let mut plain = demo(some(1.0, PassOrder::Planned));
    let expected = bits(&all_logits(&mut plain, &tokens, 7));
    for (share, held) in [(0.6, 0), (0.2, 200 << 10), (1.0, 64 << 20)] {
        let apart = devices_apart().into_iter().map(|d| (d, held + (700 << 10)));
        for (device, held) in devices().into_iter().map(|d| (d, held)).chain(apart) {
            let mut engine = demo(on(device, share, held));
            let found = bits(&all_logits(&mut engine, &tokens, CHUNK));
            let report = engine.device().unwrap();
            assert!(found == expected, "{share} {held}: {report:?}");
            assert_eq!((report.in_parts, report.lost), (2, None), "{share} {held}");
            // Passes of few rows in between, and less memory.
            squeeze(&mut engine, 0.2);
            for chunk in [64, CHUNK] {
                let found = bits(&all_logits(&mut engine, &tokens, chunk));
                assert!(found == expected, "{share} by {chunk}");
            }
        }
    }
}

/// Several devices compute the FFN of a part together, and one of them is lost.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn parts_on_several_devices_change_no_bit() {
    let tokens = text(2 * CHUNK - 30);
    let mut plain = demo(some(1.0, PassOrder::Planned));
    let expected = bits(&all_logits(&mut plain, &tokens, 7));
    for fault in [Fault::Never, Fault::Take(CHECKS + 9)] {
        for (held, order) in [0, 300 << 10].into_iter().zip(ORDERS) {
            let devices = vec![Faulty::device(fault), Faulty::device(Fault::Never)];
            let mut engine = demo(Options {
                devices,
                ..ordered(on(cpu(), 0.6, held), order)
            });
            let found = bits(&all_logits(&mut engine, &tokens, CHUNK));
            let report = engine.device().unwrap();
            assert!(found == expected, "{fault:?} {held}: {report:?}");
            let of = |n: usize| &report.devices[n];
            assert!(of(1).clusters > 0 && of(1).lost.is_none(), "{report:?}");
            assert_eq!(of(0).lost.is_some(), fault != Fault::Never, "{report:?}");
            assert!(report.in_parts > 0, "{report:?}");
        }
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_device_lost_between_two_parts_ends_on_the_cpu_with_the_same_text() {
    let tokens = text(2 * CHUNK - 30);
    let mut plain = demo(some(1.0, PassOrder::Planned));
    let expected = bits(&all_logits(&mut plain, &tokens, 7));
    for n in [0, 1, 2, 5, 8, 19] {
        for fault in [Fault::Submit(CHECKS + n), Fault::Take(CHECKS + n + 1)] {
            for (device, share, held, order) in [
                (Faulty::device(fault), 0.5, 0, ORDERS[0]),
                (Faulty::device(fault), 0.5, 0, ORDERS[1]),
                (Faulty::discrete(fault), 1.0, 1 << 20, ORDERS[0]),
                (Faulty::discrete(fault), 1.0, 1 << 20, ORDERS[1]),
            ] {
                let mut engine = demo(ordered(on(device, share, held), order));
                for passes in [1, 1] {
                    let found = bits(&all_logits(&mut engine, &tokens, CHUNK));
                    assert!(found == expected, "{fault:?}");
                    assert!(in_parts(&engine) <= 2 * passes, "{fault:?}");
                }
                let lost = engine.device().unwrap().lost.unwrap();
                assert!(lost.contains("was reset"), "{lost}");
            }
        }
    }
}

/// Text and hash of a prompt whose passes yield after each layer, if asked to.
fn generated(engine: &mut Engine, prompt: &[u32], yields: bool) -> (Vec<u32>, u64, usize) {
    let request = Request {
        max_tokens: 6,
        ignore_eos: true,
        ..Request::default()
    };
    let mut stepper = Stepper::new(engine);
    let flag = stepper.yield_flag();
    let sequence = stepper.engine().new_sequence().unwrap();
    let admission = Admission {
        sequence,
        prompt: prompt.to_vec(),
        request,
        samples: 1,
        bias: Vec::new(),
        constraint: None,
    };
    let id = stepper.admit(admission).unwrap();
    let mut yielded = 0;
    loop {
        flag.store(yields, Ordering::Relaxed);
        match stepper.step().unwrap() {
            Stepped::Yielded => yielded += 1,
            Stepped::Passed { .. } => {}
            Stepped::Idle => break,
        }
    }
    let done = stepper.take(id).unwrap();
    (done.tokens, done.logits_hash, yielded)
}

/// Recurrent states are marked where a conversation continues, in the middle of a pass.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn passes_in_parts_yield_between_layers_and_resume() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["llama2", "qwen3_5", "granitehybrid_dense"] {
        let case = fixtures().join("models").join(name);
        let path = packed(&case, dir.path(), DType::Q8);
        let golden = Golden::load(&case, "golden.json").tokens;
        let tokens: Vec<u32> = golden.iter().copied().cycle().take(200).collect();
        let mut plain = open(&path, some(1.0, PassOrder::Planned));
        let (text, hash, _) = generated(&mut plain, &tokens, false);
        let both = |yields: bool| ORDERS.map(|order| (yields, order));
        for (yields, order) in [false, true].into_iter().flat_map(both) {
            let mut engine = open(&path, ordered(on(cpu(), 1.0, 0), order));
            let (found, found_hash, yielded) = generated(&mut engine, &tokens, yields);
            assert_eq!((&found, found_hash), (&text, hash), "{name} {yields}");
            assert_eq!((yielded > 0, in_parts(&engine)), (yields, 2), "{name}");
            // The text goes on from its end, and from the marked place before it.
            let more: Vec<u32> = tokens.iter().copied().take(190).chain([3, 4, 5]).collect();
            let (expected, hash, _) = generated(&mut plain, &more, false);
            let (found, found_hash, _) = generated(&mut engine, &more, yields);
            assert_eq!((found, found_hash), (expected, hash), "{name} {yields}");
        }
    }
}

/// The device multiplies all projections of a pass in parts where that was asked for, else none.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn projections_of_parts_are_the_devices() {
    let tokens = text(2 * CHUNK);
    let rows = ORDERS.map(|order| {
        let mut engine = demo(ordered(on(cpu(), 1.0, 0), order));
        let sequence = &mut engine.new_sequence().unwrap();
        let before = engine.device().unwrap().devices[0].rows;
        for chunk in tokens.chunks(CHUNK) {
            engine.forward(sequence, chunk, Logits::None).unwrap();
        }
        let report = engine.device().unwrap();
        assert_eq!((report.in_parts, &report.lost), (2, &None));
        report.devices[0].rows - before
    });
    let c = demo(some(1.0, PassOrder::Layers)).config().clone();
    let heads = (c.heads + 2 * c.kv_heads) * c.head_dim;
    let each = u64::from(heads + c.d_model) * u64::from(c.layers);
    let parts = 2 * CHUNK.div_ceil(PART) as u64;
    assert_eq!(rows, [0, each * parts]);
}

/// While the device computes the FFN of a part, the CPU mixes another.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_trace_shows_the_mixer_of_one_part_beside_the_ffn_of_another() {
    for device in plain_devices() {
        let mut options = on(device, 1.0, 0);
        options.lab.trace = 4096;
        let mut engine = demo(options);
        let overlap = |engine: &Engine| {
            let lanes = engine.trace().unwrap().lanes();
            let spans = |name: &str, kind: &str| -> Vec<Span> {
                let lanes = lanes.iter().filter(|lane| lane.name.starts_with(name));
                let all = lanes.flat_map(|lane| lane.spans.iter().copied());
                all.filter(|span| span.kind.name == kind).collect()
            };
            let mixers = spans("compute", "attention");
            let beside = |ffn: &Span| {
                let both = |mixer: &&Span| mixer.start < ffn.end && ffn.start < mixer.end;
                mixers.iter().filter(both).count()
            };
            let ffns = spans("accelerator", "dense");
            assert!(!ffns.is_empty());
            ffns.iter().map(beside).sum::<usize>()
        };
        let layers = engine.config().layers as usize;
        // on a loaded machine it may take a while
        let seen = (0..20).any(|_| {
            engine.trace().unwrap().clear();
            all_logits(&mut engine, &text(CHUNK), CHUNK);
            overlap(&engine) >= layers
        });
        assert!(seen && in_parts(&engine) > 0, "{:?}", engine.device());
    }
}

/// The order is a switch for measurements: without it a device that is slow gets no parts.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn nothing_runs_in_parts_unless_that_is_faster() {
    let tokens = text(CHUNK);
    for order in [PassOrder::Layers, PassOrder::Planned] {
        let device = Faulty::device(Fault::Narrow(usize::MAX));
        let mut engine = demo(Options {
            lab: Lab {
                order,
                ..on(device.clone(), 1.0, 0).lab
            },
            ..on(device, 1.0, 0)
        });
        all_logits(&mut engine, &tokens, CHUNK);
        assert_eq!(in_parts(&engine), 0);
    }
}
