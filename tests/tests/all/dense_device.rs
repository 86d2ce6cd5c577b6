//! A device that holds the hottest neurons changes no bit, for every family, format, budget, share,
//! prompt and batch, and also if it fails midway.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use emberflow_devices::{Device, DeviceChoice, device_report};
use emberflow_engine::{Ablation, Budget, Engine, Error, Lab, Model, Options};
use emberflow_kernels::DType;
use emberflow_models::config::Activation;
use emberflow_storage::container::Container;
use emberflow_storage::trace::Span;
use emberflow_tests::devices::{
    CHECKS, Fault, Faulty, cpu, devices, devices_apart, lane_of, plain_devices,
};
use emberflow_tests::{
    Golden, all_logits, bits, fixtures, one_per_family, open, packed, roomy, squeeze,
};

fn demo() -> Model {
    Model::demo().unwrap()
}

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|i| 40 + (i * 31) % 900).collect()
}

/// The demo model with a device that holds `bytes`.
fn with(device: Device, bytes: u64, options: Options) -> Engine {
    let options = Options {
        lane: lane_of(vec![device], bytes),
        ..options
    };
    Engine::open(demo(), options).unwrap()
}

fn some(share: f64) -> Options {
    Options {
        budget: Budget::FfnShare(share),
        threads: 2,
        context: 128,
        ..Options::default()
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn budgets_chunks_and_shares_of_a_device_change_no_bit() {
    let tokens = text(40);
    let expected = bits(&all_logits(
        &mut Engine::open(demo(), some(1.0)).unwrap(),
        &tokens,
        1,
    ));
    for device in devices() {
        for (share, mib, chunk) in [(0.4, 1, 1), (0.6, 2, 16), (1.0, 3, 7), (1.0, 64, 40)] {
            let options = Options {
                lab: Lab {
                    chunk: 40,
                    profiles: false,
                    ..Lab::default()
                },
                ..some(share)
            };
            let mut engine = with(device.clone(), mib << 20, options);
            let held = device_report(&engine).unwrap();
            assert!(held.clusters > 0, "{}: {share} {mib}", held.name);
            assert!(held.bytes <= mib << 20);
            let found = bits(&all_logits(&mut engine, &tokens, chunk));
            assert!(found == expected, "{}: {share} {mib} {chunk}", held.name);
            // The rest under another budget.
            squeeze(&mut engine, 0.35);
            let found = bits(&all_logits(&mut engine, &tokens, chunk));
            assert!(found == expected, "{}: squeezed from {share}", held.name);
            assert_eq!(device_report(&engine).unwrap().lost, None);
        }
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn batches_on_a_device_are_what_each_text_is_alone() {
    let options = || Options {
        batch: 3,
        lab: Lab {
            chunk: 32,
            profiles: false,
            ..Lab::default()
        },
        ..some(0.7)
    };
    let texts: Vec<Vec<u32>> = (0..3).map(|n| text(5 + n)).collect();
    let mut plain = Engine::open(demo(), options()).unwrap();
    let expected: Vec<_> = (texts.iter())
        .map(|text| bits(&all_logits(&mut plain, text, 16)))
        .collect();
    for device in devices() {
        let mut engine = with(device, 1 << 20, options());
        let mut sequences: Vec<_> = texts
            .iter()
            .map(|_| engine.new_sequence().unwrap())
            .collect();
        let mut spans: Vec<_> = (sequences.iter_mut().zip(&texts))
            .map(|(sequence, tokens)| emberflow_engine::Span { sequence, tokens })
            .collect();
        let mut found = Vec::new();
        let mut sink = |_: usize, logits: &[f32]| found.extend_from_slice(logits);
        let wanted = emberflow_engine::Logits::Each(&mut sink);
        engine.forward_batch(&mut spans, wanted).unwrap();
        assert!(bits(&found) == expected.concat());
    }
}

/// A device that is slow for few rows and fast for many computes between none and all of its clusters; the CPU
/// computes the rest from the same bytes. Each text is the same as alone while others come and go.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_devices_part_follows_the_rows_of_a_pass() {
    const LIVE: [usize; 8] = [1, 8, 6, 3, 7, 1, 8, 5];
    let options = |share| Options {
        batch: 8,
        lab: Lab {
            chunk: 32,
            profiles: false,
            ..Lab::default()
        },
        ..some(share)
    };
    let row = |text: usize, at: usize| 40 + ((7 * text + 31 * at) % 900) as u32;
    let mut plain = Engine::open(demo(), options(1.0)).unwrap();
    let expected: Vec<Vec<u32>> = (0..8)
        .map(|text| {
            let tokens: Vec<u32> = (0..LIVE.len()).map(|at| row(text, at)).collect();
            bits(&all_logits(&mut plain, &tokens, 1))
        })
        .collect();
    let vocab = expected[0].len() / LIVE.len();
    for (device, share) in plain_devices().iter().flat_map(|d| [(d, 0.4), (d, 1.0)]) {
        let (device, done) = Faulty::counted(device, Fault::Narrow(8));
        let mut engine = with(device, 1 << 20, options(share));
        let report = device_report(&engine).unwrap();
        let shares: Vec<_> = report
            .computed
            .iter()
            .map(|c| (c.rows, c.ffn_share))
            .collect();
        let all = report.ffn_share;
        assert!(all > 0.0, "{report:?}");
        assert_eq!(shares, [(1, 0.0), (8, all), (32, all)], "{report:?}");
        let new = |engine: &mut Engine| engine.new_sequence().unwrap();
        let mut sequences: Vec<_> = (0..8).map(|_| new(&mut engine)).collect();
        for live in LIVE {
            engine.set_batch(live).unwrap();
            let before = done.load(Ordering::Relaxed);
            let tokens: Vec<[u32; 1]> = (0..live)
                .map(|text| [row(text, sequences[text].len())])
                .collect();
            let places: Vec<usize> = sequences.iter().map(|sequence| sequence.len()).collect();
            let mut spans: Vec<_> = (sequences.iter_mut().zip(&tokens))
                .map(|(sequence, tokens)| emberflow_engine::Span { sequence, tokens })
                .collect();
            let mut found = Vec::new();
            let mut sink = |_: usize, logits: &[f32]| found.extend_from_slice(logits);
            let wanted = emberflow_engine::Logits::Each(&mut sink);
            engine.forward_batch(&mut spans, wanted).unwrap();
            for (text, found) in bits(&found).chunks(vocab).enumerate() {
                let expected = &expected[text][places[text] * vocab..][..vocab];
                assert!(found == expected, "text {text} of {live} at {share}");
            }
            let worked = done.load(Ordering::Relaxed) > before;
            assert_eq!(worked, live > 4, "{live} live");
        }
        assert_eq!(device_report(&engine).unwrap().lost, None);
    }
}

/// Gated and ungated, with biases, every activation that devices support, dense and sparse.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn families_and_formats_on_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("llama2", DType::F32),
        ("llama2", DType::Q8),
        ("opt", DType::F16),
        ("nemotron_bias", DType::Q4),
        ("fatrelu", DType::Q4),
        ("gemma2", DType::BF16),
        ("gemma3_layers", DType::F32),
        ("llama_mlp_bias", DType::F32),
        ("bamboo", DType::Q8),
        ("llama2", DType::Q4k),
        ("bamboo", DType::Q4k),
        ("llama2", DType::Q8c),
        ("bamboo", DType::Q8c),
        ("llama2", DType::Q4c),
        ("bamboo", DType::Q4c),
    ];
    for (name, dtype) in cases {
        let case = fixtures().join("models").join(name);
        let path = packed(&case, dir.path(), dtype);
        let tokens = Golden::load(&case, "golden.json").tokens;
        let expected = bits(&all_logits(&mut open(&path, roomy(64)), &tokens, 3));
        for device in devices() {
            if !device.facts().multiplies(dtype) {
                continue;
            }
            for bytes in [100 << 10, 100 << 20] {
                let options = Options {
                    lane: lane_of(vec![device.clone()], bytes),
                    ..roomy(64)
                };
                let mut engine = open(&path, options);
                let held = device_report(&engine).unwrap();
                let found = bits(&all_logits(&mut engine, &tokens, 3));
                assert!(found == expected, "{name} in {dtype} on {held:?}");
                assert!(held.clusters > 0 || bytes < 1 << 20, "{name}: {held:?}");
            }
        }
    }
}

/// Clusters of experts that a device holds, of some of them or of all, with the sums of each weighed by its router: shared
/// experts, dense layers beside them, prompts and next tokens, room for some experts in memory; and once the device is lost.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn experts_on_a_device_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("mixtral", DType::F32),
        ("qwen2_moe_dense", DType::Q8),
        ("smallthinker", DType::Q4),
        ("qwen3_moe", DType::Q4),
        // gates and Ups within limits; biases of both, and of Down
        ("deepseek_v4", DType::Q4),
        ("gpt_oss", DType::Q8),
    ];
    for (name, dtype) in cases {
        let case = fixtures().join("models").join(name);
        let path = packed(&case, dir.path(), dtype);
        let tokens = Golden::load(&case, "golden.json").tokens;
        let expected = bits(&all_logits(&mut open(&path, roomy(64)), &tokens, 3));
        let on = |device: &Device, bytes: u64| Options {
            lane: lane_of(vec![device.clone()], bytes),
            ..roomy(64)
        };
        for device in devices().into_iter().chain(devices_apart()) {
            if !device.facts().multiplies(dtype) {
                continue;
            }
            for (bytes, chunk) in [(200 << 10, 3), (100 << 20, 1), (100 << 20, 5)] {
                let mut engine = open(&path, on(&device, bytes));
                let found = bits(&all_logits(&mut engine, &tokens, chunk));
                let report = device_report(&engine).unwrap();
                assert!(found == expected, "{name} in {dtype}: {report:?}");
                assert!(
                    report.clusters > 0 && report.lost.is_none(),
                    "{name}: {report:?}"
                );
            }
        }
        for fault in [Fault::Submit(CHECKS + 3), Fault::Take(CHECKS + 6)] {
            for device in [Faulty::device(fault), Faulty::discrete(fault)] {
                let mut engine = open(&path, on(&device, 100 << 20));
                let found = bits(&all_logits(&mut engine, &tokens, 3));
                assert!(found == expected, "{name}");
                assert!(device_report(&engine).unwrap().lost.is_some(), "{name}");
            }
        }
    }
}

/// Device, compute threads and the I/O thread are at work at the same time.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_trace_shows_all_lanes_at_once() {
    for device in devices() {
        let options = Options {
            lab: Lab {
                trace: 4096,
                profiles: false,
                ..Lab::default()
            },
            ..some(0.4)
        };
        let mut engine = with(device, 1 << 20, options);
        // Other tests' memory counted when it was opened.
        squeeze(&mut engine, 0.4);
        // on a loaded machine it may take a while
        let seen = (0..20).any(|_| {
            all_logits(&mut engine, &text(24), 1);
            at_once(&engine)
        });
        assert!(seen, "{:?}", device_report(&engine));
    }
}

/// Whether a span of the device overlaps one of a compute thread and one of a read.
fn at_once(engine: &Engine) -> bool {
    let lanes = engine.trace().unwrap().lanes();
    let lane = |name: &str| {
        let found = lanes.iter().find(|lane| lane.name.starts_with(name));
        &found.unwrap().spans
    };
    let beside = |a: &Span, b: &Span| a.start < b.end && b.start < a.end;
    let with = |a: &Span, name: &str| lane(name).iter().any(|b| beside(a, b));
    let busy = |a: &Span| with(a, "compute") && with(a, "device");
    lane("accelerator").iter().any(busy)
}

/// Projections and head are computed by a device and the CPU together, for any division of rows; and
/// by the CPU alone after the device is lost.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn products_on_a_device_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    for (name, dtype) in [
        ("llama2", DType::Q4),
        ("qwen2", DType::F16),
        ("bamboo", DType::Q8),
    ] {
        let case = fixtures().join("models").join(name);
        let path = packed(&case, dir.path(), dtype);
        let tokens = Golden::load(&case, "golden.json").tokens;
        let expected = bits(&all_logits(&mut open(&path, roomy(64)), &tokens, 3));
        for (device, fault) in plain_devices()
            .iter()
            .filter(|device| device.facts().multiplies(dtype))
            .flat_map(|device| [(device, Fault::Multiply), (device, Fault::TakeProducts)])
        {
            for lost_at in [usize::MAX - 1, 0, 7] {
                let left = Arc::new(AtomicUsize::new(usize::MAX - 1));
                let options = Options {
                    lane: lane_of(vec![Faulty::armed_by(device, fault, Arc::clone(&left))], 0),
                    ..roomy(64)
                };
                let mut engine = open(&path, options);
                let report = device_report(&engine).unwrap();
                assert!(report.products_share > 0.5, "{name}: {report:?}");
                let gates = report.gates_share;
                assert_eq!(gates > 0.5, name == "bamboo", "{name}: {report:?}");
                left.store(lost_at, Ordering::Relaxed);
                for chunk in [3, 1, 16] {
                    let found = bits(&all_logits(&mut engine, &tokens, chunk));
                    assert!(found == expected, "{name} in {dtype}, lost at {lost_at}");
                }
                let lost = device_report(&engine).unwrap().lost;
                assert_eq!(lost.is_some(), lost_at < 8, "{lost:?}");
            }
        }
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_device_lost_in_the_middle_ends_on_the_cpu_with_the_same_text() {
    let tokens = text(24);
    let expected = bits(&all_logits(
        &mut Engine::open(demo(), some(1.0)).unwrap(),
        &tokens,
        1,
    ));
    let faults = [0, 1, 5, 9].map(|n| [Fault::Submit(CHECKS + n), Fault::Take(CHECKS + n + 1)]);
    for fault in faults.concat() {
        for chunk in [1, 24] {
            let options = Options {
                lab: Lab {
                    chunk: 24,
                    profiles: false,
                    ..Lab::default()
                },
                ..some(0.5)
            };
            // The CPU also has the device's clusters, or has to read them.
            for device in [Faulty::device(fault), Faulty::discrete(fault)] {
                let mut engine = with(device, 1 << 20, options.clone());
                assert!(device_report(&engine).unwrap().clusters > 0);
                // until it is lost, and once more
                for _ in 0..6 {
                    let lost = device_report(&engine).unwrap().lost.is_some();
                    let found = bits(&all_logits(&mut engine, &tokens, chunk));
                    assert!(found == expected);
                    if lost {
                        break;
                    }
                }
                let lost = device_report(&engine).unwrap().lost.unwrap();
                assert!(lost.contains("was reset"), "{lost}");
            }
        }
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_device_with_other_bits_is_a_class_of_its_own() {
    let tokens = text(16);
    let run = |fault| {
        let mut engine = with(Faulty::device(fault), 1 << 20, some(0.5));
        let numerics = device_report(&engine).unwrap().numerics;
        assert_ne!(numerics, "cpu");
        bits(&all_logits(&mut engine, &tokens, 16))
    };
    let plain = bits(&all_logits(
        &mut Engine::open(demo(), some(0.5)).unwrap(),
        &tokens,
        16,
    ));
    let own = run(Fault::Off);
    assert!(own == run(Fault::Off) && own != plain);
    // Without it the text would differ from here on.
    let mut engine = with(
        Faulty::device(Fault::OffUntil(CHECKS + 3)),
        1 << 20,
        some(0.5),
    );
    let mut sequence = engine.new_sequence().unwrap();
    let mut pass =
        |token: u32| engine.forward(&mut sequence, &[token], emberflow_engine::Logits::Last);
    let error = tokens.iter().find_map(|&token| pass(token).err()).unwrap();
    assert!(error.to_string().contains("was reset"), "{error}");
    let again = pass(40).unwrap_err();
    assert!(again.to_string().contains("opened again"), "{again}");
}

/// Every family runs on a device with the same bits as without, or is refused with a reason and a remedy.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn every_family_is_served_or_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (mut served, mut refused) = (0, 0);
    for case in one_per_family() {
        let path = packed(&case, dir.path(), DType::Q8);
        let model = || Model::open(Container::open(&path).unwrap()).unwrap();
        let held = model();
        let c = held.text().config();
        let expected = match c.ffn_kind.activation {
            _ if c.form.has_gate_top() => Some("top-k"),
            Activation::Gelu | Activation::Xielu { .. } => Some("activation"),
            _ => None,
        };
        let options = Options {
            lane: lane_of(vec![cpu()], 16 << 10),
            ..roomy(64)
        };
        let name = case.file_name().unwrap().to_string_lossy().into_owned();
        match (Engine::open(model(), options), expected) {
            (Ok(mut engine), None) => {
                let tokens = Golden::load(&case, "golden.json").tokens;
                let plain = bits(&all_logits(&mut open(&path, roomy(64)), &tokens, 3));
                let found = bits(&all_logits(&mut engine, &tokens, 3));
                assert!(found == plain, "{name}: {:?}", device_report(&engine));
                served += 1;
            }
            (Err(e), Some(reason)) => {
                let message = e.to_string();
                for told in [reason, "--device none"] {
                    assert!(message.contains(told), "{name}: {message}");
                }
                refused += 1;
            }
            (Ok(_), Some(reason)) => panic!("{name} was not refused for its {reason}"),
            (Err(e), None) => panic!("{name}: {e}"),
        }
    }
    assert!(
        served > 30 && refused > 2,
        "{served} served, {refused} refused"
    );
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn what_a_device_cannot_do_is_refused() {
    let refused = |model: Model, options: Options| match Engine::open(model, options) {
        Err(e) => e.to_string(),
        Ok(_) => panic!("was not refused"),
    };
    let on = |fault| Options {
        lane: lane_of(vec![Faulty::device(fault)], None),
        ..some(0.5)
    };
    let wrong = refused(demo(), on(Fault::Wrong));
    assert!(
        wrong.contains("wrong results") && wrong.contains("--device none"),
        "{wrong}"
    );
    let wrong = refused(demo(), on(Fault::WrongProducts));
    assert!(wrong.contains("wrong results"), "{wrong}");
    let lost = refused(demo(), on(Fault::Submit(3)));
    assert!(lost.contains("was reset"), "{lost}");
    let cpu = || Options {
        lane: lane_of(Vec::from_iter(DeviceChoice::Cpu.open().unwrap()), None),
        ..some(0.5)
    };
    let mapped = Options {
        lab: Lab {
            ablation: Ablation::Mmap,
            profiles: false,
            ..Lab::default()
        },
        ..cpu()
    };
    assert!(refused(demo(), mapped).contains("--policy full"));
    let dirs = tempfile::tempdir().unwrap();
    let model_in = |name: &str, dtype| {
        let dir = tempfile::tempdir_in(&dirs).unwrap().keep();
        let path = packed(&fixtures().join("models").join(name), &dir, dtype);
        Model::open(Container::open(&path).unwrap()).unwrap()
    };
    let model = |name: &str| model_in(name, DType::Q8);
    let of_groups = || Options {
        lane: lane_of(vec![Faulty::of_groups()], None),
        ..some(0.5)
    };
    let scales = refused(model_in("llama2", DType::Q8c), of_groups());
    assert!(scales.contains("--quant q8 or q4"), "{scales}");
    let optional = || Options {
        lane: lane_of(vec![Faulty::of_groups().optional()], None),
        ..some(1.0)
    };
    for (name, dtype, used) in [
        ("llama2", DType::Q8, true),
        ("llama2", DType::Q8c, false),
        ("gelu", DType::Q8, false),
        ("gemma3n", DType::Q8, false),
    ] {
        let engine = Engine::open(model_in(name, dtype), optional()).unwrap();
        assert_eq!(device_report(&engine).is_some(), used, "{name} in {dtype}");
    }
    assert!(refused(model("gelu"), cpu()).contains("Gelu"));
    assert!(refused(model("gemma3n"), cpu()).contains("top-k"));
    let known = Engine::open(model("llama2"), Options { ..cpu() });
    assert!(!matches!(known, Err(Error::Lane(_))));
}
