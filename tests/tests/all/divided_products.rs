//! Products of prompts that the CPU and devices divide by weights and by tokens, as the solver decides from their times:
//! tokens that fill no static graph are left to others, and no bit changes.

use std::path::Path;

use emberflow_devices::{Device, DeviceReport, Verdicts, device_report};
use emberflow_engine::{Engine, Lab, Options};
use emberflow_kernels::DType;
use emberflow_tests::devices::{Faulty, lane_of, plain_devices};
use emberflow_tests::{all_logits, bits, case, open, packed, roomy};
use serde_json::{Value, json};

/// Tokens of the prompts: one more than the static graphs have.
const TOKENS: usize = 33;
const GRAPHS: &[usize] = &[32];

/// Seconds of a weight for a number of tokens.
type Seconds = fn(usize) -> f64;

/// Seconds of a weight: of the CPU for a token, and of each device by its name.
struct Prescribed<'a> {
    cpu: f64,
    devices: &'a [(&'a str, Seconds)],
}

impl Prescribed<'_> {
    /// Replaces the times of all products in a file of verdicts.
    fn write(&self, file: &Path) {
        let text = std::fs::read_to_string(file).unwrap();
        let mut verdicts: Value = serde_json::from_str(&text).unwrap();
        let mut replaced = 0;
        for entry in verdicts["verdicts"].as_array_mut().unwrap() {
            let name = entry["device"].as_str().unwrap().to_owned();
            let times = entry["found"].get_mut("products");
            let (_, seconds) = self.devices.iter().find(|of| of.0 == name).unwrap();
            for (of, times) in times.into_iter().flat_map(|of| of.as_object_mut().unwrap()) {
                for sample in times.as_array_mut().unwrap() {
                    let n = sample["n"].as_u64().unwrap() as usize;
                    let weight = if of == "cpu" {
                        self.cpu * n as f64
                    } else {
                        seconds(n)
                    };
                    *sample = json!({"n": n, "launch": 0.0, "weight": weight});
                    replaced += 1;
                }
            }
        }
        assert!(replaced > 0, "{text}");
        std::fs::write(file, verdicts.to_string()).unwrap();
    }
}

fn options(devices: Vec<Device>) -> Options {
    let plain = roomy(64);
    Options {
        lane: lane_of(devices, 0),
        lab: Lab {
            chunk: TOKENS,
            trace: 4096,
            ..plain.lab
        },
        ..plain
    }
}

/// Runs a prompt on devices with these times, and compares its bits. Returns the engine.
fn with(path: &Path, devices: &[Device], times: &Prescribed<'_>) -> Engine {
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|i| 3 + (i * 31) % 300).collect();
    let expected = bits(&all_logits(&mut open(path, roomy(64)), &tokens, TOKENS));
    let dir = tempfile::tempdir().unwrap();
    let file = Verdicts::at(dir.path().join("devices.json"));
    let all = || {
        let with = |device: &Device| device.clone().with_verdicts(Some(file.clone()));
        options(devices.iter().map(with).collect())
    };
    // Measured, and then as prescribed.
    drop(open(path, all()));
    times.write(file.path());
    let mut engine = open(path, all());
    for chunk in [TOKENS, 7, 1, TOKENS] {
        let found = bits(&all_logits(&mut engine, &tokens, chunk));
        assert!(found == expected, "{chunk}: {:?}", device_report(&engine));
    }
    engine
}

/// Numbers of tokens of the products that a device has computed for more than a few.
fn tokens_of(engine: &Engine, lane: &str) -> Vec<u64> {
    let lanes = engine.trace().unwrap().lanes();
    let lane = lanes.iter().find(|of| of.name == lane).unwrap();
    let products = lane
        .spans
        .iter()
        .filter(|span| span.kind.name == "products");
    let tokens = products.map(|span| span.values[0]);
    tokens.filter(|&tokens| tokens > 7).collect()
}

fn report(engine: &Engine) -> DeviceReport {
    let report = device_report(engine).unwrap();
    assert_eq!(report.lost, None);
    report
}

/// A device with a graph for 32 tokens gets these of 33 of all rows, where another run of the graph takes longer than the CPU
/// for the last token; some of the rows, where it is slower; and all tokens, padded, where another run takes less.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_token_that_fills_no_graph_is_left_to_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let path = packed(&case("llama2"), dir.path(), DType::Q8);
    for device in plain_devices() {
        let name = device.facts().name.clone();
        let device = [Faulty::of_graphs(&device, GRAPHS)];
        let run = |seconds: Seconds| {
            let (cpu, devices) = (1e-9, &[(&*name, seconds)][..]);
            let engine = with(&path, &device, &Prescribed { cpu, devices });
            let tokens = tokens_of(&engine, "accelerator");
            (report(&engine), tokens)
        };
        let most = (TOKENS - 1) as f64 / TOKENS as f64;
        let whole = |tokens: &[u64], n: u64| !tokens.is_empty() && tokens.iter().all(|&of| of == n);

        let (report, tokens) = run(|_| 0.9e-9);
        assert!(whole(&tokens, 32), "{name}: {tokens:?}");
        assert!((report.prompt_share - most).abs() < 1e-9, "{report:?}");

        let (report, tokens) = run(|_| 16e-9);
        assert!(whole(&tokens, 32), "{name}: {tokens:?}");
        let share = report.prompt_share / most;
        // 16 r = 33 (1 − r) + r
        assert!((share - 33.0 / 48.0).abs() < 0.02, "{share}: {report:?}");

        let (report, tokens) = run(|_| 0.1e-9);
        assert!(whole(&tokens, 33), "{name}: {tokens:?}");
        assert!(report.prompt_share > most, "{report:?}");
    }
}

/// The token that fills no graph goes to another device where the CPU is slower: of each two devices of this machine, in either
/// order of `--device`.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_token_that_fills_no_graph_is_left_to_the_faster_device() {
    let dir = tempfile::tempdir().unwrap();
    let path = packed(&case("llama2"), dir.path(), DType::Q8);
    let all = plain_devices();
    let names: Vec<String> = all
        .iter()
        .map(|device| device.facts().name.clone())
        .collect();
    for (gpu, npu) in (0..all.len()).flat_map(|gpu| (0..all.len()).map(move |npu| (gpu, npu))) {
        if names[gpu] == names[npu] {
            continue;
        }
        for reversed in [false, true] {
            let any = Faulty::of_graphs(&plain_devices()[gpu], &[]);
            let mut devices = vec![any, Faulty::of_graphs(&plain_devices()[npu], GRAPHS)];
            if reversed {
                devices.reverse();
            }
            let its: [(&str, Seconds); 2] = [
                (&names[gpu], |n| 1e-9 * n as f64),
                (&names[npu], |_| 0.9e-9),
            ];
            let times = Prescribed {
                cpu: 100e-9,
                devices: &its,
            };
            let engine = with(&path, &devices, &times);
            let lanes = ["accelerator", "accelerator 2"];
            let lane = lanes[usize::from(!reversed)];
            let tokens = tokens_of(&engine, lane);
            let full = tokens.iter().all(|&of| of == 32) && !tokens.is_empty();
            assert!(full, "{} beside {}: {tokens:?}", names[npu], names[gpu]);
            assert!(tokens_of(&engine, lanes[usize::from(reversed)]).is_empty());
            // More than the 32 tokens of the graph.
            let report = report(&engine);
            assert!(report.prompt_share > 0.98, "{report:?}");
        }
    }
}
