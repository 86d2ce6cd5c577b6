//! NPUs, through ONNX Runtime.

use emberflow_engine::device::Provider;
use serde_json::{Value, json};

use super::check::Check;
use crate::probe::npu::{Found, probe};
use crate::probe::{Cause, Unusable};

/// Finds ONNX Runtime, and compares all its providers with the CPU, each in a separate process.
pub(super) fn npu() -> Check {
    const NAME: &str = "npu";
    let first = match probe(Provider::Cpu) {
        Ok(found) => found,
        Err(Unusable { cause, what }) => {
            let check = Check::ok(NAME, format!("none: {what}")).with("devices", json!([]));
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
    let known = |name: &String| name.parse().ok();
    let providers = first.providers.iter().filter_map(known);
    let results: Vec<OfProvider> = providers
        .map(|provider| OfProvider {
            provider,
            found: match provider {
                Provider::Cpu => Ok(first.clone()),
                _ => probe(provider),
            },
        })
        .collect();
    let texts: Vec<String> = results.iter().map(OfProvider::words).collect();
    let data: Vec<Value> = results.iter().map(OfProvider::json).collect();
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
    fn words(&self) -> String {
        let judged = match &self.found {
            Ok(Found {
                formats, same_bits, ..
            }) => {
                let not = if *same_bits { "" } else { "not " };
                format!("{not}bit-identical to the CPU in {}", formats.join(", "))
            }
            Err(e) => format!("not usable: {}", e.what),
        };
        format!("npu:{} {judged}", self.provider)
    }

    fn json(&self) -> Value {
        json!({
            "device": format!("npu:{}", self.provider),
            "formats": self.found.as_ref().ok().map(|found| &found.formats),
            "same_bits": self.found.as_ref().ok().map(|found| found.same_bits),
            "error": self.found.as_ref().err().map(|e| &e.what),
        })
    }
}
