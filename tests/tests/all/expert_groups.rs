//! Experts that a device computes in groups of one capacity, with what is beyond it and the other experts on the CPU, change
//! no bit.

use emberflow::export::export;
use emberflow_devices::{Device, ExpertWork, Grouping, OnDevices, Provider, device_report};
use emberflow_engine::{Budget, Engine, Lab, Model, Options, demo_container};
use emberflow_kernels::DType;
use emberflow_models::demo::Demo;
use emberflow_tests::devices::{CHECKS, Fault, Faulty, cpu, devices, plain_devices, provider};
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, roomy, squeeze};

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|i| 40 + (i * 31 + i * i / 7) % 900).collect()
}

fn demo() -> Model {
    Model::open(demo_container(Demo::Experts).unwrap()).unwrap()
}

fn some(share: f64, chunk: usize) -> Options {
    Options {
        budget: Budget::FfnShare(share),
        threads: 2,
        context: 400,
        lab: Lab {
            chunk,
            profiles: false,
            ..Lab::default()
        },
        ..Options::default()
    }
}

fn all(experts: usize, capacity: usize) -> Grouping {
    Grouping::All { experts, capacity }
}

fn on(device: &Device, held: u64, grouping: Grouping, options: Options) -> Options {
    let devices = OnDevices::new(vec![device.clone()]).holding(held);
    Options {
        lane: devices.grouping(grouping).lane(),
        ..options
    }
}

/// Devices that compute groups: the CPU, and the graphs of NPUs.
fn grouping(devices: Vec<Device>) -> impl Iterator<Item = Device> {
    devices.into_iter().filter(|device| device.facts().groups)
}

fn work(engine: &Engine) -> ExpertWork {
    let report = device_report(engine).unwrap();
    assert!(report.lost.is_none(), "{report:?}");
    report.experts.unwrap()
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn prompts_budgets_capacities_and_groups_change_no_bit() {
    let tokens = text(300);
    let plain = || Engine::open(demo(), some(1.0, 64)).unwrap();
    let expected = bits(&all_logits(&mut plain(), &tokens, 64));
    let cases = [
        (64, 1.0, 64 << 20, all(16, 0)),
        (256, 1.0, 64 << 20, all(16, 0)),
        (256, 1.0, 64 << 20, all(4, 16)),
        (64, 0.4, 4 << 20, all(8, 0)),
        (256, 0.5, 2 << 20, all(1, 0)),
        (256, 1.0, 64 << 20, Grouping::Measured),
    ];
    for device in grouping(devices()) {
        for (chunk, share, held, grouping) in cases {
            let options = on(&device, held, grouping, some(share, chunk));
            let mut engine = Engine::open(demo(), options).unwrap();
            let mut before = work(&engine);
            // Twice, and under another budget, of which less is in memory.
            for pass in 0..3 {
                if pass == 2 {
                    squeeze(&mut engine, 0.3);
                }
                let found = bits(&all_logits(&mut engine, &tokens, chunk));
                let name = &device.facts().name;
                assert!(
                    found == expected,
                    "{name}: {chunk} {share} {held} {grouping:?}"
                );
                let now = work(&engine);
                assert!(
                    now.groups > before.groups && now.routes.npu > before.routes.npu,
                    "{now:?}"
                );
                before = now;
            }
            let routes = before.routes;
            let all = (3 * tokens.len() * 6 * 2) as u64;
            assert_eq!(
                routes.npu + routes.overflow + routes.cold,
                all,
                "{before:?}"
            );
            // 85 tokens of a chunk of 512 routes are too many for a sixteenth.
            if grouping == self::all(4, 16) {
                assert!(routes.overflow > 0, "{before:?}");
            }
            if held < 10 << 20 {
                assert!(routes.cold > 0, "{before:?}");
            }
        }
    }
}

/// Larger groups have fewer runs of graphs.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn groups_save_launches() {
    let tokens = text(256);
    let Some(device) = grouping(plain_devices()).find(|device| device.facts().name != "cpu") else {
        return;
    };
    let runs = |experts: usize| {
        let options = on(&device, 64 << 20, all(experts, 0), some(1.0, 256));
        let options = Options {
            budget: Budget::Bytes(1 << 40),
            ..options
        };
        let mut engine = Engine::open(demo(), options).unwrap();
        all_logits(&mut engine, &tokens, 256);
        work(&engine)
    };
    let [one, four, sixteen] = [1, 4, 16].map(runs);
    assert_eq!((one.routes.npu, one.routes.cold), (sixteen.routes.npu, 0));
    assert_eq!(one.graph_runs, 2 * one.groups);
    assert!(2 * four.graph_runs < one.graph_runs, "{four:?} {one:?}");
    assert!(sixteen.graph_runs < four.graph_runs, "{sixteen:?} {four:?}");
    assert!(
        one.padding_share > 0.0 && one.padding_share < 0.7,
        "{one:?}"
    );
}

/// A device that is slower than the CPU for experts computes none of those that it holds.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn experts_follow_measured_times() {
    let tokens = text(128);
    let plain = || Engine::open(demo(), some(1.0, 64)).unwrap();
    let expected = bits(&all_logits(&mut plain(), &tokens, 64));
    let slow = Faulty::counted(&cpu(), Fault::Narrow(1 << 20)).0;
    let mut engine = Engine::open(
        demo(),
        on(&slow, 64 << 20, Grouping::Measured, some(1.0, 64)),
    )
    .unwrap();
    let found = bits(&all_logits(&mut engine, &tokens, 64));
    assert!(found == expected);
    let done = work(&engine);
    assert_eq!(
        (done.groups, done.routes.npu, done.routes.overflow),
        (0, 0, 0)
    );
    let report = device_report(&engine).unwrap();
    assert!(report.clusters > 0);
    assert!(
        report.computed.iter().all(|of| of.ffn_share == 0.0),
        "{report:?}"
    );
}

/// The bundled model in formats of NPUs.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn formats_of_npus_in_groups_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("demo-moe");
    export(
        &demo_container(Demo::Experts).unwrap(),
        &folder,
        &mut |_, _| {},
    )
    .unwrap();
    let tokens = text(200);
    for dtype in [DType::Q8c, DType::Q4c, DType::Q4] {
        let path = packed(&folder, dir.path(), dtype);
        let expected = bits(&all_logits(&mut open(&path, roomy(256)), &tokens, 64));
        // Graphs of floats know rows with one scale.
        let floats = dtype
            .is_per_channel()
            .then(|| provider(Provider::CpuFloats))
            .flatten();
        let floats = floats.map(|[device, _]| device);
        let all_devices = grouping(devices()).last().into_iter().chain(floats);
        let chunks = [(64, 0), (200, 0), (200, 16)];
        for (device, (chunk, capacity)) in
            all_devices.flat_map(|device| chunks.map(|of| (device.clone(), of)))
        {
            let options = on(&device, 64 << 20, all(16, capacity), some(1.0, chunk));
            let options = Options {
                budget: Budget::Bytes(1 << 40),
                kv: DType::F32,
                ..options
            };
            let mut engine = open(&path, options);
            let found = bits(&all_logits(&mut engine, &tokens, chunk));
            let name = &device.facts().name;
            assert!(found == expected, "{name}, {dtype}: {chunk} {capacity}");
            let done = work(&engine);
            // The CPU computes a group expert by expert.
            assert!(
                name == "cpu" || done.graph_runs < 8 * done.groups,
                "{name}: {done:?}"
            );
            assert!(done.groups > 0 && done.routes.cold == 0, "{done:?}");
            assert!(done.routes.overflow > 0 || capacity == 0, "{done:?}");
        }
    }
}

/// Formats of NPUs, biases, shared experts, dense layers beside them; devices that are lost in a group.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn families_and_formats_in_groups_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("mixtral", DType::F32),
        ("mixtral", DType::Q8c),
        ("mixtral", DType::Q4c),
        ("mixtral", DType::Q4),
        ("qwen2_moe_dense", DType::Q8),
        ("qwen3_moe", DType::Q4k),
        ("smallthinker", DType::Q4),
        ("deepseek_v4", DType::Q4),
        ("gpt_oss", DType::Q8),
    ];
    for (name, dtype) in cases {
        let case = fixtures().join("models").join(name);
        let path = packed(&case, dir.path(), dtype);
        let tokens = Golden::load(&case, "golden.json").tokens;
        let expected = bits(&all_logits(&mut open(&path, roomy(64)), &tokens, 5));
        for device in grouping(devices()) {
            if !device.facts().multiplies(dtype) {
                continue;
            }
            for (bytes, chunk, capacity) in
                [(200 << 10, 5, 0), (100 << 20, 64, 0), (100 << 20, 64, 2)]
            {
                let mut engine = open(&path, on(&device, bytes, all(4, capacity), roomy(64)));
                let found = bits(&all_logits(&mut engine, &tokens, chunk.min(tokens.len())));
                let report = device_report(&engine).unwrap();
                assert!(found == expected, "{name} in {dtype}: {report:?}");
                assert!(report.lost.is_none(), "{name}: {report:?}");
                if bytes > 1 << 20 {
                    assert!(work(&engine).groups > 0, "{name} in {dtype}: {report:?}");
                }
            }
        }
        for fault in [Fault::Submit(CHECKS + 3), Fault::Take(CHECKS + 6)] {
            let device = Faulty::device(fault);
            let mut engine = open(&path, on(&device, 100 << 20, all(4, 0), roomy(64)));
            let found = bits(&all_logits(&mut engine, &tokens, 5));
            assert!(found == expected, "{name}");
            assert!(device_report(&engine).unwrap().lost.is_some(), "{name}");
        }
    }
}
