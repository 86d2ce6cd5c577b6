//! The shape of a model's FFNs.

use emberflow_models::config::FfnKind;

use crate::bundle::NeuronFormat;
use crate::device::DenseShape;

/// The same for all banks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FfnShape {
    pub format: NeuronFormat,
    pub kind: FfnKind,
    /// Compute every neuron, even if its gate does not fire.
    pub dense: bool,
}

impl FfnShape {
    /// The same for a device.
    pub fn of_device(&self) -> DenseShape {
        DenseShape {
            dtype: self.format.dtype,
            d: self.format.d,
            kind: self.kind,
        }
    }
}
