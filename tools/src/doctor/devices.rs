//! Devices that can compute neurons beside the processor.

use emberflow_engine::device::check::{Speed, check};
use emberflow_engine::device::{DenseShape, DeviceChoice, DeviceError, Listed, Verdict, list};
use emberflow_kernels::DType;
use emberflow_models::config::{Activation, FfnKind};
use serde_json::{Value, json};

use super::check::Check;
use crate::size;

/// The FFN that devices are tried with: that of a model of seven billion parameters in q4.
const SHAPE: DenseShape = DenseShape {
    dtype: DType::Q4,
    d: 4096,
    kind: FfnKind {
        activation: Activation::Silu,
        relu_on_up: false,
        ungated: false,
    },
};

/// GB/s of weights.
fn rate(speed: Speed) -> f64 {
    SHAPE.neuron_bytes() as f64 / speed.neuron / 1e9
}

/// Tries a device out.
fn verdict(number: usize) -> Result<Verdict, DeviceError> {
    match DeviceChoice::OpenCl(number).open()? {
        Some(device) => check(device.lease()?.dense().as_mut(), &SHAPE),
        None => Err(DeviceError {
            device: format!("opencl:{number}"),
            what: "is gone".into(),
        }),
    }
}

/// A device in words.
fn words(number: usize, of: &Listed, verdict: &Result<Verdict, DeviceError>) -> String {
    let judged = match verdict {
        Err(e) => format!("not usable: {e}"),
        Ok(v) => format!(
            "{}, {:.2} ms to launch, {:.1} GB/s beside {:.1} of a thread",
            match v.same_bits {
                true => "same bits as the CPU".to_owned(),
                false => format!("numerics of its own, apart by {:.0e}", v.worst),
            },
            v.speed.launch * 1e3,
            rate(v.speed),
            rate(v.cpu)
        ),
    };
    format!(
        "opencl:{number} {} ({}, {} units, {}{}): {judged}",
        of.facts.name,
        of.facts.driver,
        of.units,
        size::show(of.facts.memory),
        if of.facts.unified { " shared" } else { "" },
    )
}

fn json(number: usize, of: &Listed, verdict: &Result<Verdict, DeviceError>) -> Value {
    let judged = verdict.as_ref().ok();
    json!({
        "device": format!("opencl:{number}"),
        "name": of.facts.name,
        "driver": of.facts.driver,
        "gpu": of.gpu,
        "units": of.units,
        "memory_bytes": of.facts.memory,
        "unified": of.facts.unified,
        "extensions": of.extensions,
        "same_bits": judged.map(|v| v.same_bits),
        "deviation": judged.map(|v| v.worst),
        "launch_ms": judged.map(|v| v.speed.launch * 1e3),
        "gb_per_s": judged.map(|v| rate(v.speed)),
        "cpu_gb_per_s": judged.map(|v| rate(v.cpu)),
        "error": verdict.as_ref().err().map(ToString::to_string),
    })
}

/// The OpenCL devices, each tried out.
pub(super) fn devices() -> Check {
    const NAME: &str = "devices";
    let found = list();
    if found.is_empty() {
        return Check::ok(NAME, "none: no OpenCL driver was found").with("devices", json!([]));
    }
    let verdicts: Vec<_> = (0..found.len()).map(verdict).collect();
    let each = found.iter().zip(&verdicts).enumerate();
    let texts: Vec<String> = (each.clone())
        .map(|(i, (of, verdict))| words(i, of, verdict))
        .collect();
    let data: Vec<Value> = each
        .map(|(i, (of, verdict))| json(i, of, verdict))
        .collect();
    let check = Check::ok(NAME, texts.join("; ")).with("devices", data);
    match verdicts.iter().any(Result::is_ok) {
        true => check,
        false => check.advise("update its driver, or run with --device none"),
    }
}
