//! Layers whose outliers are pruned: the same bits whatever budget, threads, chunks, batch and devices, for mixers and
//! FFNs of all kinds; and metadata that is damaged.

use std::path::{Path, PathBuf};

use emberflow::rewrite::{self, Changed};
use emberflow_devices::{Device, device_report};
use emberflow_engine::meta::{ContainerMeta, Pruned};
use emberflow_engine::{Lab, Logits, Model, Options, Probe, Span};
use emberflow_kernels::DType;
use emberflow_storage::container::Container;
use emberflow_tests::devices::{devices, devices_apart, lane_of};
use emberflow_tests::{Golden, all_logits, bits, case, give, open, packed, roomy, squeeze};

/// Rows of a pass.
const CHUNK: usize = 110;

/// A copy of a container in which these layers are pruned.
fn pruned(path: &Path, layers: &[u32]) -> PathBuf {
    let container = Container::open(path).unwrap();
    let mut meta = ContainerMeta::parse(container.meta(), path).unwrap();
    meta.pruned = Some(Pruned {
        layers: layers.to_vec(),
        loss_percent: 0.25,
        bound_percent: 0.5,
        tokens: 100,
        numerics: "cpu".into(),
    });
    let output = path.with_extension("pruned");
    let changed = Changed {
        meta: Some(&serde_json::to_vec(&meta).unwrap()),
        ..Changed::default()
    };
    rewrite::copy(&container, &output, changed).unwrap();
    output
}

/// The fixture with every second layer pruned, from the first on, the file without pruning, and a prompt.
fn fixture(name: &str, dtype: DType, dir: &Path) -> (PathBuf, PathBuf, Vec<u32>) {
    let plain = packed(&case(name), dir, dtype);
    let container = Container::open(&plain).unwrap();
    let meta = ContainerMeta::parse(container.meta(), &plain).unwrap();
    let layers: Vec<u32> = (0..meta.config.layers).step_by(2).collect();
    let tokens = Golden::load(&case(name), "golden.json").tokens;
    let prompt = tokens.into_iter().cycle().take(2 * CHUNK - 30).collect();
    (pruned(&plain, &layers), plain, prompt)
}

fn some(threads: usize) -> Options {
    Options {
        threads,
        batch: 2,
        lab: Lab {
            chunk: CHUNK,
            profiles: false,
            ..Lab::default()
        },
        ..roomy(256)
    }
}

fn on(device: Device, held: u64) -> Options {
    Options {
        lane: lane_of(vec![device], held),
        ..some(2)
    }
}

/// Attention, short convolutions, DeltaNets, Mamba-2 and latent attention; FFNs with and without zeros, experts, scaled rows
/// of experts, an FFN beside experts, experts of another width, further residual streams.
const FIXTURES: [&str; 12] = [
    "llama2",
    "gemma2",
    "lfm2",
    "qwen3_5",
    "nemotron_h",
    "bamboo",
    "qwen3_moe",
    "llama4",
    "gemma4_moe",
    "nemotron_h_latent",
    "deepseek_v3",
    "gemma3n",
];

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn budgets_threads_and_chunks_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    for (name, dtype) in FIXTURES
        .into_iter()
        .zip([DType::Q8c, DType::Q4c].into_iter().cycle())
    {
        let (path, plain, prompt) = fixture(name, dtype, dir.path());
        let mut engine = open(&path, some(2));
        let expected = bits(&all_logits(&mut engine, &prompt, CHUNK));
        let unpruned = bits(&all_logits(&mut open(&plain, some(2)), &prompt, CHUNK));
        assert!(unpruned != expected, "{name}: nothing is pruned");
        assert!(
            bits(&all_logits(&mut engine, &prompt, 7)) == expected,
            "{name}"
        );
        give(&mut engine, 0.0);
        assert!(
            bits(&all_logits(&mut engine, &prompt, CHUNK)) == expected,
            "{name}: budget"
        );
        // Two texts in one pass, of one token each.
        let [mut first, mut second] = [0, 1].map(|_| engine.new_sequence().unwrap());
        let vocab = engine.config().vocab as usize;
        for (i, tokens) in prompt.chunks(1).enumerate().take(20) {
            let spans = [&mut first, &mut second].map(|sequence| Span { sequence, tokens });
            let mut rows = Vec::new();
            let mut sink = |_: usize, row: &[f32]| rows.push(bits(row));
            (engine.forward_batch(&mut Vec::from(spans), Logits::Each(&mut sink))).unwrap();
            for row in rows {
                assert!(
                    row == expected[i * vocab..][..vocab],
                    "{name}: batch at {i}"
                );
            }
        }
        let mut engine = open(&path, some(3));
        assert!(
            bits(&all_logits(&mut engine, &prompt, 64)) == expected,
            "{name}: threads"
        );
        Probe::new(&mut engine).set_pruned(|_| false);
        assert!(
            bits(&all_logits(&mut engine, &prompt, CHUNK)) == unpruned,
            "{name}"
        );
    }
}

/// With devices that share memory and others.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn devices_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut with_devices = 0;
    for (name, dtype) in [
        ("llama2", DType::Q8c),
        ("lfm2", DType::Q4c),
        ("nemotron_h", DType::Q8c),
        ("bamboo", DType::Q4c),
        ("qwen3_moe", DType::Q8c),
    ] {
        let (path, _, prompt) = fixture(name, dtype, dir.path());
        let mut plain = open(&path, some(2));
        let expected = bits(&all_logits(&mut plain, &prompt, CHUNK));
        let shared = devices().into_iter().map(|device| (device, 0));
        let apart = devices_apart().into_iter().map(|device| (device, 2 << 20));
        for (device, held) in shared.chain(apart) {
            // OpenCL knows no tokens with one scale.
            if !device.facts().multiplies(dtype) {
                continue;
            }
            let mut engine = open(&path, on(device, held));
            for share in [1.0, 0.2] {
                squeeze(&mut engine, share);
                let found = bits(&all_logits(&mut engine, &prompt, CHUNK));
                let report = device_report(&engine).unwrap();
                assert!(found == expected, "{name} {share}: {report:?}");
                assert_eq!(report.lost, None, "{name}");
            }
            with_devices += 1;
        }
    }
    assert!(with_devices >= 10, "{with_devices}");
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn damaged_metadata_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let plain = packed(&case("llama2"), dir.path(), DType::Q8c);
    for layers in [&[9999][..], &[0, u32::MAX], &[1, 0], &[0, 0]] {
        let container = Container::open(&plain).unwrap();
        let text = String::from_utf8(container.meta().to_vec()).unwrap();
        let pruned = format!(
            "{{\"pruned\":{{\"layers\":{layers:?},\"loss_percent\":0.1,\"bound_percent\":1,\"tokens\":9}},{}",
            &text[1..]
        );
        let output = plain.with_extension("damaged");
        let changed = Changed {
            meta: Some(pruned.as_bytes()),
            ..Changed::default()
        };
        rewrite::copy(&container, &output, changed).unwrap();
        let Err(error) = Model::load(&output) else {
            panic!("{layers:?} is accepted");
        };
        assert!(error.to_string().contains("pruned layers"), "{error}");
    }
}
