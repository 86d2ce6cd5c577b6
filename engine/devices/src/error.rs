//! Failures of devices.

use emberflow_engine::Error;

/// A device failed; it is not used again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("device {device}: {what}")]
pub struct DeviceError {
    /// Name of the device.
    pub device: String,
    /// What failed.
    pub what: String,
}

/// Why a model is not computed with devices.
#[derive(Debug, thiserror::Error)]
pub enum DeviceUse {
    /// A device failed, or cannot compute this model.
    #[error("{0}; --device none runs without it")]
    Failed(#[from] DeviceError),
    /// Devices cannot be used with these options.
    #[error("a device computes neurons of {0}; --device none runs without it")]
    Options(&'static str),
    /// A device that does not know activations with one scale.
    #[error(
        "{0} does not know activations with one scale per token, which rows of q8c and q4c take: pack the model with --quant q8 \
         or q4, or use --device npu, cpu or none"
    )]
    Scales(String),
}

impl From<DeviceUse> for Error {
    fn from(why: DeviceUse) -> Self {
        Self::Lane(Box::new(why))
    }
}

impl From<DeviceError> for Error {
    fn from(failure: DeviceError) -> Self {
        DeviceUse::from(failure).into()
    }
}
