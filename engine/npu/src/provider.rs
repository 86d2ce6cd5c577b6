//! Who computes graphs.

use std::fmt;
use std::str::FromStr;

use ort::ep::{self, ExecutionProvider, ExecutionProviderDispatch};

use crate::error::Error;

/// Who computes graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Provider {
    /// ONNX Runtime's own kernels for processors.
    Cpu,
    /// Intel's OpenVINO: its NPU where there is one.
    OpenVino,
    /// Its kernels for processors, for tests.
    OpenVinoCpu,
    /// Qualcomm's QNN: the Hexagon NPU.
    Qnn,
    /// Apple's Core ML: the Neural Engine.
    CoreMl,
}

impl Provider {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Cpu,
        Self::OpenVino,
        Self::OpenVinoCpu,
        Self::Qnn,
        Self::CoreMl,
    ];

    /// The one to expect on such a machine: of Apple, of Arm, or of another.
    pub const HERE: Self = if cfg!(target_vendor = "apple") {
        Self::CoreMl
    } else if cfg!(target_arch = "aarch64") {
        Self::Qnn
    } else {
        Self::OpenVino
    };

    /// The stand-in for an NPU in tests: what `EMBERFLOW_TEST_PROVIDER` names, or ONNX Runtime's own kernels.
    ///
    /// # Errors
    /// No such provider.
    pub fn for_tests() -> Result<Self, String> {
        match std::env::var("EMBERFLOW_TEST_PROVIDER") {
            Ok(name) => name.parse(),
            Err(_) => Ok(Self::Cpu),
        }
    }

    /// Its name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::OpenVino => "openvino",
            Self::OpenVinoCpu => "openvino-cpu",
            Self::Qnn => "qnn",
            Self::CoreMl => "coreml",
        }
    }

    /// Whether the library has it.
    pub(crate) fn is_available(self) -> Result<bool, Error> {
        let available = match self {
            Self::Cpu => ep::CPU::is_available(),
            Self::OpenVino | Self::OpenVinoCpu => ep::OpenVINO::is_available(),
            Self::Qnn => ep::QNN::is_available(),
            Self::CoreMl => ep::CoreML::is_available(),
        };
        available.map_err(Error::of)
    }

    /// The provider for a session; a failure to register it is an error.
    pub(crate) fn dispatch(self) -> ExecutionProviderDispatch {
        let provider = match self {
            Self::Cpu => ep::CPU::default().with_arena_allocator(false).build(),
            Self::OpenVino => ep::OpenVINO::default().with_device_type("NPU").build(),
            Self::OpenVinoCpu => ep::OpenVINO::default().with_device_type("CPU").build(),
            Self::Qnn => ep::QNN::default().with_backend_path(QNN).build(),
            Self::CoreMl => ep::CoreML::default().build(),
        };
        provider.error_on_failure()
    }

    /// How to get it.
    pub(crate) fn advice(self) -> &'static str {
        match self {
            Self::Cpu => "install the package onnxruntime",
            Self::OpenVino | Self::OpenVinoCpu => {
                "`pip install onnxruntime-openvino` in place of onnxruntime"
            }
            Self::Qnn => "`pip install onnxruntime-qnn` in place of onnxruntime",
            Self::CoreMl => "use the package onnxruntime for macOS",
        }
    }
}

/// QNN's library for the Hexagon NPU, by the names that its package has.
const QNN: &str = if cfg!(windows) {
    "QnnHtp.dll"
} else {
    "libQnnHtp.so"
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
