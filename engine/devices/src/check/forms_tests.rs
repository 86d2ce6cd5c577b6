//! Every form of the kernels on the OpenCL devices of this machine beside the CPU, bit for bit, used there or not: odd widths,
//! short clusters, masks, biases, denormals, infinities. Forms with integer dot products are run by plain arithmetic where a
//! device has none.

use emberflow_kernels::DType;
use emberflow_models::config::{Activation, FfnKind};

use super::products::apart;
use super::reference::{Case, Reference, TokenScales, cases};
use crate::tests::opencl_devices;
use crate::{Backend, DenseShape, Dots, Form, Kernels, OpenCl, Order, Program, Team, list};

/// Devices with memories of their own, so that both orders are possible.
fn devices() -> Vec<OpenCl> {
    let count = opencl_devices().len();
    assert_eq!(count, list().len());
    let open = |number| OpenCl::open(number, true).unwrap();
    (0..count).map(open).collect()
}

/// All kernels for a format: each form for few tokens and for many.
fn kernels(dtype: DType) -> Vec<Kernels> {
    let dots: &[Dots] = match dtype.is_grouped() {
        true => &[Dots::Widened, Dots::Packed],
        false => &[Dots::Widened],
    };
    let mut all = Vec::new();
    for order in [Order::Rows, Order::Tiles] {
        for team in [Team::Alone, Team::Local, Team::Block] {
            for &dots in dots {
                let [few, many] = [Form { team, dots }; 2];
                all.push(Kernels { order, few, many });
            }
        }
    }
    all
}

/// Compares all forms for a shape; those of one device that differ.
fn compared(device: &mut OpenCl, shape: &DenseShape) -> Vec<String> {
    let mut reference = Reference::new(shape, TokenScales::of(shape.dtype)).unwrap();
    let mut differ = Vec::new();
    for kernels in kernels(shape.dtype) {
        device.force(kernels);
        let part = reference.prepare(device).unwrap();
        let hard = [f32::INFINITY, 1e-42, 3e38].map(|size| Case::new(5, size).biased());
        // 8 rows an item of wide sums, and 4 that are left; those of masks.
        let many = [20, 72].map(|rows| Case::new(rows, 1.0).biased().totals());
        let hard = hard
            .into_iter()
            .chain(many)
            .chain([Case::new(72, 1.0).masked()]);
        for case in cases().into_iter().chain(hard) {
            let apart = reference.compare(device, part, &[case]).unwrap();
            if !apart.same_bits {
                differ.push(format!("{kernels}, {case:?}: {apart:?}"));
            }
        }
    }
    differ
}

fn shape(dtype: DType, d: usize, activation: Activation, ungated: bool) -> DenseShape {
    DenseShape {
        dtype,
        d,
        kind: FfnKind {
            activation,
            relu_on_up: matches!(activation, Activation::Relu2),
            ungated,
        },
    }
}

#[test]
fn every_form_has_the_cpus_bits() {
    for mut device in devices() {
        for shape in [
            // Three groups; more than two chunks, the last group short; elements that fill no unit, and no step.
            shape(DType::Q4, 96, Activation::Relu, false),
            shape(DType::Q4, 1100, Activation::Silu, false),
            shape(DType::Q4k, 96, Activation::Relu, false),
            shape(DType::Q4k, 1100, Activation::Silu, false),
            shape(DType::Q8, 530, Activation::Relu2, false),
            shape(DType::Q8, 96, Activation::FatRelu { threshold: 0.01 }, true),
            shape(DType::F16, 1100, Activation::Relu, false),
            shape(DType::BF16, 99, Activation::Silu, true),
            shape(DType::F32, 98, Activation::GeluTanh, false),
            // Infinite inputs make NaN gates, which the limit bounds, and NaN Ups, which it does not.
            shape(
                DType::F32,
                98,
                Activation::ClampedSilu { limit: 7.0 },
                false,
            ),
        ] {
            let differ = compared(&mut device, &shape);
            assert!(differ.is_empty(), "{shape:?}: {differ:#?}");
        }
    }
}

#[test]
fn every_form_has_the_cpus_products() {
    for mut device in devices() {
        for (dtype, cols) in [
            (DType::Q4, 96),
            (DType::Q4, 1100),
            (DType::Q4k, 96),
            (DType::Q4k, 1100),
            (DType::Q8, 530),
            (DType::F16, 1100),
            (DType::BF16, 99),
            (DType::F32, 98),
        ] {
            for kernels in kernels(dtype) {
                // How neurons lie is how matrices do.
                device.force(kernels);
                let ffn = shape(DType::Q4, 96, Activation::Relu, false);
                device.prepare(&Program::Ffn(ffn)).unwrap();
                let apart = apart(&mut device, dtype, cols).unwrap();
                assert_eq!(apart, 0.0, "{dtype}, {cols}: {kernels}");
            }
        }
    }
}

/// Rows of groups are compared with the tokens that the model has: what exceeds their scale counts.
#[test]
fn tokens_with_one_scale_are_others() {
    let shape = shape(DType::Q8, 96, Activation::Relu, false);
    let sums = |scales| {
        let mut reference = Reference::new(&shape, scales).unwrap();
        reference.sums(Case::new(3, 1.0)).unwrap()
    };
    let [one, groups] = [TokenScales::One, TokenScales::ByGroup].map(sums);
    assert!(one.len() == groups.len() && one != groups);
}
