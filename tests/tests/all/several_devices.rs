//! Several devices at once: their clusters, rows of prompts and products are divided among them and the CPU, and no bit
//! changes, whatever is lost in the middle.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use emberflow_devices::{Device, MOST_DEVICES, device_report};
use emberflow_engine::{Budget, Engine, Lab, Logits, Model, Options, Span, demo_container};
use emberflow_kernels::DType;
use emberflow_models::demo::Demo;
use emberflow_tests::devices::{
    CHECKS, Fault, Faulty, fast_products as fast, lane_of, never, plain_devices,
};
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, roomy, squeeze, visited};

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|i| 40 + (i * 31) % 900).collect()
}

fn some(share: f64, chunk: usize) -> Options {
    Options {
        budget: Budget::FfnShare(share),
        threads: 2,
        context: 256,
        lab: Lab {
            chunk,
            profiles: false,
            ..Lab::default()
        },
        ..Options::default()
    }
}

fn demo(options: Options) -> Engine {
    Engine::open(Model::demo().unwrap(), options).unwrap()
}

fn expected(tokens: &[u32]) -> Vec<u32> {
    bits(&all_logits(&mut demo(some(1.0, 16)), tokens, 7))
}

/// The CPU twice; devices of this machine, and these in reverse without the CPU.
fn lists() -> Vec<Vec<Device>> {
    let cpu = || fast(&plain_devices()[0]);
    let all = || {
        let some = plain_devices().into_iter().take(MOST_DEVICES);
        some.map(|device| fast(&device)).collect::<Vec<_>>()
    };
    let mut others = all().split_off(1);
    others.reverse();
    let lists = [vec![cpu(), cpu()], all(), others];
    lists.into_iter().filter(|list| list.len() > 1).collect()
}

fn on(devices: Vec<Device>, held: u64, options: Options) -> Options {
    Options {
        lane: lane_of(devices, held),
        ..options
    }
}

/// Every device has computed clusters, and none is lost.
fn all_worked(engine: &Engine) {
    let report = device_report(engine).unwrap();
    let worked = |clusters: u64, lost: &Option<String>| clusters > 0 && lost.is_none();
    let mut each = report.devices.iter();
    assert!(
        report.lost.is_none() && each.all(|of| worked(of.clusters, &of.lost)),
        "{report:?}"
    );
}

/// The first devices have computed clusters, since experts have few, and none is lost.
fn some_worked(engine: &Engine) {
    let report = device_report(engine).unwrap();
    let mut each = report.devices.iter();
    assert!(
        each.all(|of| of.lost.is_none()) && report.devices.iter().take(2).all(|of| of.clusters > 0),
        "{report:?}"
    );
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn budgets_chunks_and_shares_of_several_devices_change_no_bit() {
    let tokens = text(40);
    let expected = expected(&tokens);
    // Times are those of the first check, so that each engine has devices of its own.
    for (share, mib, chunk) in [(0.4, 1, 1), (1.0, 64, 40)] {
        for list in lists() {
            let mut engine = demo(on(list.clone(), mib << 20, some(share, 40)));
            let found = bits(&all_logits(&mut engine, &tokens, chunk));
            assert!(found == expected, "{list:?}: {share} {mib} {chunk}");
            // The rest under another budget.
            squeeze(&mut engine, 0.35);
            let found = bits(&all_logits(&mut engine, &tokens, chunk));
            assert!(found == expected, "{list:?}: squeezed from {share}");
            // A cluster of a layer is not divided.
            if mib > 1 {
                all_worked(&engine);
            }
        }
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn prompts_through_several_devices_change_no_bit() {
    let tokens = text(200);
    let expected = expected(&tokens);
    for (share, held) in [(0.2, 0), (0.6, 200 << 10)] {
        for list in lists() {
            let mut engine = demo(on(list.clone(), held, some(share, 128)));
            let report = device_report(&engine).unwrap();
            assert!(
                report.streamed.rows > 64 && report.bytes <= held,
                "{report:?}"
            );
            let found = bits(&all_logits(&mut engine, &tokens, 128));
            assert!(found == expected, "{list:?}: {share} {held}");
            all_worked(&engine);
        }
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn texts_of_a_batch_and_experts_on_several_devices_change_no_bit() {
    let texts: Vec<Vec<u32>> = (0..3).map(|n| text(5 + n)).collect();
    let model = |experts: bool| {
        let demo = if experts { Demo::Experts } else { Demo::Dense };
        Model::open(demo_container(demo).unwrap()).unwrap()
    };
    let options = || Options {
        batch: 3,
        ..some(0.7, 32)
    };
    for experts in [false, true] {
        let mut plain = Engine::open(model(experts), options()).unwrap();
        let mut alone = |text: &Vec<u32>| bits(&all_logits(&mut plain, text, 16));
        let expected: Vec<_> = texts.iter().map(&mut alone).collect();
        let one = vec![fast(&plain_devices()[0])];
        for list in lists().into_iter().chain([one]) {
            let options = on(list, 64 << 20, options());
            let mut engine = Engine::open(model(experts), options).unwrap();
            let new = |_: &Vec<u32>| engine.new_sequence().unwrap();
            let mut sequences: Vec<_> = texts.iter().map(new).collect();
            let mut spans: Vec<_> = (sequences.iter_mut().zip(&texts))
                .map(|(sequence, tokens)| Span { sequence, tokens })
                .collect();
            let mut found = Vec::new();
            let mut sink = |_: usize, logits: &[f32]| found.extend_from_slice(logits);
            (engine.forward_batch(&mut spans, Logits::Each(&mut sink))).unwrap();
            assert!(bits(&found) == expected.concat(), "experts: {experts}");
            if experts {
                some_worked(&engine);
            } else {
                all_worked(&engine);
            }
        }
    }
}

/// Projections, head and Gate rows too.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn goldens_and_products_on_several_devices_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    for (name, dtype) in [
        ("llama2", DType::Q4),
        ("bamboo", DType::Q8),
        ("mixtral", DType::Q8),
    ] {
        let case = fixtures().join("models").join(name);
        let path = packed(&case, dir.path(), dtype);
        let tokens = Golden::load(&case, "golden.json").tokens;
        let expected = bits(&all_logits(&mut open(&path, roomy(64)), &tokens, 3));
        for list in lists() {
            let mut engine = open(&path, on(list, 16 << 10, roomy(64)));
            assert!(visited(&engine) > 0);
            for chunk in [3, 1, 16] {
                let found = bits(&all_logits(&mut engine, &tokens, chunk));
                assert!(
                    found == expected,
                    "{name} by {chunk}: {:?}",
                    device_report(&engine)
                );
            }
            let report = device_report(&engine).unwrap();
            assert!(report.devices.iter().all(|of| of.rows > 0), "{report:?}");
            assert!(report.products_share > 0.5, "{report:?}");
        }
    }
}

/// One after the other is lost: the others go on, and then the CPU.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_lost_device_leaves_the_others_at_work() {
    let tokens = text(130);
    let expected = expected(&tokens);
    let cpu = plain_devices().remove(0);
    let last = plain_devices().pop().unwrap();
    for of in [&cpu, &last] {
        for fault in [Fault::Submit(CHECKS), Fault::Take(CHECKS + 6)] {
            for (first, chunk) in [(true, 1), (true, 128), (false, 128)] {
                let lost = Faulty::armed_by(of, fault, never());
                let other = fast(&plain_devices()[0]);
                let list = if first {
                    vec![lost, other]
                } else {
                    vec![other, lost]
                };
                let mut engine = demo(on(list, 200 << 10, some(0.5, 128)));
                for _ in 0..2 {
                    let found = bits(&all_logits(&mut engine, &tokens, chunk));
                    assert!(found == expected, "{fault:?} {first} {chunk}");
                }
                let report = device_report(&engine).unwrap();
                let lost: Vec<bool> = report.devices.iter().map(|of| of.lost.is_some()).collect();
                assert_eq!(lost, [first, !first], "{report:?}");
                assert_eq!(report.lost, None);
                let other = &report.devices[usize::from(first)];
                assert!(other.clusters > report.devices[usize::from(!first)].clusters);
            }
        }
    }
    // Both, at different times.
    let faults = [Fault::Take(CHECKS + 3), Fault::Submit(CHECKS + 9)];
    let list = faults.map(|fault| Faulty::armed_by(&plain_devices()[0], fault, never()));
    let mut engine = demo(on(list.into(), 200 << 10, some(0.5, 128)));
    for chunk in [1, 128] {
        let found = bits(&all_logits(&mut engine, &tokens, chunk));
        assert!(found == expected);
    }
    let report = device_report(&engine).unwrap();
    assert!(report.lost.is_some() && report.devices.iter().all(|of| of.lost.is_some()));
}

/// The same of products.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn products_of_a_lost_device_are_those_of_the_others() {
    let tokens = text(40);
    let expected = expected(&tokens);
    for fault in [Fault::Multiply, Fault::TakeProducts] {
        for lost_at in [0, 7] {
            let left = Arc::new(AtomicUsize::new(usize::MAX - 1));
            let lost = Faulty::armed_by(&plain_devices()[0], fault, Arc::clone(&left));
            let list = vec![fast(&plain_devices()[0]), lost];
            let mut engine = demo(on(list, 0, some(1.0, 16)));
            left.store(lost_at, Ordering::Relaxed);
            for chunk in [16, 1] {
                let found = bits(&all_logits(&mut engine, &tokens, chunk));
                assert!(found == expected, "{fault:?} {lost_at} {chunk}");
            }
            let report = device_report(&engine).unwrap();
            let [other, lost] = &report.devices[..] else {
                panic!("{report:?}")
            };
            assert!(other.lost.is_none() && lost.lost.is_some(), "{report:?}");
            assert!(other.rows > lost.rows && report.products_share > 0.5);
        }
    }
}

/// A device that fails while clusters of a prompt pass to it: the other goes on.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_failed_upload_leaves_the_others_at_work() {
    let tokens = text(200);
    let expected = expected(&tokens);
    for at in [0, 1, 7] {
        for first in [true, false] {
            let faulty = Faulty::armed_by(&plain_devices()[0], Fault::Upload(at), never());
            let mut list = vec![faulty, fast(&plain_devices()[0])];
            if !first {
                list.reverse();
            }
            // It holds nothing, so that all uploads are those of a prompt.
            let mut engine = demo(on(list, 0, some(0.2, 128)));
            for _ in 0..2 {
                let found = bits(&all_logits(&mut engine, &tokens, 128));
                assert!(found == expected, "{at} {first}");
            }
            let report = device_report(&engine).unwrap();
            let lost: Vec<bool> = report.devices.iter().map(|of| of.lost.is_some()).collect();
            assert_eq!(lost, [first, !first], "{report:?}");
            let [other, failed] = [first, !first].map(|n| &report.devices[usize::from(n)]);
            assert!(other.clusters > failed.clusters, "{report:?}");
        }
    }
    // Where it fails before there is a text, the engine says so.
    let faulty = Faulty::armed_by(&plain_devices()[0], Fault::Upload(0), never());
    let refused = Engine::open(
        Model::demo().unwrap(),
        on(vec![faulty], 1 << 20, some(0.5, 16)),
    );
    let refused = refused.err().unwrap().to_string();
    assert!(refused.contains("was reset"), "{refused}");
}

/// Gates that are resident again after one of the devices was lost: the other multiplies them as before.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn gates_are_shared_again_with_the_devices_that_are_left() {
    let tokens = text(24);
    let expected = expected(&tokens);
    let left = Arc::new(AtomicUsize::new(usize::MAX - 1));
    let lost = Faulty::armed_by(&plain_devices()[0], Fault::Multiply, Arc::clone(&left));
    let list = vec![lost, fast(&plain_devices()[0])];
    let mut engine = demo(on(list, 0, some(1.0, 16)));
    let rows = |engine: &mut Engine| {
        let of = |engine: &Engine| device_report(engine).unwrap().devices[1].rows;
        let before = of(engine);
        assert!(bits(&all_logits(engine, &tokens, 16)) == expected);
        of(engine) - before
    };
    left.store(0, Ordering::Relaxed);
    rows(&mut engine);
    assert!(device_report(&engine).unwrap().devices[0].lost.is_some());
    let shared = rows(&mut engine);
    let budget = engine.memory().budget();
    squeeze(&mut engine, 0.0);
    let without = rows(&mut engine);
    engine.set_budget(budget).unwrap();
    let again = rows(&mut engine);
    assert!(without < shared * 9 / 10, "{without} {shared}");
    assert!(again > (without + shared) / 2, "{without} {again} {shared}");
}

/// Clusters of a prompt pass through the devices that have memory for that. One that has none computes what it holds, and
/// goes on alone where the others are lost.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn prompts_stream_through_the_devices_with_memory_for_it() {
    let tokens = text(200);
    let expected = expected(&tokens);
    for other in [Fault::Never, Fault::Take(CHECKS + 6), Fault::Upload(40)] {
        for (first, held) in [(true, 0), (false, 0), (true, 400 << 10), (false, 400 << 10)] {
            let without = Faulty::armed_by(&plain_devices()[0], Fault::Buffers, never());
            let other_device = Faulty::armed_by(&plain_devices()[0], other, never());
            let mut list = vec![without, other_device];
            if !first {
                list.reverse();
            }
            let mut engine = demo(on(list, held, some(0.2, 128)));
            let streamed = device_report(&engine).unwrap().streamed.rows;
            assert!(streamed > 64 && streamed < 128, "{other:?}: {streamed}");
            for chunk in [128, 128, 1] {
                let found = bits(&all_logits(&mut engine, &tokens, chunk));
                assert!(found == expected, "{other:?} {first} {held} {chunk}");
            }
            let report = device_report(&engine).unwrap();
            let [without, other_work] = [!first, first].map(|n| &report.devices[usize::from(n)]);
            assert!(
                without.lost.is_none() && report.lost.is_none(),
                "{report:?}"
            );
            assert_eq!(
                other_work.lost.is_some(),
                other != Fault::Never,
                "{report:?}"
            );
            assert!(without.clusters == 0 || held > 0, "{report:?}");
            assert!(other_work.clusters > 0, "{report:?}");
        }
    }
    // None has any.
    let list = vec![Faulty::armed_by(
        &plain_devices()[0],
        Fault::Buffers,
        never(),
    )];
    let refused = Engine::open(Model::demo().unwrap(), on(list, 0, some(0.2, 128)));
    let refused = refused.err().unwrap().to_string();
    assert!(refused.contains("no memory"), "{refused}");
}

/// Gates that are resident again: the report's share is that of the devices that have room for them.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn the_share_of_gates_is_of_the_devices_with_room_for_them() {
    for without in [0, 1, 2] {
        let left = Arc::new(AtomicUsize::new(usize::MAX - 1));
        let device = |n| {
            let fault = if n < without {
                Fault::Matrices
            } else {
                Fault::Multiply
            };
            let left = if n < without {
                Arc::clone(&left)
            } else {
                never()
            };
            Faulty::armed_by(&plain_devices()[0], fault, left)
        };
        let mut engine = demo(on(vec![device(0), device(1)], 0, some(1.0, 16)));
        let share = |engine: &Engine| device_report(engine).unwrap().gates_share;
        let before = share(&engine);
        assert!(before > 0.5, "{before}");
        let budget = engine.memory().budget();
        squeeze(&mut engine, 0.0);
        assert_eq!(share(&engine), 0.0);
        left.store(0, Ordering::Relaxed);
        engine.set_budget(budget).unwrap();
        let after = share(&engine);
        let left_out = if without == 2 {
            after == 0.0
        } else {
            after > 0.5
        };
        assert!(left_out, "{without}: {before} {after}");
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_trace_has_a_lane_for_each_device() {
    let list = vec![fast(&plain_devices()[0]), fast(&plain_devices()[0])];
    let mut options = on(list, 64 << 20, some(1.0, 16));
    options.lab.trace = 4096;
    let mut engine = demo(options);
    all_logits(&mut engine, &text(24), 1);
    let lanes = engine.trace().unwrap().lanes();
    for name in ["accelerator", "accelerator 2"] {
        let lane = lanes.iter().find(|lane| lane.name == name).unwrap();
        let kinds = |kind: &str| lane.spans.iter().any(|span| span.kind.name == kind);
        assert!(kinds("dense") && kinds("products"), "{name}");
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn devices_that_cannot_compute_together_are_refused() {
    for (device, told) in [
        (Faulty::device(Fault::Off), "bits"),
        (Faulty::discrete(Fault::Never), "memory of its own"),
    ] {
        for first in [true, false] {
            let other = fast(&plain_devices()[0]);
            let list = if first {
                vec![device.clone(), other]
            } else {
                vec![other, device.clone()]
            };
            let refused = Engine::open(Model::demo().unwrap(), on(list, 0, some(0.5, 16)));
            let refused = refused.err().unwrap().to_string();
            let told = [told, "name it alone in --device"];
            assert!(told.iter().all(|told| refused.contains(told)), "{refused}");
        }
    }
}
