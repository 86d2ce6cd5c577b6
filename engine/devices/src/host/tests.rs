//! Devices that hang are errors, and those with a graph that is not exact have a class of their own.

use emberflow_kernels::DType;
use emberflow_models::config::{Activation, FfnKind};

use super::*;
use crate::cpu::OneByOne;
use crate::{CpuDevice, Device, ProductRoom, TokenScales, check};

/// A driver that hangs in the first call.
struct Hangs(Receiver<()>);

impl Arithmetic for Hangs {
    fn prepare(&mut self, _: &Program) -> Result<(), String> {
        self.0.recv().map_err(|e| e.to_string())
    }

    fn hidden(&mut self, _: &Task, _: &mut Vec<f32>) -> Result<u64, String> {
        Err("is not prepared".into())
    }

    fn sum(&mut self, _: &Task, _: usize, _: &[f32], _: &mut [f32]) {}

    fn products(
        &mut self,
        _: &SharedMatrix,
        _: Range<usize>,
        _: &Tokens,
        _: &mut Vec<f32>,
    ) -> Result<(), String> {
        Err("is not prepared".into())
    }
}

#[test]
fn a_device_that_hangs_while_it_compiles_is_an_error() {
    let (end, ended) = channel::<()>();
    let facts = CpuDevice::new().facts().clone();
    let mut device = HostDevice::computing(facts, Hangs(ended));
    device.longest = Duration::from_millis(1);
    let program = Program::Products {
        dtype: DType::Q8,
        cols: 32,
    };
    let error = device.prepare(&program).unwrap_err();
    assert!(error.what.contains("did not answer"), "{error}");
    assert_eq!(device.prepare(&program), Err(error));
    drop(end);
}

#[test]
fn a_device_that_hangs_is_lost() {
    let mut device = CpuDevice::new();
    device.longest = Duration::from_millis(1);
    let (end, ended) = channel::<()>();
    let hangs = device.begin(move |_| {
        let _ = ended.recv();
        Err(String::new())
    });
    let error = device.take(hangs.unwrap(), &mut []).unwrap_err();
    assert!(error.what.contains("did not answer"), "{error}");
    // Nothing waits for its thread.
    let room = Program::ProductRoom(ProductRoom::default());
    assert_eq!(device.prepare(&room), Err(error.clone()));
    let more = device.begin(|_| Err(String::new()));
    assert_eq!(more, Err(error));
    device.clear();
    drop(end);
}

/// The CPU's arithmetic in the sizes that a check runs; a graph of another size is not exact.
struct OtherInOneSize(OneByOne);

impl Arithmetic for OtherInOneSize {
    fn prepare(&mut self, program: &Program) -> Result<(), String> {
        self.0.prepare(program)
    }

    fn is_exact(&self) -> bool {
        false
    }

    fn hidden(&mut self, task: &Task, hidden: &mut Vec<f32>) -> Result<u64, String> {
        self.0.hidden(task, hidden)
    }

    fn sum(&mut self, task: &Task, cluster: usize, hidden: &[f32], sums: &mut [f32]) {
        self.0.sum(task, cluster, hidden, sums);
    }

    fn products(
        &mut self,
        matrix: &SharedMatrix,
        rows: Range<usize>,
        tokens: &Tokens,
        out: &mut Vec<f32>,
    ) -> Result<(), String> {
        self.0.products(matrix, rows, tokens, out)
    }
}

/// Times would decide on a text otherwise: which graphs run follows them.
#[test]
fn one_graph_that_is_not_exact_is_enough_for_a_class_of_its_own() {
    let shape = DenseShape {
        dtype: DType::Q8c,
        d: 96,
        kind: FfnKind {
            activation: Activation::Relu,
            relu_on_up: false,
            ungated: false,
        },
    };
    let facts = CpuDevice::new().facts().clone();
    let verdict = |device: Device| {
        let lease = device.lease().unwrap();
        let scales = TokenScales::of(shape.dtype);
        let verdict = check::check(lease.backend().as_mut(), &shape, scales).unwrap();
        assert_eq!(verdict.worst, 0.0);
        let products = lease.prepare_products(shape.dtype, shape.d, scales);
        (verdict.same_bits, products.unwrap())
    };
    let other = OtherInOneSize(OneByOne(Cpu::detect()));
    let other = HostDevice::computing(facts, other);
    assert_eq!(verdict(Device::new(Box::new(other))), (false, false));
    let cpu = CpuDevice::new();
    assert_eq!(verdict(Device::new(Box::new(cpu))), (true, true));
}
