//! Execution providers of ONNX Runtime.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use ort::ep::{self, ExecutionProvider};
use ort::session::builder::SessionBuilder;

use crate::error::Error;
use crate::graph::{Floats, Numbers};
use crate::library::Library;
use crate::plugin;

/// An execution provider of ONNX Runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Provider {
    /// ONNX Runtime's own CPU kernels.
    Cpu,
    /// The same with float graphs, for tests.
    CpuFloats,
    /// The same with 16-bit float graphs, for tests; results differ from the CPU's.
    CpuHalves,
    /// Intel's NPU, by OpenVINO.
    OpenVino,
    /// OpenVINO's CPU kernels, for tests.
    OpenVinoCpu,
    /// Qualcomm's Hexagon NPU, by QNN.
    Qnn,
    /// QNN's simulator on x86-64, for tests.
    QnnCpu,
    /// Apple's Neural Engine, by Core ML.
    CoreMl,
}

impl Provider {
    /// All providers.
    pub const ALL: [Self; 8] = [
        Self::Cpu,
        Self::CpuFloats,
        Self::CpuHalves,
        Self::OpenVino,
        Self::OpenVinoCpu,
        Self::Qnn,
        Self::QnnCpu,
        Self::CoreMl,
    ];

    /// The usual provider on this platform.
    pub const HERE: Self = if cfg!(target_vendor = "apple") {
        Self::CoreMl
    } else if cfg!(target_arch = "aarch64") {
        Self::Qnn
    } else {
        Self::OpenVino
    };

    /// The stand-in for an NPU in tests: the provider named by `EMBERFLOW_TEST_PROVIDER`, or [`Provider::Cpu`].
    ///
    /// # Errors
    /// An unknown name.
    pub fn for_tests() -> Result<Self, String> {
        match std::env::var("EMBERFLOW_TEST_PROVIDER") {
            Ok(name) => name.parse(),
            Err(_) => Ok(Self::Cpu),
        }
    }

    /// Name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::CpuFloats => "cpu-floats",
            Self::CpuHalves => "cpu-halves",
            Self::OpenVino => "openvino",
            Self::OpenVinoCpu => "openvino-cpu",
            Self::Qnn => "qnn",
            Self::QnnCpu => "qnn-cpu",
            Self::CoreMl => "coreml",
        }
    }

    /// Whether the library of this provider is installed beside `library`, judged by file names before loading.
    pub(crate) fn is_beside(self, library: &Path) -> bool {
        match self {
            Self::Cpu | Self::CpuFloats | Self::CpuHalves | Self::CoreMl => true,
            Self::OpenVino | Self::OpenVinoCpu => library.with_file_name(OPENVINO).is_file(),
            Self::Qnn | Self::QnnCpu => plugin::path(library).is_some(),
        }
    }

    /// Whether a loaded library has this provider.
    pub(crate) fn is_available(self, library: &Library) -> Result<bool, Error> {
        let available = match self {
            Self::Cpu | Self::CpuFloats | Self::CpuHalves => ep::CPU::is_available(),
            Self::OpenVino | Self::OpenVinoCpu => ep::OpenVINO::is_available(),
            Self::Qnn | Self::QnnCpu => {
                let simulated = self == Self::QnnCpu;
                return Ok(plugin::register(library)?
                    && plugin::device(&library.environment, simulated).is_some());
            }
            Self::CoreMl => ep::CoreML::is_available(),
        };
        available.map_err(Error::of)
    }

    /// Kinds of graphs to try in this order.
    pub(crate) fn numbers(self) -> &'static [Numbers] {
        const SINGLE: Numbers = Numbers::Floats(Floats::Single);
        match self {
            Self::Cpu => &[Numbers::Integers],
            Self::CpuFloats | Self::Qnn | Self::QnnCpu => &[SINGLE],
            Self::CpuHalves => &[Numbers::Floats(Floats::Half)],
            Self::OpenVino | Self::OpenVinoCpu | Self::CoreMl => &[Numbers::Integers, SINGLE],
        }
    }

    /// Whether this provider compiles graphs, which takes time.
    pub(crate) fn compiles(self) -> bool {
        !matches!(self, Self::Cpu | Self::CpuFloats | Self::CpuHalves)
    }

    /// Whether float graphs may be computed in 16 bits.
    pub fn halves(self) -> bool {
        !matches!(self, Self::Cpu | Self::CpuFloats | Self::OpenVinoCpu)
    }

    /// Registers this provider for a session; failing to do so is an error.
    pub(crate) fn register(
        self,
        builder: SessionBuilder,
        library: &Library,
    ) -> Result<SessionBuilder, Error> {
        let builder = match self {
            Self::Cpu | Self::CpuFloats | Self::CpuHalves => builder,
            _ => builder.with_disable_cpu_fallback().map_err(Error::of)?,
        };
        let environment = &library.environment;
        let provider = match self {
            Self::Cpu | Self::CpuFloats | Self::CpuHalves => {
                // Selected by its device: without one, ONNX Runtime chooses among all providers.
                let mut devices = environment.devices();
                let device = devices.find(|device| device.ep().is_ok_and(|name| name == CPU));
                let no_arena = [(format!("{CPU}.use_arena"), "0".to_owned())];
                return (builder.with_devices(device, Some(&no_arena))).map_err(Error::of);
            }
            Self::OpenVino => ep::OpenVINO::default().with_device_type("NPU").build(),
            Self::OpenVinoCpu => ep::OpenVINO::default().with_device_type("CPU").build(),
            // The older format requires constant weights.
            Self::CoreMl => ep::CoreML::default()
                .with_model_format(ep::coreml::ModelFormat::MLProgram)
                .build(),
            Self::Qnn | Self::QnnCpu => {
                let device = plugin::device(environment, self == Self::QnnCpu);
                let builder = builder.with_devices(device, Some(&plugin::options()));
                return builder.map_err(Error::of);
            }
        };
        let builder = builder.with_execution_providers([provider.error_on_failure()]);
        builder.map_err(Error::of)
    }

    /// What to install for this provider.
    ///
    /// # Errors
    /// This machine cannot run it; names the machines that can.
    pub fn advice(self) -> Result<&'static str, &'static str> {
        const APPLE: bool = cfg!(target_vendor = "apple");
        const X86: bool = cfg!(target_arch = "x86_64");
        match self {
            Self::Cpu | Self::CpuFloats | Self::CpuHalves => Ok("`pip install onnxruntime`"),
            Self::OpenVino | Self::OpenVinoCpu if APPLE || !X86 => Err("x86-64 without macOS only"),
            Self::OpenVino | Self::OpenVinoCpu => {
                Ok("`pip install onnxruntime-openvino` in place of onnxruntime")
            }
            Self::Qnn if APPLE || X86 => Err("machines with Qualcomm's NPU only"),
            Self::QnnCpu if APPLE || !X86 => Err("x86-64 without macOS only"),
            Self::Qnn => {
                Ok("`pip install onnxruntime onnxruntime-qnn`, on a machine with that NPU")
            }
            Self::QnnCpu => Ok("`pip install onnxruntime onnxruntime-qnn`"),
            Self::CoreMl if !APPLE => Err("macOS only"),
            Self::CoreMl => Ok("`pip install onnxruntime`"),
        }
    }
}

/// ONNX Runtime's name of its CPU provider.
const CPU: &str = "CPUExecutionProvider";

/// File name of OpenVINO's provider.
const OPENVINO: &str = if cfg!(windows) {
    "onnxruntime_providers_openvino.dll"
} else {
    "libonnxruntime_providers_openvino.so"
};

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Provider {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|known| known.name() == name);
        known.ok_or_else(|| format!("no provider of NPUs is called {name:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_beside_a_library_tell_its_providers() {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().join("libonnxruntime.so.1");
        assert!(Provider::Cpu.is_beside(&library));
        assert!(!Provider::OpenVino.is_beside(&library) && !Provider::QnnCpu.is_beside(&library));
        std::fs::write(library.with_file_name(OPENVINO), "").unwrap();
        assert!(Provider::OpenVino.is_beside(&library) && !Provider::Qnn.is_beside(&library));
    }
}
