//! Every kernel variant on the OpenCL devices of this machine. Where there is none the tests pass
//! without a word, unless `EMBERFLOW_NEEDS_OPENCL` is set, as it is in CI.

use emberflow_kernels::DType;
use emberflow_models::config::{Activation, FfnKind};

use super::{DenseShape, Device, DeviceChoice, check, list};

/// All devices of this machine.
fn devices() -> Vec<Device> {
    let count = list().len();
    assert!(
        count > 0 || std::env::var_os("EMBERFLOW_NEEDS_OPENCL").is_none(),
        "no OpenCL device: install pocl-opencl-icd and ocl-icd-libopencl1"
    );
    let open = |number| DeviceChoice::OpenCl(number).open().unwrap().unwrap();
    (0..count).map(open).collect()
}

fn shape(dtype: DType, d: usize, activation: Activation, ungated: bool) -> DenseShape {
    DenseShape {
        dtype,
        d,
        kind: FfnKind {
            activation,
            relu_on_up: matches!(activation, Activation::Relu) && !ungated,
            ungated,
        },
    }
}

#[test]
fn every_format_has_the_cpus_bits_or_a_class_of_its_own() {
    for device in devices() {
        for dtype in [DType::Q4, DType::Q8, DType::F16, DType::BF16, DType::F32] {
            for d in [96, 520, 1100] {
                let shape = shape(dtype, d, Activation::Relu, false);
                let verdict =
                    check::check(device.lease().unwrap().dense().as_mut(), &shape).unwrap();
                let name = &device.facts().name;
                assert!(
                    verdict.same_bits || !name.contains("pthread"),
                    "{name}: {dtype} rows of {d}: {verdict:?}"
                );
            }
        }
    }
}

#[test]
fn every_activation_has_the_cpus_bits() {
    let activations = [
        Activation::FatRelu { threshold: 0.01 },
        Activation::Relu2,
        Activation::Silu,
        Activation::GeluTanh,
    ];
    for device in devices() {
        for activation in activations {
            for ungated in [false, true] {
                let shape = shape(DType::Q4, 224, activation, ungated);
                let verdict =
                    check::check(device.lease().unwrap().dense().as_mut(), &shape).unwrap();
                let name = &device.facts().name;
                assert!(
                    verdict.same_bits || !name.contains("pthread"),
                    "{name}: {activation:?}, ungated {ungated}: {verdict:?}"
                );
            }
        }
    }
}

#[test]
fn names_of_devices() {
    let parse = |name: &str| name.parse::<DeviceChoice>();
    assert_eq!(parse("none"), Ok(DeviceChoice::None));
    assert_eq!(parse("opencl"), Ok(DeviceChoice::OpenCl(0)));
    assert_eq!(parse("opencl:3"), Ok(DeviceChoice::OpenCl(3)));
    assert!(parse("opencl:x").unwrap_err().contains("opencl:N"));
    assert!(DeviceChoice::None.open().unwrap().is_none());
    let missing = DeviceChoice::OpenCl(999).open().unwrap_err().to_string();
    assert!(missing.contains("OpenCL"), "{missing}");
}
