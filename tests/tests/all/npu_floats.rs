//! NPUs that know floats only: those of 32 bits have the CPU's bits in models with one scale per row, those of 16 bits are a
//! class of their own, whose text does not follow times.

use emberflow_devices::{Device, Provider, device_report};
use emberflow_engine::{Budget, Engine, Model, Options};
use emberflow_kernels::DType;
use emberflow_storage::container::Container;
use emberflow_tests::devices::{lane_of, provider};
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, roomy};

fn on(device: &Device, bytes: u64) -> Options {
    Options {
        lane: lane_of(vec![device.clone()], bytes),
        ..roomy(64)
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn floats_of_32_bits_have_the_cpus_bits() {
    let Some(devices) = provider(Provider::CpuFloats) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let models = ["llama2", "bamboo", "qwen2_moe_dense"];
    for (name, dtype) in models
        .into_iter()
        .flat_map(|name| [(name, DType::Q8c), (name, DType::Q4c)])
    {
        let case = fixtures().join("models").join(name);
        let path = packed(&case, dir.path(), dtype);
        let tokens = Golden::load(&case, "golden.json").tokens;
        let expected = bits(&all_logits(&mut open(&path, roomy(64)), &tokens, 3));
        for (device, chunk) in devices.iter().flat_map(|device| [(device, 1), (device, 5)]) {
            let mut engine = open(&path, on(device, 100 << 20));
            let found = bits(&all_logits(&mut engine, &tokens, chunk));
            let report = device_report(&engine).unwrap();
            assert!(
                found == expected && report.lost.is_none(),
                "{name} in {dtype}: {report:?}"
            );
            assert!(
                report.clusters > 0 && report.numerics == "cpu",
                "{name}: {report:?}"
            );
        }
    }
}

/// Whatever the times, the chunks, the memory and the run: a share of the model is fixed.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn floats_of_16_bits_are_a_class_of_its_own() {
    let Some(devices) = provider(Provider::CpuHalves) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let case = fixtures().join("models").join("bamboo");
    let path = packed(&case, dir.path(), DType::Q8c);
    let tokens = Golden::load(&case, "golden.json").tokens;
    let plain = bits(&all_logits(&mut open(&path, roomy(64)), &tokens, 3));
    let mut all = Vec::new();
    for device in devices {
        for (share, batch, chunk) in [(1.0, 1, 1), (1.0, 4, 5), (0.9, 1, 3), (1.0, 1, 1)] {
            let options = Options {
                budget: Budget::FfnShare(share),
                batch,
                ..on(&device, 60 << 10)
            };
            let mut engine = open(&path, options);
            all.push(bits(&all_logits(&mut engine, &tokens, chunk)));
            let report = device_report(&engine).unwrap();
            assert!(
                report.clusters > 0 && report.numerics.contains("npu:cpu-halves"),
                "{report:?}"
            );
            assert_eq!(report.products_share, 0.0);
        }
    }
    assert!(all[0] != plain);
    assert!(all.iter().all(|bits| *bits == all[0]));
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn other_formats_are_refused_with_what_to_do() {
    let Some([device, _]) = provider(Provider::CpuFloats) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let case = fixtures().join("models").join("llama2");
    let path = packed(&case, dir.path(), DType::Q8);
    let model = Model::open(Container::open(&path).unwrap()).unwrap();
    let error = Engine::open(model, on(&device, 1 << 20)).err().unwrap();
    assert!(error.to_string().contains("--quant q8c"), "{error}");
}
