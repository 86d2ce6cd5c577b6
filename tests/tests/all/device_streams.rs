//! Prompts mostly computed by a device much smaller than the model: clusters stream through two buffers in its
//! memory. No bit of a text changes, for every family, budget and chunk, and also if it fails midway.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use clap::Parser;
use emberflow::cli::{Cli, Command};
use emberflow::train_predictor;
use emberflow_devices::{Device, device_report};
use emberflow_engine::{Budget, Engine, Lab, Model, Options, Sparsity};
use emberflow_kernels::DType;
use emberflow_storage::trace::Span;
use emberflow_tests::devices::{
    CHECKS, Fault, Faulty, devices, devices_apart, lane_of, plain_devices, plain_devices_apart,
    tiled_devices,
};
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, squeeze};

/// Rows of a pass, mostly computed by a device.
const CHUNK: usize = 128;

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|i| 40 + (i * 31) % 900).collect()
}

fn some(share: f64) -> Options {
    Options {
        budget: Budget::FfnShare(share),
        threads: 2,
        context: 256,
        lab: Lab {
            chunk: CHUNK,
            profiles: false,
            ..Lab::default()
        },
        ..Options::default()
    }
}

fn demo(options: Options) -> Engine {
    Engine::open(Model::demo().unwrap(), options).unwrap()
}

fn on(device: Device, share: f64, held: u64) -> Options {
    Options {
        lane: lane_of(vec![device], held),
        ..some(share)
    }
}

/// The logits of a text from an engine without a device.
fn expected(tokens: &[u32]) -> Vec<u32> {
    let mut plain = demo(some(1.0));
    bits(&all_logits(&mut plain, tokens, 7))
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn prompts_on_a_device_of_a_fraction_of_the_model_change_no_bit() {
    let tokens = text(200);
    let expected = &expected(&tokens);
    // Gates resident and single neurons; neither; everything. None, some and most of it on the device.
    for (share, held) in [
        (0.6, 0),
        (0.6, 200 << 10),
        (0.2, 0),
        (1.0, 0),
        (1.0, 2 << 20),
    ] {
        for device in devices() {
            let mut engine = demo(on(device, share, held));
            let report = device_report(&engine).unwrap();
            let streamed = report.streamed;
            assert!(
                streamed.rows > CHUNK / 2 && streamed.rows < CHUNK,
                "{report:?}"
            );
            assert!(streamed.bytes > 0 && report.bytes <= held, "{report:?}");
            let found = bits(&all_logits(&mut engine, &tokens, CHUNK));
            assert!(&found == expected, "{}: {share} {held}", report.name);
            // Passes of few rows in between, and less memory.
            squeeze(&mut engine, 0.2);
            for chunk in [1, 64] {
                let found = bits(&all_logits(&mut engine, &tokens, chunk));
                assert!(&found == expected, "{}: {share} by {chunk}", report.name);
            }
            assert_eq!(device_report(&engine).unwrap().lost, None);
        }
    }
}

/// In separate memory, shared by the buffers and the hottest clusters: one, some and all.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn prompts_through_a_memory_that_the_cpu_cannot_read_change_no_bit() {
    let tokens = text(200);
    let expected = &expected(&tokens);
    for (share, memory) in [
        (0.6, 600 << 10),
        (0.6, 1 << 20),
        (0.2, 2 << 20),
        (1.0, 1 << 20),
        (1.0, 64 << 20),
    ] {
        for device in devices_apart() {
            let mut engine = demo(on(device, share, memory));
            let report = device_report(&engine).unwrap();
            let streamed = report.streamed;
            assert!(!report.unified && report.clusters > 0, "{report:?}");
            assert!(report.bytes + streamed.bytes <= memory, "{report:?}");
            // A device that holds everything computes all rows in the same way.
            let some = streamed.rows > CHUNK / 2 || report.ffn_share == 1.0;
            assert!(some && streamed.rows < CHUNK, "{report:?}");
            let found = bits(&all_logits(&mut engine, &tokens, CHUNK));
            assert!(&found == expected, "{}: {share} {memory}", report.name);
            squeeze(&mut engine, 0.2);
            for chunk in [1, 64, CHUNK] {
                let found = bits(&all_logits(&mut engine, &tokens, chunk));
                assert!(&found == expected, "{}: {share} by {chunk}", report.name);
            }
            assert_eq!(device_report(&engine).unwrap().lost, None);
        }
    }
    // no memory for a buffer
    for device in devices_apart() {
        let engine = demo(on(device, 0.6, 0));
        assert_eq!(device_report(&engine).unwrap().streamed.rows, 0);
    }
}

/// Rows in tiles, by work item and by work group: held clusters, streamed clusters, and products.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn texts_of_a_device_with_rows_in_tiles_have_the_same_bits() {
    let tokens = text(200);
    let expected = &expected(&tokens);
    for (share, memory) in [(0.6, 1 << 20), (0.2, 2 << 20), (1.0, 64 << 20)] {
        for device in tiled_devices() {
            let mut engine = demo(on(device, share, memory));
            let report = device_report(&engine).unwrap();
            assert!(report.devices[0].kernels.starts_with("tiles"), "{report:?}");
            assert!(report.clusters > 0, "{report:?}");
            assert!(report.bytes + report.streamed.bytes <= memory, "{report:?}");
            for chunk in [CHUNK, 1] {
                let found = bits(&all_logits(&mut engine, &tokens, chunk));
                assert!(
                    &found == expected,
                    "{}: {share} by {chunk}",
                    report.devices[0].kernels
                );
            }
            assert_eq!(device_report(&engine).unwrap().lost, None);
        }
    }
}

/// Gated and ungated, with biases, dense and sparse, in several formats.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn families_and_formats_stream_through_a_device() {
    let dir = tempfile::tempdir().unwrap();
    for (name, dtype) in [
        ("llama2", DType::F32),
        ("opt", DType::F16),
        ("nemotron_bias", DType::Q4),
        ("fatrelu", DType::Q4),
        ("gemma2", DType::F16),
        ("llama_mlp_bias", DType::F32),
        ("bamboo", DType::Q8),
    ] {
        let case = fixtures().join("models").join(name);
        let path = packed(&case, dir.path(), dtype);
        let golden = Golden::load(&case, "golden.json").tokens;
        let tokens: Vec<u32> = golden.iter().copied().cycle().take(CHUNK).collect();
        let mut plain = open(&path, some(1.0));
        let expected = bits(&all_logits(&mut plain, &tokens, 5));
        for (share, held) in [(0.0, 0), (1.0, 60 << 10)] {
            let shared = devices().into_iter().map(|device| (device, held));
            let apart = devices_apart().into_iter().chain(tiled_devices());
            let apart = apart.map(|device| (device, held + (240 << 10)));
            for (device, held) in shared.chain(apart) {
                if !device.facts().multiplies(dtype) {
                    continue;
                }
                // What a device streams follows from measured times, of which some are far off on a busy machine.
                let mut reports = (0..3).map(|_| {
                    let mut engine = open(&path, on(device.clone(), share, held));
                    let report = device_report(&engine).unwrap();
                    let found = bits(&all_logits(&mut engine, &tokens, CHUNK));
                    assert!(
                        found == expected,
                        "{name} in {dtype} at {share}: {report:?}"
                    );
                    report
                });
                // held clusters need not be streamed
                let some = reports.any(|report| report.streamed.rows > 0 || held > 0);
                assert!(some, "{name} at {share} streams nothing through {device:?}");
            }
        }
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_device_lost_in_the_middle_of_a_prompt_ends_on_the_cpu_with_the_same_text() {
    let tokens = text(200);
    let expected = &expected(&tokens);
    let apart = plain_devices_apart()
        .into_iter()
        .map(|d| (d, [700 << 10, 1 << 20]));
    let all = plain_devices().into_iter().map(|d| (d, [0, 300 << 10]));
    for (device, memory) in all.chain(apart) {
        // What the engine does is the same with every device, and the CPU as one is checked soonest.
        let places: &[usize] = match device.facts().name.as_str() {
            "cpu" => &[0, 1, 3, 8, 11],
            _ => &[0, 8],
        };
        for &n in places {
            for fault in [Fault::Submit(CHECKS + n), Fault::Take(CHECKS + n + 1)] {
                for (share, held) in memory.map(|held| (0.5, held)) {
                    let (device, done) = Faulty::counted(&device, fault);
                    let mut engine = demo(on(device, share, held));
                    for _ in 0..2 {
                        let found = bits(&all_logits(&mut engine, &tokens, CHUNK));
                        assert!(&found == expected, "{fault:?}");
                    }
                    let lost = device_report(&engine).unwrap().lost.unwrap();
                    assert!(lost.contains("was reset"), "{lost}");
                    assert!(done.load(Ordering::Relaxed) > CHECKS + n);
                }
            }
        }
    }
}

/// Passes so long that the sums of device-only clusters come in pieces, before all groups of the CPU's.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn totals_in_pieces_change_no_bit() {
    let tokens = text(480);
    let long = || Options {
        context: 512,
        threads: 1,
        lab: Lab {
            chunk: 480,
            profiles: false,
            ..Lab::default()
        },
        ..some(1.0)
    };
    let expected = bits(&all_logits(&mut demo(long()), &tokens, 480));
    let mut layers = 0;
    for held in [64 << 20, 4 << 20] {
        let faults = [0, 1, 2, 3, 10].map(|n| Fault::Take(CHECKS + n + 1));
        for fault in faults.into_iter().chain([Fault::Never]) {
            let (device, done) = Faulty::counted(&Faulty::discrete(Fault::Never), fault);
            let options = Options {
                lane: lane_of(vec![device], held),
                ..long()
            };
            let mut engine = demo(options);
            let found = bits(&all_logits(&mut engine, &tokens, 480));
            assert!(found == expected, "{held}, {fault:?}");
            let device = device_report(&engine).unwrap();
            assert_eq!(device.lost.is_some(), fault != Fault::Never);
            if device.lost.is_none() && device.ffn_share == 1.0 {
                assert_eq!(device.streamed.rows, 0);
                // Six clusters and two.
                layers = (done.load(Ordering::Relaxed) - CHECKS) / 2;
            }
        }
    }
    assert_eq!(layers, 8);
}

/// Rows of several texts in one pass: the device computes the first and the CPU the last ones.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn texts_of_one_pass_are_what_each_is_alone() {
    let texts: Vec<Vec<u32>> = [60, 1, 67].map(text).to_vec();
    let alone: Vec<Vec<u32>> = texts.iter().map(|text| expected(text)).collect();
    for device in devices().into_iter().chain(devices_apart()) {
        let options = Options {
            batch: 3,
            ..on(device, 0.6, 700 << 10)
        };
        let mut engine = demo(options);
        assert!(device_report(&engine).unwrap().streamed.rows > 0);
        let mut sequences: Vec<_> = (0..3).map(|_| engine.new_sequence().unwrap()).collect();
        let mut spans: Vec<_> = (sequences.iter_mut().zip(&texts))
            .map(|(sequence, tokens)| emberflow_engine::Span { sequence, tokens })
            .collect();
        let mut found = Vec::new();
        let mut sink = |_: usize, logits: &[f32]| found.extend_from_slice(logits);
        let wanted = emberflow_engine::Logits::Each(&mut sink);
        engine.forward_batch(&mut spans, wanted).unwrap();
        assert!(bits(&found) == alone.concat());
    }
}

/// The device and compute threads work at the same time, and clusters are read.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_trace_shows_streams_beside_the_cpu_and_reads() {
    for device in devices() {
        let options = Options {
            lab: Lab {
                trace: 4096,
                ..some(0.3).lab
            },
            ..on(device, 0.3, 0)
        };
        let mut engine = demo(options);
        squeeze(&mut engine, 0.3);
        let seen = (0..20).any(|_| {
            all_logits(&mut engine, &text(CHUNK as u32), CHUNK);
            let lanes = engine.trace().unwrap().lanes();
            let lane = |name: &str| {
                let found = lanes.iter().find(|lane| lane.name.starts_with(name));
                &found.unwrap().spans
            };
            let beside = |a: &Span, b: &Span| a.start < b.end && b.start < a.end;
            let with = |name: &str| {
                let its = lane("accelerator").iter();
                its.filter(|a| lane(name).iter().any(|b| beside(a, b)))
                    .count()
            };
            with("compute") > 0 && with("device") > 0
        });
        assert!(seen, "{:?}", device_report(&engine));
    }
}

/// The bundled model with predictors of its neurons.
fn with_predictors(dir: &Path) -> PathBuf {
    let output = dir.join("predictors.ember");
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");
    let line = ["emberflow", "train-predictor", "--json", "-f", text];
    let how = ["--kind", "coarse", "--tokens", "2048", "--floor", "0.9"];
    let to = ["-o", output.to_str().unwrap()];
    let all = line.into_iter().chain(how).chain(to);
    let Command::TrainPredictor(args) = Cli::parse_from(all).command else {
        unreachable!("that is the command");
    };
    train_predictor::command(&args).unwrap();
    output
}

/// A neuron not selected for a row contributes nothing to it, on a device as on the CPU.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn predicted_neurons_of_a_prompt_on_a_device_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = with_predictors(dir.path());
    let tokens = text(200);
    let predicted = |options: Options| Options {
        sparsity: Sparsity::Predicted,
        ..options
    };
    let mut plain = open(&path, predicted(some(1.0)));
    let expected = bits(&all_logits(&mut plain, &tokens, 7));
    let named = plain.counters().looked_at;
    let run = |device: Device, share, memory| {
        let mut engine = open(&path, predicted(on(device, share, memory)));
        let report = device_report(&engine).unwrap();
        // How many follows from times.
        assert!(report.streamed.rows > 0, "{report:?}");
        let found = bits(&all_logits(&mut engine, &tokens, CHUNK));
        assert!(found == expected, "{}: {share} {memory}", report.name);
        engine
    };
    for (share, held, memory) in [(0.3, 0, 600 << 10), (1.0, 300 << 10, 1 << 20)] {
        let shared = devices().into_iter().map(|device| (device, held));
        let apart = devices_apart().into_iter().map(|device| (device, memory));
        for (device, memory) in shared.chain(apart) {
            let mut engine = run(device, share, memory);
            let counters = engine.counters();
            assert!(counters.looked_at <= named && counters.fired <= counters.looked_at);
            squeeze(&mut engine, 0.2);
            for chunk in [1, 64] {
                let found = bits(&all_logits(&mut engine, &tokens, chunk));
                assert!(found == expected, "{share} by {chunk}");
            }
        }
    }
    for (device, memory) in (plain_devices().into_iter().map(|d| (d, 300 << 10)))
        .chain(plain_devices_apart().into_iter().map(|d| (d, 1 << 20)))
    {
        for n in [2, 9] {
            let (device, _) = Faulty::counted(&device, Fault::Take(CHECKS + n));
            let engine = run(device, 0.5, memory);
            assert!(
                device_report(&engine)
                    .unwrap()
                    .lost
                    .unwrap()
                    .contains("was reset")
            );
        }
    }
}
