//! Every kernel variant on the OpenCL devices of this machine, and the graphs of NPUs on ONNX Runtime's own kernels. What is
//! not there is passed over without a word, unless `EMBERFLOW_NEEDS_OPENCL` and `EMBERFLOW_NEEDS_ONNXRUNTIME` are set, as
//! they are in CI.

use emberflow_kernels::DType;
use emberflow_models::config::{Activation, FfnKind};

use super::{
    DenseShape, Device, DeviceChoice, DeviceChoices, Program, Provider, TokenScales, check, list,
};

/// The NPU that processors stand in for.
fn npu() -> Option<Device> {
    let opened = DeviceChoice::Npu(Provider::for_tests().unwrap()).open();
    let needed = std::env::var_os("EMBERFLOW_NEEDS_ONNXRUNTIME").is_some();
    assert!(opened.is_ok() || !needed, "{opened:?}");
    opened.ok().flatten()
}

/// All devices of this machine, and an NPU.
fn devices() -> Vec<Device> {
    opencl_devices().into_iter().chain(npu()).collect()
}

/// All OpenCL devices of this machine.
pub(super) fn opencl_devices() -> Vec<Device> {
    let count = list().len();
    assert!(
        count > 0 || std::env::var_os("EMBERFLOW_NEEDS_OPENCL").is_none(),
        "no OpenCL device: install pocl-opencl-icd and ocl-icd-libopencl1"
    );
    let open = |number| DeviceChoice::OpenCl(number).open().unwrap().unwrap();
    (0..count).map(open).collect()
}

/// A format with the scales that tokens of a model with such rows may have.
fn scales_of(dtype: DType) -> Vec<(DType, TokenScales)> {
    let usual = TokenScales::of(dtype);
    let both = dtype.is_grouped() && usual != TokenScales::One;
    let also = both.then_some(TokenScales::One);
    std::iter::once(usual)
        .chain(also)
        .map(|scales| (dtype, scales))
        .collect()
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
        for dtype in [
            DType::Q4,
            DType::Q4k,
            DType::Q8,
            DType::Q8c,
            DType::Q4c,
            DType::F16,
            DType::BF16,
            DType::F32,
        ] {
            if !device.facts().multiplies(dtype) {
                continue;
            }
            let one_scale = |of: &(DType, TokenScales)| of.1 == TokenScales::One;
            let known = |of: &(DType, TokenScales)| device.facts().per_channel || !one_scale(of);
            let all = scales_of(dtype).into_iter().filter(known);
            for ((_, scales), d) in all.flat_map(|of| [96, 520, 1100].map(|d| (of, d))) {
                let shape = shape(dtype, d, Activation::Relu, false);
                let verdict =
                    check::check(device.lease().unwrap().backend().as_mut(), &shape, scales)
                        .unwrap();
                let name = &device.facts().name;
                assert!(
                    verdict.same_bits || !(name.contains("pthread") || name.contains("npu")),
                    "{name}: {dtype} rows of {d}, {scales:?}: {verdict:?}"
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
        // limits that many of the check's products pass
        Activation::ClampedSilu { limit: 0.25 },
        Activation::ClampedSwiglu {
            limit: 0.25,
            alpha: 1.702,
        },
    ];
    for device in devices() {
        for activation in activations {
            for ungated in [false, true] {
                let shape = shape(DType::Q4, 224, activation, ungated);
                let scales = TokenScales::ByGroup;
                let verdict =
                    check::check(device.lease().unwrap().backend().as_mut(), &shape, scales)
                        .unwrap();
                let name = &device.facts().name;
                assert!(
                    verdict.same_bits || !(name.contains("pthread") || name.contains("npu")),
                    "{name}: {activation:?}, ungated {ungated}: {verdict:?}"
                );
            }
        }
    }
}

/// What devices do not know is refused by name, before anything is made; everything else is served (the
/// tests above compare it).
#[test]
fn formats_and_activations_are_known_or_refused_by_name() {
    let known = [
        DType::Q4,
        DType::Q4k,
        DType::Q8,
        DType::F16,
        DType::BF16,
        DType::F32,
    ];
    for dtype in known {
        assert_eq!(shape(dtype, 96, Activation::Relu, true).unsupported(), None);
    }
    let refused = [
        (shape(DType::Mxfp4, 256, Activation::Relu, false), "mxfp4"),
        (shape(DType::Q4, 256, Activation::Gelu, false), "Gelu"),
    ];
    for (shape, told) in &refused {
        let why = shape.unsupported().unwrap();
        assert!(why.contains(told), "{why}");
        let packs = why.contains("--quant q4");
        assert_eq!(packs, !known.contains(&shape.dtype), "{why}");
        for device in devices() {
            let error = device
                .lease()
                .unwrap()
                .backend()
                .prepare(&Program::Ffn(*shape))
                .unwrap_err();
            assert!(error.to_string().contains(&why), "{error}");
        }
    }
}

/// Products too, and floats are refused by name.
#[test]
fn npus_multiply_integers() {
    let Some(device) = npu() else { return };
    let lease = device.lease().unwrap();
    let formats = [DType::Q4, DType::Q4k, DType::Q8, DType::Q8c, DType::Q4c];
    for (dtype, scales) in formats.into_iter().flat_map(scales_of) {
        for cols in [96, 530, 1100] {
            assert!(
                lease.prepare_products(dtype, cols, scales).unwrap(),
                "{dtype} {cols} {scales:?}"
            );
        }
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let program = Program::Ffn(shape(dtype, 96, Activation::Relu, false));
        let refused = lease.backend().prepare(&program).unwrap_err().to_string();
        let told = [dtype.name(), "--quant q8", &device.facts().name];
        assert!(told.iter().all(|told| refused.contains(told)), "{refused}");
    }
}

#[test]
fn names_of_devices() {
    let parse = |name: &str| name.parse::<DeviceChoice>();
    assert_eq!(parse("none"), Ok(DeviceChoice::None));
    assert_eq!(parse("opencl"), Ok(DeviceChoice::OpenCl(0)));
    assert_eq!(parse("opencl:3"), Ok(DeviceChoice::OpenCl(3)));
    assert!(parse("opencl:x").unwrap_err().contains("opencl:N"));
    assert_eq!(parse("npu:cpu"), Ok(DeviceChoice::Npu(Provider::Cpu)));
    assert_eq!(parse("npu"), Ok(DeviceChoice::Npu(Provider::HERE)));
    assert!(parse("npu:x").unwrap_err().contains("npu:openvino"));
    let list = |names: &str| names.parse::<DeviceChoices>();
    let both = [DeviceChoice::OpenCl(0), DeviceChoice::Npu(Provider::Cpu)];
    assert_eq!(list("opencl,npu:cpu").unwrap().0, both);
    assert_eq!(list("auto").unwrap().0, [DeviceChoice::Auto]);
    for (names, told) in [
        ("opencl,opencl:0", "twice"),
        ("none,npu", "alone"),
        ("npu,auto", "alone"),
        ("opencl,", "no device is called"),
        ("opencl:0,opencl:1,npu,cpu", "at most 3"),
    ] {
        assert!(list(names).unwrap_err().contains(told), "{names}");
    }
    assert!(DeviceChoice::None.open().unwrap().is_none());
    let missing = DeviceChoice::OpenCl(999).open().unwrap_err().to_string();
    assert!(missing.contains("OpenCL"), "{missing}");
}
