//! Every form of the kernels on the OpenCL devices of this machine beside the CPU, bit for bit, chosen or not: odd widths, short
//! clusters, masks, biases, denormals, infinities. Forms with integer dot products are run by plain arithmetic where a device
//! has none; forms of subgroups where it has these.

use emberflow_kernels::DType;
use emberflow_models::config::{Activation, FfnKind};

use super::compare::{Both, Case, cases};
use super::product_ways::apart;
use super::{
    Choices, Dense, DenseShape, Device, DeviceChoice, Dots, Form, Kernels, Order, Team, Ways, list,
};

/// Devices with memories of their own, so that both orders are possible.
fn devices() -> Vec<Device> {
    let count = super::tests::devices().len();
    assert_eq!(count, list().len());
    let open = |number| DeviceChoice::OpenClApart(number).open().unwrap().unwrap();
    (0..count).map(open).collect()
}

/// All forms that can be run for a format.
fn forms(dense: &dyn Dense, dtype: DType) -> Vec<Form> {
    let Choices { orders, forms, .. } = dense.choices(dtype);
    assert_eq!(orders, [Order::Rows, Order::Tiles]);
    let teams = [Team::Alone, Team::Local, Team::Subgroup, Team::Block];
    let has = |team: &Team| forms.iter().any(|form| form.team == *team);
    let dots: &[Dots] = match dtype.is_grouped() {
        true => &[Dots::Widened, Dots::Packed],
        false => &[Dots::Widened],
    };
    let teams = teams.into_iter().filter(has);
    teams
        .flat_map(|team| dots.iter().map(move |&dots| Form { team, dots }))
        .collect()
}

/// Teams that have a tile together, where there are such.
fn kernels(order: Order, form: Form) -> Kernels {
    let mut hidden = Ways::from(form);
    if order == Order::Tiles && form.team == Team::Local {
        (hidden.one.group, hidden.several.group) = (512, 256);
    }
    if form.team == Team::Block {
        (hidden.one.group, hidden.many.group) = (256, 128);
    }
    Kernels {
        order,
        hidden,
        ..Kernels::default()
    }
}

/// Compares all forms for a shape; those of one device that differ.
fn compared(device: &Device, shape: &DenseShape) -> Vec<String> {
    let lease = device.lease().unwrap();
    let mut dense = lease.dense();
    let forms = forms(dense.as_ref(), shape.dtype);
    let mut both = Both::new(dense.as_mut(), shape).unwrap();
    let mut differ = Vec::new();
    for order in [Order::Rows, Order::Tiles] {
        for &form in &forms {
            both.set(&kernels(order, form)).unwrap();
            let hard = [f32::INFINITY, 1e-42, 3e38].map(|size| Case::new(5, size).biased());
            // 8 rows an item of wide sums, and 4 that are left; those of masks.
            let many = [20, 72].map(|rows| Case::new(rows, 1.0).biased().totals());
            let hard = hard
                .into_iter()
                .chain(many)
                .chain([Case::new(72, 1.0).masked()]);
            for case in cases().into_iter().chain(hard) {
                let apart = both.compare(case).unwrap();
                if !apart.same_bits {
                    differ.push(format!("{order}, {form}, {case:?}: {apart:?}"));
                }
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
    for device in devices() {
        for shape in [
            // Three groups; more than two chunks, the last group short; elements that fill no unit, and no step.
            shape(DType::Q4, 96, Activation::Relu, false),
            shape(DType::Q4, 1100, Activation::Silu, false),
            shape(DType::Q8, 530, Activation::Relu2, false),
            shape(DType::Q8, 96, Activation::FatRelu { threshold: 0.01 }, true),
            shape(DType::F16, 1100, Activation::Relu, false),
            shape(DType::BF16, 99, Activation::Silu, true),
            shape(DType::F32, 98, Activation::GeluTanh, false),
        ] {
            let differ = compared(&device, &shape);
            assert!(differ.is_empty(), "{shape:?}: {differ:#?}");
        }
    }
}

#[test]
fn every_form_has_the_cpus_products() {
    for device in devices() {
        for (dtype, cols) in [
            (DType::Q4, 96),
            (DType::Q4, 1100),
            (DType::Q8, 530),
            (DType::F16, 1100),
            (DType::BF16, 99),
            (DType::F32, 98),
        ] {
            let lease = device.lease().unwrap();
            let mut dense = lease.dense();
            dense
                .prepare(&shape(DType::Q4, 96, Activation::Relu, false))
                .unwrap();
            for order in [Order::Rows, Order::Tiles] {
                dense.set_kernels(&kernels(order, Form::default())).unwrap();
                for form in forms(dense.as_ref(), dtype) {
                    let apart = apart(dense.as_mut(), dtype, cols, form).unwrap();
                    assert_eq!(apart, 0.0, "{dtype}, {cols}: {order}, {form}");
                }
            }
        }
    }
}

/// Blocks in work groups of all sizes, for fewer tokens than a block has and for more.
#[test]
fn blocks_of_all_sizes_have_the_cpus_bits() {
    let block = Form {
        team: Team::Block,
        dots: Dots::Widened,
    };
    for device in devices() {
        let lease = device.lease().unwrap();
        let mut dense = lease.dense();
        let groups = dense.choices(DType::Q4).groups;
        for dtype in [DType::Q4, DType::F16] {
            let shape = shape(dtype, 160, Activation::Relu, false);
            let mut both = Both::new(dense.as_mut(), &shape).unwrap();
            for &group in &groups {
                let mut of = kernels(Order::Tiles, block);
                for way in of.hidden.each_mut() {
                    way.group = group;
                }
                both.set(&of).unwrap();
                for case in [2, 21].map(|rows| Case::new(rows, 1.0).masked().biased()) {
                    let Ok(apart) = both.compare(case) else {
                        // Its registers are too few for so many items.
                        assert!(group > 256, "{dtype}, {group}");
                        continue;
                    };
                    assert!(apart.same_bits, "{dtype}, {group}, {case:?}: {apart:?}");
                }
            }
        }
    }
}
