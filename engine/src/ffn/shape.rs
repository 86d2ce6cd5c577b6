//! The shape of a model's FFNs.

use emberflow_models::config::FfnKind;

use crate::bundle::NeuronFormat;

/// Properties shared by all banks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FfnShape {
    pub format: NeuronFormat,
    pub kind: FfnKind,
    /// Compute every neuron, even if its gate does not fire.
    pub dense: bool,
}
