//! Devices that can compute neurons in addition to the CPU.

use emberflow_devices::check::Speed;
use emberflow_devices::{
    DenseShape, DeviceChoice, DeviceError, Entry, Found, Listed, TokenScales, Verdict, Verdicts,
    checked, list,
};
use emberflow_kernels::DType;
use emberflow_models::config::{Activation, FfnKind};
use serde_json::{Value, json};

use super::check::Check;
use crate::probe::Unusable;
use crate::probe::opencl::probe;
use crate::size;
use crate::tell::tell;

/// Shape of the FFN used to test devices: a 7B model in q4.
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

/// Tests a device, or returns the stored result.
fn verdict(number: usize) -> Result<Verdict, DeviceError> {
    let choice = DeviceChoice::OpenCl(number);
    match choice.open()? {
        Some(device) => {
            let lease = device.with_verdicts(choice.verdicts()).lease()?;
            checked(&lease, &SHAPE, TokenScales::of(SHAPE.dtype))
        }
        None => Err(DeviceError {
            device: format!("opencl:{number}"),
            what: "is no longer available".into(),
        }),
    }
}

/// Extensions that kernels use.
const EXTENSIONS: [(&str, &str); 1] = [("cl_khr_integer_dot_product", "integer dot products")];

/// Everything known about a device.
struct Known {
    number: usize,
    of: Listed,
    verdict: Result<Verdict, DeviceError>,
    /// All stored results, including those of models.
    stored: Vec<Entry>,
}

impl Known {
    fn new(number: usize, of: Listed, all: &dyn Fn() -> Vec<Entry>) -> Self {
        let its = |e: &Entry| e.device == of.name && e.driver == of.driver;
        let name = &of.name;
        if !all().iter().any(its) {
            tell(format_args!(
                "emberflow: testing opencl:{number} ({name}), once; this may take a minute"
            ));
        }
        let verdict = verdict(number);
        let stored = all().into_iter().filter(|e| its(e)).collect();
        Self {
            number,
            of,
            verdict,
            stored,
        }
    }

    /// Number of stored results that failed.
    fn wrong(&self) -> usize {
        let wrong = |e: &&Entry| matches!(e.found, Found::Wrong(_));
        self.stored.iter().filter(wrong).count()
    }

    /// Describes the device.
    fn words(&self) -> String {
        let Self { of, verdict, .. } = self;
        let judged = match verdict {
            Err(e) => format!("not usable: {e}"),
            Ok(v) => format!(
                "{}, {:.2} ms per launch, {:.1} GB/s against {:.1} of a CPU thread; {}",
                if v.same_bits {
                    "bit-identical to the CPU".to_owned()
                } else {
                    format!("not bit-identical to the CPU, error {:.0e}", v.worst)
                },
                v.speed.launch * 1e3,
                rate(v.speed),
                rate(v.cpu),
                of.kernels[1],
            ),
        };
        let has = EXTENSIONS.iter().map(|(name, short)| {
            if of.extensions.iter().any(|found| found == name) {
                (*short).to_owned()
            } else {
                format!("no {short}")
            }
        });
        let has = has.collect::<Vec<_>>().join(", ");
        format!(
            "opencl:{} {} ({}, {} units, {}{}; {has}): {judged}; {} stored results, {} of them failed",
            self.number,
            of.name,
            of.driver,
            of.units,
            size::show(of.memory),
            if of.unified { " shared" } else { "" },
            self.stored.len(),
            self.wrong(),
        )
    }

    fn json(&self) -> Value {
        let Self { of, verdict, .. } = self;
        let judged = verdict.as_ref().ok();
        json!({
            "device": format!("opencl:{}", self.number),
            "name": of.name,
            "driver": of.driver,
            "gpu": of.gpu,
            "units": of.units,
            "memory_bytes": of.memory,
            "unified": of.unified,
            "extensions": of.extensions,
            "same_bits": judged.map(|v| v.same_bits),
            "deviation": judged.map(|v| v.worst),
            "launch_ms": judged.map(|v| v.speed.launch * 1e3),
            "gb_per_s": judged.map(|v| rate(v.speed)),
            "cpu_gb_per_s": judged.map(|v| rate(v.cpu)),
            "order": of.kernels[1].order,
            "kernels": of.kernels[1],
            "error": verdict.as_ref().err().map(ToString::to_string),
            "verdicts": self.stored.iter().map(stored_json).collect::<Vec<_>>(),
        })
    }
}

/// A stored result as JSON.
fn stored_json(entry: &Entry) -> Value {
    let (same_bits, wrong) = match &entry.found {
        Found::Wrong(how) => (None, Some(how)),
        Found::Right => (None, None),
        Found::Sums(verdict) => (Some(verdict.same_bits), None),
        // Others get no products, and are not left out.
        Found::Products(_) | Found::Passes { .. } => (Some(true), None),
    };
    json!({
        "kernels": entry.kernels,
        "same_bits": same_bits,
        "wrong": wrong,
    })
}

/// Tests all OpenCL devices; `again` discards stored results first.
pub(super) fn devices(again: bool) -> Check {
    const NAME: &str = "devices";
    let verdicts = Verdicts::here();
    if again
        && let Some(verdicts) = &verdicts
        && let Err(e) = verdicts.forget()
    {
        let path = verdicts.path().display();
        return Check::unknown(NAME, format!("{path} cannot be removed: {e}"));
    }
    let failed =
        |e: Unusable| Check::ok(NAME, format!("OpenCL: {}", e.what)).with("devices", json!([]));
    if let Err(e) = probe(None) {
        return failed(e);
    }
    let found = list();
    if let Some(e) = (0..found.len()).find_map(|number| probe(Some(number)).err()) {
        return failed(e);
    }
    if found.is_empty() {
        return Check::ok(NAME, "none: no OpenCL driver found").with("devices", json!([]));
    }
    let all = || verdicts.as_ref().map_or_else(Vec::new, Verdicts::all);
    let known: Vec<Known> = (found.into_iter().enumerate())
        .map(|(number, of)| Known::new(number, of, &all))
        .collect();
    let texts: Vec<String> = known.iter().map(Known::words).collect();
    let data: Vec<Value> = known.iter().map(Known::json).collect();
    let check = Check::ok(NAME, texts.join("; ")).with("devices", data);
    let usable = known.iter().any(|known| known.verdict.is_ok());
    if usable && known.iter().all(|known| known.wrong() == 0) {
        check
    } else {
        check.advise("update the driver and test again with --retry-devices, or use --device none")
    }
}
