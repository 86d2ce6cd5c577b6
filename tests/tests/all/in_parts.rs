//! Prompts' passes in parts: the CPU mixes one part while a device computes the FFN of another. No bit of a text changes,
//! whatever mixers a model has, and also if the device fails midway or the pass yields.

use emberflow_engine::device::Device;
use emberflow_engine::{Budget, Engine, Lab, Model, Options, PassOrder};
use emberflow_kernels::DType;
use emberflow_storage::trace::Span;
use emberflow_tests::devices::{CHECKS, Fault, Faulty, devices, devices_apart, plain_devices};
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, squeeze};

/// Rows of a pass: more than three parts of [`PART`] rows, and a shorter one.
const CHUNK: usize = 110;

/// Rows of a part.
const PART: usize = 32;

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|i| 40 + (i * 31) % 900).collect()
}

fn some(share: f64, order: PassOrder) -> Options {
    Options {
        budget: Budget::FfnShare(share),
        threads: 2,
        context: 256,
        lab: Lab {
            chunk: CHUNK,
            order,
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
        let apart = devices_apart()
            .into_iter()
            .map(|device| (device, 300 << 10));
        for (device, held) in shared.chain(apart) {
            if !device.facts().multiplies(dtype) {
                continue;
            }
            for share in [0.0, 1.0] {
                let mut engine = open(&path, on(device.clone(), share, held));
                let found = bits(&all_logits(&mut engine, &tokens, CHUNK));
                let report = engine.device().unwrap();
                assert!(found == expected, "{name} in {dtype}: {report:?}");
                assert_eq!((report.in_parts, report.lost), (2, None), "{name}");
            }
        }
    }
}
