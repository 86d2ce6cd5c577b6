//! `verify` on invalid containers.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::call;
use emberflow::pack::{PackOptions, pack};
use emberflow_kernels::DType;
use emberflow_storage::container::{Container, Spec, Writer};

fn fixture(name: &str) -> PathBuf {
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/models");
    Path::new(models).join(name)
}

fn packed(dir: &Path) -> PathBuf {
    let path = dir.join("m.ember");
    let options = PackOptions::new(DType::F32);
    pack(&fixture("relu"), &path, &options, &mut |_, _| {}).unwrap();
    path
}

/// Exit code and JSON of a `verify` of `path` against the fixture `source`.
fn verify(path: &Path, source: Option<&str>) -> (Option<i32>, serde_json::Value) {
    let path = path.display().to_string();
    let folder = source.map(|s| fixture(s).display().to_string());
    let mut args = vec!["verify", &path, "--json"];
    if let Some(folder) = &folder {
        args.extend(["--source", folder]);
    }
    let output = call(&args);
    let json = serde_json::from_slice(&output.stdout).unwrap();
    (output.status.code(), json)
}

/// A container like that at `path`, with valid checksums but another spec: shorter parts are
/// truncated.
fn altered(path: &Path, change: impl FnOnce(&mut Spec)) -> PathBuf {
    let container = Container::open(path).unwrap();
    let g = *container.geometry();
    let mut spec = container.spec("altered".into());
    change(&mut spec);
    let output = path.with_extension("altered");
    let mut writer = Writer::create(&output, spec.clone()).unwrap();
    for (i, tensor) in spec.tensors.iter().enumerate() {
        let entry = container.tensor(&tensor.name).unwrap();
        let mut bytes = vec![0; entry.len as usize];
        container.read_tensor(entry, &mut bytes).unwrap();
        let mut sink = writer.begin_tensor(i).unwrap();
        sink.append(&bytes[..tensor.len as usize]).unwrap();
        sink.finish().unwrap();
    }
    for (i, bank) in spec.banks.iter().enumerate() {
        let mut sink = writer.begin_bank(i).unwrap();
        for n in 0..bank.neurons {
            let mut bundle = vec![0; g.stride as usize];
            let offset = container.neuron_offset(i, n);
            container.file().read_exact_at(&mut bundle, offset).unwrap();
            let rest = g.gate_span as usize;
            sink.append_neuron(
                &bundle[..g.gate_len as usize],
                &bundle[rest..rest + g.rest_len as usize],
                &[],
            )
            .unwrap();
        }
        sink.finish().unwrap();
    }
    writer.finish().unwrap();
    output
}

fn expect_fault(path: &Path, source: Option<&str>, what: &str) {
    let (code, json) = verify(path, source);
    assert_eq!((code, &json["ok"]), (Some(3), &false.into()), "{json}");
    assert!(json["problems"].to_string().contains(what), "{json}");
}

#[test]
fn a_copy_verifies_and_missing_rows_tensors_and_neurons_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = packed(dir.path());
    let same = altered(&path, |_| {});
    let (code, json) = verify(&same, Some("relu"));
    assert_eq!((code, &json["ok"]), (Some(0), &true.into()), "{json}");

    let cut = altered(&path, |spec| {
        let t = &mut spec.tensors[0];
        t.len -= t.len / t.dims[0];
        t.dims[0] -= 1;
    });
    expect_fault(&cut, Some("relu"), "has shape");
    let cut = altered(&path, |spec| {
        spec.tensors.remove(1);
    });
    expect_fault(&cut, Some("relu"), "tensors that are not in bundles");
    let cut = altered(&path, |spec| spec.banks[1].neurons -= 1);
    expect_fault(&cut, None, "a bank has");
    let cut = altered(&path, |spec| {
        spec.banks.pop();
    });
    expect_fault(&cut, None, "expected 2");
    expect_fault(&path, Some("gelu"), "has fingerprint");
}

#[test]
fn json_is_printed_whatever_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let path = packed(dir.path());
    let good = std::fs::read(&path).unwrap();
    let (code, json) = verify(&dir.path().join("none"), None);
    assert_eq!((code, &json["ok"]), (Some(1), &false.into()), "{json}");
    assert!(json["problems"].to_string().contains("none"), "{json}");
    let (code, json) = verify(&path, Some("no such model"));
    assert_eq!((code, &json["ok"]), (Some(1), &false.into()), "{json}");
    let container = Container::open(&path).unwrap();
    let at = |name: &str| {
        let section = container.section_sizes();
        let found = section.iter().find(|s| s.section.name() == name);
        found.unwrap().offset as usize
    };
    for (place, what) in [
        (0, "neither GGUF files nor packed models"),
        (40, "superblock"),
        (at("metadata"), "metadata"),
    ] {
        let mut bad = good.clone();
        bad[place] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        expect_fault(&path, None, what);
    }
}
