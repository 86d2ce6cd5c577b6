//! NPUs, through ONNX Runtime.

use emberflow_devices::{NpuDevice, Provider};
use serde_json::{Value, json};

use super::check::Check;
use crate::probe::npu::{Found, probe};
use crate::probe::{Cause, Unusable};

/// Finds ONNX Runtime, and compares all providers with the CPU, each in a separate process. Says of those that are missing
/// what to install. Graphs that are saved are removed if they are to be tried `again`.
pub(super) fn npu(again: bool) -> Check {
    const NAME: &str = "npu";
    if again && let Err(e) = NpuDevice::forget_graphs() {
        return Check::unknown(NAME, format!("saved graphs cannot be removed: {e}"));
    }
    let first = probe(Provider::Cpu);
    let results = Provider::ALL.map(|provider| OfProvider {
        provider,
        found: match (provider, &first) {
            (Provider::Cpu, _) | (_, Err(_)) => first.clone(),
            _ => probe(provider),
        },
    });
    let data: Vec<Value> = results.iter().map(OfProvider::json).collect();
    let first = match first {
        Ok(found) => found,
        Err(Unusable { cause, what }) => {
            let check = Check::ok(NAME, format!("none: {what}")).with("devices", data);
            return match cause {
                // An NPU is optional; the finding says how to get one.
                Cause::Missing | Cause::Static => check,
                Cause::Broken => check.advise(
                    "install another ONNX Runtime: `pip install --upgrade onnxruntime`; where \
                     EMBERFLOW_ONNXRUNTIME or ORT_DYLIB_PATH is set, set it to that one's path",
                ),
            };
        }
    };
    let texts = results.iter().map(|of| of.words(&first.library));
    let texts: Vec<String> = texts.collect();
    let found = format!(
        "ONNX Runtime {} ({}): {}",
        first.library,
        first.build,
        texts.join("; ")
    );
    Check::ok(NAME, found)
        .with("library", first.library)
        .with("build", first.build)
        .with("devices", data)
}

/// A provider and its result.
struct OfProvider {
    provider: Provider,
    found: Result<Found, Unusable>,
}

impl OfProvider {
    /// What to install for one that is missing; `Err` with what it needs if this machine cannot have it.
    fn advice(&self) -> Option<Result<&'static str, &'static str>> {
        let error = self.found.as_ref().err()?;
        (error.cause == Cause::Missing).then(|| self.provider.advice())
    }

    /// Describes it; names its library unless that is `usual`.
    fn words(&self, usual: &str) -> String {
        let judged = match (&self.found, self.advice()) {
            (Ok(found), _) => {
                let not = if found.same_bits { "" } else { "not " };
                let (formats, library) = (found.formats.join(", "), &found.library);
                let by = match library == usual {
                    true => String::new(),
                    false => format!(", by {library}"),
                };
                format!("{not}bit-identical to the CPU in {formats}{by}")
            }
            (Err(_), Some(Ok(advice) | Err(advice))) => format!("missing: {advice}"),
            (Err(e), None) => format!("not usable: {}", e.what),
        };
        format!("npu:{} {judged}", self.provider)
    }

    fn json(&self) -> Value {
        json!({
            "device": format!("npu:{}", self.provider),
            "library": self.found.as_ref().ok().map(|found| &found.library),
            "formats": self.found.as_ref().ok().map(|found| &found.formats),
            "same_bits": self.found.as_ref().ok().map(|found| found.same_bits),
            "error": self.found.as_ref().err().map(|e| &e.what),
            "install": self.advice().and_then(Result::ok),
        })
    }
}
