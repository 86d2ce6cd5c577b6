//! Devices that hang are errors.

use super::*;
use crate::device::{CpuDevice, ProductRoom};

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
        dtype: emberflow_kernels::DType::Q8,
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
