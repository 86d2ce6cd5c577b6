//! Export is the inverse of an f32 pack, and leaves nothing behind on failure.

use crate::common;
use std::path::{Path, PathBuf};

use emberflow::export::export;
use emberflow::pack::{PackOptions, pack};
use emberflow::packed::Packed;
use emberflow_kernels::DType;
use emberflow_models::config::ModelConfig;
use emberflow_storage::container::Container;

fn fixtures() -> Vec<PathBuf> {
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/models");
    let mut folders: Vec<_> = std::fs::read_dir(models)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    folders.sort();
    folders
}

fn packed(folder: &Path, output: &Path) -> Container {
    packed_as(folder, output, &PackOptions::new(DType::F32))
}

fn packed_as(folder: &Path, output: &Path, options: &PackOptions) -> Container {
    pack(folder, output, options, &mut |_, _| {}).unwrap();
    Container::open(output).unwrap()
}

/// Asserts that two checkpoints have the same tensors, bit for bit.
fn assert_same_weights(first: &Path, second: &Path) {
    let [a, b] = [first, second].map(|f| emberflow_models::open(f).unwrap());
    assert_eq!(a.tensors().len(), b.tensors().len());
    for x in a.tensors() {
        let bits = |c: &dyn emberflow_models::Checkpoint| {
            let mut values = vec![0.0; x.rows * x.cols];
            c.read_rows(x.id, 0, x.rows, &mut values).unwrap();
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let same = bits(a.as_ref()) == bits(b.as_ref());
        assert!(same, "{}: {}", first.display(), x.id);
    }
}

/// Matrices that lie by rows, through the program.
#[test]
fn containers_by_rows_are_exported() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["llama2", "gelu", "mixtral"] {
        let folder = fixtures()
            .into_iter()
            .find(|at| at.ends_with(name))
            .unwrap();
        let path = |of: &str| dir.path().join(format!("{name}{of}")).display().to_string();
        let [source, model] = [folder.display().to_string(), path(".ember")];
        common::json(&["pack", &source, "-o", &model, "--quant", "keep", "--json"]);
        assert!(Container::open(&model).unwrap().banks().is_empty());
        let out = path("-hf");
        common::json(&["export", &model, "-o", &out, "--json"]);
        assert_same_weights(&folder, Path::new(&out));
        let json = common::json(&["verify", &model, "--source", &source, "--json"]);
        assert_eq!(json["source"]["worst_share_of_bound"], 0.0);
    }
}

#[test]
fn other_programs_find_the_special_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let folder = common::exported(dir.path());
    let config = std::fs::read(format!("{folder}/tokenizer_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["bos_token"], "<|endoftext|>");
    assert_eq!(config["eos_token"], "<|endoftext|>");
}

#[test]
fn templates_for_tools_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let folder = common::exported(dir.path());
    let file = format!("{folder}/tokenizer_config.json");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("chat_template");
    std::fs::write(&file, config.to_string()).unwrap();
    std::fs::write(format!("{folder}/chat_template.jinja"), "plain").unwrap();
    let more = format!("{folder}/additional_chat_templates");
    std::fs::create_dir(&more).unwrap();
    std::fs::write(format!("{more}/tool_use.jinja"), "tools").unwrap();
    let packed = path("m.ember");
    let succeed = |args: &[&str]| common::succeed(common::emberflow().args(args));
    succeed(&["pack", &folder, "-o", &packed]);
    for out in [path("again"), path("again.gguf")] {
        succeed(&["export", &packed, "-o", &out]);
        let opened = emberflow_models::open(Path::new(&out)).unwrap();
        assert_eq!(opened.chat_template(), Some("plain"), "{out}");
        assert_eq!(opened.tool_template(), Some("tools"), "{out}");
    }
}

/// Models that no folder can express, with what their refusal says.
const WITHOUT_FOLDER: [(&str, &str); 2] = [
    ("apertus", "an activation with parameters by layer"),
    ("stablelm_parallel", "a LayerNorm of each head"),
];

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn every_fixture_comes_back_bit_for_bit() {
    let folders = fixtures();
    assert!(folders.len() >= 14, "{folders:?}");
    let both = [PackOptions::new(DType::F32), PackOptions::keep()];
    let each = folders
        .iter()
        .flat_map(|folder| both.iter().map(move |how| (folder, how)));
    for (folder, how) in each {
        let dir = tempfile::tempdir().unwrap();
        // FP8 is rounded, and tables of numbers are no floats.
        if how.keep
            && emberflow_models::open(folder)
                .unwrap()
                .tensors()
                .iter()
                .any(is_quantized)
        {
            continue;
        }
        let container = packed_as(folder, &dir.path().join("m.ember"), how);
        let out = dir.path().join("out");
        let exported = export(&container, &out, &mut |_, _| {});
        let refused = WITHOUT_FOLDER
            .iter()
            .find(|(name, _)| folder.ends_with(name));
        if let Some((_, why)) = refused {
            let refusal = exported.unwrap_err().to_string();
            assert!(refusal.contains(why), "{folder:?}: {refusal}");
            continue;
        }
        exported.unwrap_or_else(|e| panic!("{folder:?}: {e}"));
        let [a, b] = [folder, &out].map(|f| emberflow_models::open(f).unwrap());
        let name = a.config().name.clone();
        let found = ModelConfig {
            name,
            ..b.config().clone()
        };
        assert_eq!(a.config(), &found);
        assert_eq!(a.sampling_defaults(), b.sampling_defaults());
        assert_eq!(a.chat_template(), b.chat_template());
        assert_eq!(a.tokenizer_json(), b.tokenizer_json());
        for (x, y) in a.tensors().iter().zip(b.tensors()) {
            assert_eq!((x.id, x.rows, x.cols), (y.id, y.rows, y.cols));
        }
        assert_same_weights(folder, &out);
    }
}

fn is_quantized(of: &emberflow_models::TensorInfo) -> bool {
    !matches!(of.source_dtype.as_str(), "F32" | "F16" | "BF16")
}

/// llama.cpp orders the value heads of a DeltaNet differently, and has a separate name for Nemotron-H
/// with experts.
#[test]
fn what_gguf_has_otherwise_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    for (name, says) in [
        ("qwen3_5", "delta_net"),
        ("nemotron_h_moe", "nemotron_h_moe"),
    ] {
        let folder = fixtures().into_iter().find(|at| at.ends_with(name));
        let file = folder.unwrap().join("model.gguf");
        let container = packed(&file, &dir.path().join(format!("{name}.ember")));
        let out = dir.path().join(name);
        let refusal = export(&container, &out, &mut |_, _| {}).unwrap_err();
        let refusal = refusal.to_string();
        let both = refusal.contains(says) && refusal.contains("has no f");
        assert!(both, "{name}: {refusal}");
        assert!(!out.exists(), "{name}");
    }
}

#[test]
fn a_damaged_container_leaves_no_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.ember");
    let place = {
        let folder = fixtures().into_iter().find(|at| at.ends_with("llama2"));
        let container = packed(&folder.unwrap(), &path);
        let last = container.banks()[0].neurons - 1;
        container.neuron_offset(0, last) as usize
    };
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[place] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let container = Container::open(&path).unwrap();
    let message = export(&container, &dir.path().join("out"), &mut |_, _| {})
        .unwrap_err()
        .to_string();
    assert!(message.contains("layer 0"), "{message}");
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

/// Conversion through GGUF and through a folder give the same output, bit for bit.
#[test]
fn the_demo_model_is_the_same_as_gguf() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let mut answers = Vec::new();
    for (checkpoint, container) in [("demo-hf", "a.ember"), ("demo.gguf", "b.ember")] {
        let (checkpoint, container) = (path(checkpoint), path(container));
        let exported = common::json(&["export", "-o", &checkpoint, "--json"]);
        assert!(exported["bytes"].as_u64().unwrap() > 30_000_000);
        common::json(&[
            "pack",
            &checkpoint,
            "-o",
            &container,
            "--quant",
            "f32",
            "--json",
        ]);
        let run = [
            "run",
            &container,
            "-p",
            "Let\u{2019}s say:\n\n    x += 12;",
            "-n",
            "48",
        ];
        let args = [
            &run[..],
            &["--temp", "0", "--repeat-penalty", "1", "--json"],
        ]
        .concat();
        let report = common::json(&args);
        answers.push(
            [&report["logits_hash"], &report["text"], &report["stop"]].map(ToString::to_string),
        );
        let source = ["verify", &container, "--source", &checkpoint, "--json"];
        assert_eq!(common::json(&source)["source"]["worst_share_of_bound"], 0.0);
    }
    assert_eq!(answers[0], answers[1]);
}

#[test]
fn a_tokenizer_without_a_gguf_form_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = fixtures().into_iter().find(|f| {
        let json = std::fs::read_to_string(f.join("tokenizer.json")).unwrap();
        json.contains("byte_fallback\":true") || json.contains("byte_fallback\": true")
    });
    let Some(folder) = folder else {
        println!("SKIPPED: no fixture has another tokenizer");
        return;
    };
    packed(&folder, &dir.path().join("m.ember"));
    let [model, output] = ["m.ember", "m.gguf"].map(|n| dir.path().join(n).display().to_string());
    let refused = common::call(&["export", &model, "-o", &output]);
    assert_eq!(refused.status.code(), Some(1));
    let message = String::from_utf8_lossy(&refused.stderr);
    assert!(message.contains("byte-level"), "{message}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// q4k matrices survive a GGUF round trip bit for bit, except Down, whose blocks have the other
/// direction.
#[test]
fn q4k_goes_through_gguf_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    // its 256 columns are one super-block
    let [source, first, gguf, second] = ["a.gguf", "a.ember", "b.gguf", "b.ember"].map(path);
    common::json(&["export", "demo-moe", "-o", &source, "--json"]);
    let quant = ["--quant", "q4k", "--embedding-quant", "q4k", "--json"];
    common::json(&[&["pack", &source, "-o", &first][..], &quant].concat());
    let exported = common::json(&["export", &first, "-o", &gguf, "--json"]);
    let whole = common::json(&["export", "demo-moe", "-o", &path("c.gguf"), "--json"]);
    let [exported, whole] = [exported, whole].map(|e| e["bytes"].as_u64().unwrap());
    assert!(2 * exported < whole, "{exported} of {whole}");
    common::json(&[&["pack", &gguf, "-o", &second][..], &quant].concat());
    let [a, b] = [&first, &second].map(|path| Container::open(Path::new(path)).unwrap());
    let mut compared = 0;
    for (a, b) in a.tensors().iter().zip(b.tensors()) {
        assert_eq!((&a.name, a.dtype, a.xxh3), (&b.name, b.dtype, b.xxh3));
        compared += usize::from(a.dtype == DType::Q4k.code());
    }
    assert!(compared > 20, "{compared}");
    let [a, b] = [&a, &b].map(|container| Packed::new(container).unwrap());
    let stored = |packed: &Packed<'_>| {
        let mut all = Vec::new();
        let mut take = |_, neuron: &emberflow::packed::Neuron| {
            all.extend(neuron.stored.concat());
            Ok(())
        };
        packed.neurons(7, &mut take).unwrap();
        all
    };
    assert!(stored(&a) == stored(&b));
}
